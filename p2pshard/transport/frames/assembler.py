"""Messages into frames."""

from __future__ import annotations

import time
import zlib

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.frames.checks import fail
from p2pshard.transport.frames.header import Header, decode_header
from p2pshard.transport.frames.values import Array, Arrival, Frame, Limits
from p2pshard.transport.frames.wire import CHUNK_BYTES, FIRST, KINDS, MAGIC, REST, SPENT, VERSION

__all__ = ["Assembler"]


class Assembler:
    """Puts one stream's messages together again.

    After a `ProtocolError` it must not be fed again: the stream is out of step. `epoch` set: frames
    of another epoch are refused (set once the hello has been read).
    """

    def __init__(
        self, limits: Limits, *, epoch: Epoch | None = None, kinds: frozenset[str] = frozenset(KINDS)
    ) -> None:
        self._limits = limits
        self.epoch = epoch
        self.kinds = kinds
        """The kinds that this end of the stream may be sent."""
        self._arrived = 0
        self._fed_s = 0.0
        self._index = self._header_bytes = self._body_bytes = self._announced_crc = 0
        self._spent = SPENT.pack(0)
        self._open = False
        """Inside a frame."""
        self._reset()

    def _reset(self) -> None:
        self._packed = bytearray()
        """What has come of the header."""
        self._header: Header | None = None
        self._payload = bytearray()
        """All of the tensors' bytes, of which `_filled` have come. The one copy of them that is made here."""
        self._filled = self._crc = 0

    def feed(self, message: bytes) -> Frame | None:
        """The frame that this message completes, or None when more are to come. Raises `ProtocolError`."""
        begun = time.perf_counter()
        whole = self._take(message)
        arrays = self._finish() if whole else {}
        self._arrived += len(message)
        self._fed_s += time.perf_counter() - begun
        if not whole:
            return None
        assert self._header is not None
        spent_us = SPENT.unpack(self._spent)[0] + int(self._fed_s * 1e6)
        frame = self._header.frame(arrays, Arrival(self._arrived, spent_us))
        self._arrived, self._fed_s = 0, 0.0
        self._reset()
        return frame

    def _take(self, message: bytes) -> bool:
        """Whether it completes the frame."""
        if len(message) > CHUNK_BYTES or len(message) < REST.size or message[:2] != MAGIC:
            raise fail(f"a message of {len(message)} bytes that is not ours")
        if message[2] != VERSION:
            raise ProtocolError(
                f"the sender speaks frame version {message[2]}, this build {VERSION}; "
                "run the same p2pshard version on both",
                theirs=message[2],
                ours=VERSION,
            )
        data = memoryview(message)[self._begin(message) :]
        if not len(data):
            raise fail("a message without content")
        self._crc = zlib.crc32(data, self._crc)
        if self._header is None:
            taken = data[: self._header_bytes - len(self._packed)]
            self._packed += taken
            if len(self._packed) < self._header_bytes:
                return False
            data = data[len(taken) :]
            self._header = self._read_header()
        end = self._filled + len(data)
        if end > len(self._payload):
            raise fail("more bytes than announced")
        memoryview(self._payload)[self._filled : end] = data  # a bytearray's own slice would copy it twice
        self._filled = end
        return end == len(self._payload)

    def _begin(self, message: bytes) -> int:
        """Check the message's prefix against where we are; its size."""
        if message[3] == 1:
            index = REST.unpack_from(message)[3]
            if not self._open or index != self._index + 1:
                raise fail(f"part {index} where part {self._index + 1 if self._open else 0} was due")
            self._index = index
            return REST.size
        if message[3] != 0 or len(message) < FIRST.size:
            raise fail("unknown part")
        if self._open:
            raise fail("a frame begins inside another")
        _, _, _, header, body, spent, crc = FIRST.unpack_from(message)
        limits = self._limits
        if not 1 <= header <= limits.header_bytes or not 0 <= body - header <= limits.payload_bytes:
            raise fail(
                f"{header} header and {body - header} payload bytes; "
                f"the plan allows {limits.header_bytes} and {limits.payload_bytes}"
            )
        self._header_bytes, self._body_bytes, self._announced_crc = header, body, crc
        self._spent, self._index, self._open = spent, 0, True
        return FIRST.size

    def _read_header(self) -> Header:
        header = decode_header(self._packed, self._limits, self.epoch, self.kinds)
        size = sum(t.nbytes for t in header.tensors)
        if size != self._body_bytes - self._header_bytes:
            raise fail(f"tensors need {size} bytes, {self._body_bytes - self._header_bytes} announced")
        self._payload = bytearray(size)
        return header

    def _finish(self) -> dict[str, Array]:
        if zlib.crc32(self._spent, self._crc) != self._announced_crc:
            raise fail("checksum is wrong")
        assert self._header is not None
        arrays, offset = {}, 0
        for meta in self._header.tensors:
            arrays[meta.name] = meta.codec.decode(self._payload, offset, meta.dtype, meta.shape)
            offset += meta.nbytes
        ids = arrays.get("token_ids")
        if ids is not None and ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limits.vocab_size):
            raise fail(f"a token id outside the vocabulary of {self._limits.vocab_size}")
        self._open = False
        return arrays
