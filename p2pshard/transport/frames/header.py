"""A frame's header, from bytes to values: nothing of its tensors is allocated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgpack

from p2pshard.planning.plan import Epoch
from p2pshard.transport.codecs import codec
from p2pshard.transport.frames.checks import error_of, fail, integer, items_of, name_of
from p2pshard.transport.frames.fields import (
    read_admitted,
    read_deltas,
    read_failed,
    read_hello,
    read_hops,
    read_rows,
    read_tokens,
)
from p2pshard.transport.frames.values import Frame, Limits
from p2pshard.transport.frames.wire import KEYS, KINDS, TEXT, U64

__all__ = ["TensorMeta", "decode_header"]


@dataclass(frozen=True)
class TensorMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int


def _tensor_metas(value: object, tokens: int, limits: Limits) -> tuple[TensorMeta, ...]:
    """Each tensor must have exactly the shape that the rows imply."""
    allowed = {"token_ids": ("int32", (tokens,)), "hidden": ("float32", (tokens, limits.hidden_size))}
    found = []
    for item in items_of(value, "tensors", len(allowed)):
        if type(item) is not dict or set(item) != {"name", "dtype", "shape", "codec"}:
            raise fail("tensor is not {name, dtype, shape, codec}")
        name, dtype = name_of(item["name"], "tensor name"), name_of(item["dtype"], "dtype")
        shape = tuple(integer(n, "dimension") for n in items_of(item["shape"], "shape", 8))
        if name not in allowed or (dtype, shape) != allowed[name]:
            raise fail(f"tensor {name!r} is {dtype} {shape[:8]}, expected {allowed.get(name)}")
        how = codec(name_of(item["codec"], "codec"))
        if dtype not in how.dtypes:
            raise fail(f"codec {how.name} has no {dtype}")
        found.append(TensorMeta(name, dtype, shape, how.name, how.nbytes(dtype, shape)))
        assert prod(shape) <= limits.payload_bytes
    if len({t.name for t in found}) != len(found):
        raise fail("a tensor appears twice")
    return tuple(found)


def decode_header(data: bytes | bytearray, limits: Limits) -> tuple[Frame, tuple[TensorMeta, ...]]:
    """The frame without its tensors, and what these will be."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=TEXT,
            max_bin_len=0,
            max_array_len=max(64, limits.chunk_tokens, limits.blocks),
            max_map_len=32,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise fail(f"header is not our msgpack ({type(error).__name__})") from error
    if type(value) is not dict:
        raise fail("header is no map")
    kind = value.get("kind")
    if kind not in KINDS:
        raise fail(f"kind {str(kind)[:40]!r} is unknown")
    expected = KEYS[kind] | {"kind", "epoch", "step"}
    if set(value) != expected:
        raise fail(
            f"header of kind {kind} has keys {str(sorted(set(value) ^ expected))[:100]} too many or too few"
        )
    n, proposer = items_of(value["epoch"], "epoch", 2, 2)
    frame = Frame(
        kind, Epoch(integer(n, "epoch", U64), name_of(proposer, "proposer")), integer(value["step"], "step")
    )
    readers: dict[str, Callable[[Any], Any]] = {
        "rows": lambda v: read_rows(v, limits),
        "deltas": lambda v: read_deltas(v, limits),
        "admitted": lambda v: read_admitted(v, limits),
        "failed": lambda v: read_failed(v, limits),
        "tokens": lambda v: read_tokens(v, limits),
        "hops": lambda v: read_hops(v, limits),
        "hello": read_hello,
        "error": error_of,
        "status": lambda v: tuple(integer(x, "status") for x in items_of(v, "status", 3, 3)),
    }
    frame = replace(frame, **{k: readers[k](value[k]) for k in KEYS[kind] - {"tensors"}})
    if kind != "step":
        return frame, ()
    metas = _tensor_metas(value["tensors"], sum(r.length for r in frame.rows), limits)
    if not any(m.name == "token_ids" for m in metas):
        raise fail("a step has no token_ids")
    if not {s for s, _ in frame.failed} <= {r.sequence for r in frame.rows}:
        raise fail("a failed sequence has no row")
    return frame, metas
