"""Frames into messages."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from p2pshard.errors import P2PShardError
from p2pshard.transport.codecs import codec
from p2pshard.transport.frames.values import Array, Deltas, Frame, Hello
from p2pshard.transport.frames.wire import (
    CHUNK_BYTES,
    FIELDS,
    FIRST,
    MAGIC,
    REST,
    SAMPLING,
    SPENT,
    TEXT,
    U32,
    VERSION,
)

__all__ = ["encode"]


def encode(frame: Frame, *, chunk_bytes: int = CHUNK_BYTES, wire: str = "raw") -> Iterator[bytes]:
    """The frame's messages, each of at most `chunk_bytes`; `wire` names the codec of hidden states.

    Tensor bytes are copied once, into the messages; only one message exists at a time.
    """
    begun = time.perf_counter()
    metas: list[dict[str, Any]] = []
    segments: list[memoryview] = []
    if frame.token_ids_T is not None:
        _add_tensor("token_ids", frame.token_ids_T, "raw", metas, segments)
    if frame.hidden_TD is not None:
        _add_tensor("hidden", frame.hidden_TD, wire, metas, segments)
    header = [frame.kind, frame.epoch.n, frame.epoch.proposer, frame.step]
    for name in FIELDS[frame.kind]:
        header.append(metas if name == "tensors" else _PACKERS[name](getattr(frame, name)))
    packed = msgpack.packb(header)
    segments.insert(0, memoryview(packed))
    crc, size = 0, 0
    for segment in segments:
        crc, size = zlib.crc32(segment, crc), size + len(segment)
    # All but the copies into messages, which are small beside header and checksum.
    spent = SPENT.pack(min(U32, int((time.perf_counter() - begun) * 1e6)))
    prefix = FIRST.pack(MAGIC, VERSION, 0, len(packed), size, spent, zlib.crc32(spent, crc))
    if len(prefix) + size <= chunk_bytes:
        yield b"".join((prefix, *segments))
        return
    index = 0
    while True:
        pieces: list[bytes | memoryview] = [prefix]
        room = chunk_bytes - len(prefix)
        while segments and room:
            piece, segments[0] = segments[0][:room], segments[0][room:]
            pieces.append(piece)
            room -= len(piece)
            if not len(segments[0]):
                segments.pop(0)
        yield b"".join(pieces)
        if not segments:
            return
        index += 1
        prefix = REST.pack(MAGIC, VERSION, 1, index)


def _add_tensor(
    name: str, array: Array, how: str, metas: list[dict[str, Any]], segments: list[memoryview]
) -> None:
    metas.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "codec": how})
    if array.size:
        segments.extend(codec(how).encode(array))


# -- fields: plain lists of what each holds ---------------------------------------------------------
def _deltas(deltas: Deltas) -> list[Any]:
    # Tuples pack as lists.
    return [deltas.free, deltas.truncate, deltas.copy, deltas.share, deltas.allocate]


def _hello(hello: Hello) -> list[Any]:
    return [
        hello.deployment,
        hello.plan,
        hello.manifest,
        hello.fingerprint,
        hello.instance,
        hello.stage,
        hello.edge,
    ]


def _error(error: P2PShardError) -> dict[str, Any]:
    wire = error.to_wire()
    details = {k: wire["details"][k] for k in ("node", "layers", "stage") if k in wire["details"]}
    return {"code": wire["code"], "message": wire["message"][: TEXT // 4], "details": details}


_PACKERS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda rows: [[r.sequence, r.start, r.length, r.output] for r in rows],
    "deltas": _deltas,
    "admitted": lambda admitted: [
        [a.sequence, a.prompt_length, [getattr(a.sampling, k) for k in SAMPLING]] for a in admitted
    ],
    "failed": lambda failed: [[s, _error(e)] for s, e in failed],
    "tokens": lambda tokens: [[t.sequence, t.id, t.logprob, t.top] for t in tokens],
    "hops": lambda hops: [
        [h.stage, h.queue_us, h.compute_us, h.sample_us, h.serialise_us, h.nbytes, h.kept] for h in hops
    ],
    "hello": _hello,
    "error": _error,
    "status": list,
}
