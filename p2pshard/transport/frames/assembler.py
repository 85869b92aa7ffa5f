"""Messages into frames."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.codecs import codec
from p2pshard.transport.frames.checks import fail
from p2pshard.transport.frames.header import TensorMeta, decode_header
from p2pshard.transport.frames.values import Arrival, Frame, Limits
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
        self._header = bytearray()
        self._payload = bytearray()
        self._header_bytes = self._body_bytes = self._crc = self._filled = self._index = 0
        self._spent = SPENT.pack(0)
        self._arrived = 0
        self._fed_s = 0.0
        self._frame: Frame | None = None
        self._metas: tuple[TensorMeta, ...] = ()
        self._open = False

    def feed(self, message: bytes) -> Frame | None:
        """The frame that this message completes, or None when more are to come. Raises `ProtocolError`."""
        begun = time.perf_counter()
        frame = self._take(message)
        self._arrived += len(message)
        self._fed_s += time.perf_counter() - begun
        if frame is None:
            return None
        spent_us = SPENT.unpack(self._spent)[0] + int(self._fed_s * 1e6)
        frame = replace(frame, arrival=Arrival(self._arrived, spent_us))
        self._arrived, self._fed_s = 0, 0.0
        return frame

    def _take(self, message: bytes) -> Frame | None:
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
        if self._frame is None:
            taken = data[: self._header_bytes - len(self._header)]
            self._header += taken
            data = data[len(taken) :]
            if len(self._header) < self._header_bytes:
                return None
            self._parse_header()
        end = self._filled + len(data)
        if end > len(self._payload):
            raise fail("more bytes than announced")
        self._payload[self._filled : end] = data
        self._filled = end
        return self._finish() if end == len(self._payload) else None

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
        self._header_bytes, self._body_bytes, self._crc, self._index, self._open = header, body, crc, 0, True
        self._spent = spent
        return FIRST.size

    def _parse_header(self) -> None:
        frame, self._metas = decode_header(bytes(self._header), self._limits)
        if self.epoch is not None and frame.epoch != self.epoch:
            raise ProtocolError(
                f"a frame of epoch ({frame.epoch.n}, {frame.epoch.proposer}), this stream is of "
                f"({self.epoch.n}, {self.epoch.proposer})"
            )
        if frame.kind not in self.kinds:
            raise fail(f"kind {frame.kind} has no place on this stream now")
        size = sum(m.nbytes for m in self._metas)
        if size != self._body_bytes - self._header_bytes:
            raise fail(f"tensors need {size} bytes, {self._body_bytes - self._header_bytes} announced")
        self._payload = bytearray(size)
        self._frame = frame

    def _finish(self) -> Frame:
        if zlib.crc32(self._spent, zlib.crc32(self._payload, zlib.crc32(self._header))) != self._crc:
            raise fail("checksum is wrong")
        frame, offset = self._frame, 0
        assert frame is not None
        arrays = {}
        for meta in self._metas:
            arrays[meta.name] = codec(meta.codec).decode(self._payload, offset, meta.dtype, meta.shape)
            offset += meta.nbytes
        ids = arrays.get("token_ids")
        if ids is not None and ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limits.vocab_size):
            raise fail(f"a token id outside the vocabulary of {self._limits.vocab_size}")
        frame = replace(frame, token_ids_T=ids, hidden_TD=arrays.get("hidden"))
        self._header, self._payload, self._frame, self._metas = bytearray(), bytearray(), None, ()
        self._filled, self._open = 0, False
        return frame
