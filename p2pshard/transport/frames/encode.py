"""Frames into messages."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

import msgpack

from p2pshard.errors import P2PShardError
from p2pshard.transport.codecs import codec
from p2pshard.transport.frames.values import Frame, Hello
from p2pshard.transport.frames.wire import (
    CHUNK_BYTES,
    FIRST,
    KEYS,
    MAGIC,
    REST,
    SAMPLING,
    SPENT,
    TEXT,
    U32,
    VERSION,
)

__all__ = ["encode"]


def _tensors(frame: Frame) -> list[tuple[dict[str, Any], memoryview]]:
    raw = codec("raw")
    parts = []
    for name, array in (("token_ids", frame.token_ids_T), ("hidden", frame.hidden_TD)):
        if array is not None:
            meta = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "codec": raw.name}
            parts.append((meta, raw.encode(array)))
    return parts


def _hello_list(hello: Hello) -> list[Any]:
    return [
        hello.deployment,
        hello.plan,
        hello.manifest,
        hello.fingerprint,
        hello.instance,
        hello.stage,
        hello.edge,
    ]


def _error_map(error: P2PShardError) -> dict[str, Any]:
    wire = error.to_wire()
    details = {k: wire["details"][k] for k in ("node", "layers", "stage") if k in wire["details"]}
    return {"code": wire["code"], "message": wire["message"][: TEXT // 4], "details": details}


def _header(frame: Frame, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rows": [[r.sequence, r.start, r.length, r.output] for r in frame.rows],
        "tensors": tensors,
        "deltas": [
            list(frame.deltas.free),
            [list(t) for t in frame.deltas.truncate],
            [list(c) for c in frame.deltas.copy],
            [[s, [list(run) for run in runs]] for s, runs in frame.deltas.allocate],
        ],
        "admitted": [
            [a.sequence, a.prompt_length, [getattr(a.sampling, k) for k in SAMPLING]] for a in frame.admitted
        ],
        "failed": [[s, _error_map(e)] for s, e in frame.failed],
        "tokens": [[t.sequence, t.id, t.logprob, [list(x) for x in t.top]] for t in frame.tokens],
        "hops": [
            [h.stage, h.queue_us, h.compute_us, h.sample_us, h.serialise_us, h.nbytes] for h in frame.hops
        ],
        "hello": _hello_list(frame.hello) if frame.hello else None,
        "error": _error_map(frame.error) if frame.error else None,
        "status": list(frame.status) if frame.status else None,
    }
    header = {"kind": frame.kind, "epoch": [frame.epoch.n, frame.epoch.proposer], "step": frame.step}
    return header | {k: values[k] for k in KEYS[frame.kind]}


def encode(frame: Frame, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The frame's messages, each of at most `chunk_bytes`; tensor bytes are copied once."""
    begun = time.perf_counter()
    parts = _tensors(frame)
    header = msgpack.packb(_header(frame, [meta for meta, _ in parts]))
    segments = [memoryview(header), *(data for _, data in parts if len(data))]
    crc, size = 0, 0
    for segment in segments:
        crc, size = zlib.crc32(segment, crc), size + len(segment)
    # All but the copies into messages, which are small beside header and checksum.
    spent = SPENT.pack(min(U32, int((time.perf_counter() - begun) * 1e6)))
    prefix = FIRST.pack(MAGIC, VERSION, 0, len(header), size, spent, zlib.crc32(spent, crc))
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
