"""A frame's header, from bytes to values: nothing of its tensors is allocated here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgpack

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.codecs import Codec, codec
from p2pshard.transport.frames.checks import fail, integer, items_of, name_of
from p2pshard.transport.frames.fields import READERS
from p2pshard.transport.frames.values import Array, Arrival, Frame, Limits
from p2pshard.transport.frames.wire import FIELDS, TEXT, U64

__all__ = ["Header", "TensorMeta", "decode_header"]


@dataclass(frozen=True)
class TensorMeta:
    """What one tensor of the payload will be."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    nbytes: int
    """Of the payload."""


@dataclass(frozen=True)
class Header:
    """All of a frame but its tensors."""

    kind: str
    epoch: Epoch
    step: int
    values: dict[str, Any]
    """The other fields of `Frame` that this kind has."""
    tensors: tuple[TensorMeta, ...]

    def frame(self, arrays: dict[str, Array], arrival: Arrival) -> Frame:
        return Frame(
            self.kind,
            self.epoch,
            self.step,
            **self.values,
            token_ids_T=arrays.get("token_ids"),
            hidden_TD=arrays.get("hidden"),
            arrival=arrival,
        )


def decode_header(data: bytearray, limits: Limits, epoch: Epoch | None, kinds: Collection[str]) -> Header:
    """Check and read a header. Raises `ProtocolError`, also for another epoch (where given) or kind."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=TEXT,
            max_bin_len=0,
            max_array_len=limits.array_items,
            max_map_len=32,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise fail(f"header is not our msgpack ({type(error).__name__})") from error
    if type(value) is not list or len(value) < 4:
        raise fail("header is no list of kind, epoch, proposer, step and fields")
    kind, n, proposer, step, *fields = value
    if type(kind) is not str or kind not in FIELDS:
        raise fail(f"kind {str(kind)[:40]!r} is unknown")
    if kind not in kinds:
        raise fail(f"kind {kind} has no place on this stream now")
    names = FIELDS[kind]
    if len(fields) != len(names):
        raise fail(f"header of kind {kind} has {len(fields)} fields, not {len(names)}")
    theirs = Epoch(integer(n, "epoch", U64), name_of(proposer, "proposer"))
    if epoch is not None and theirs != epoch:
        raise ProtocolError(
            f"a frame of epoch ({theirs.n}, {theirs.proposer}), this stream is of "
            f"({epoch.n}, {epoch.proposer})"
        )
    values = {
        name: READERS[name](v, limits) for name, v in zip(names, fields, strict=True) if name in READERS
    }
    tensors: tuple[TensorMeta, ...] = ()
    if kind == "step":
        rows = values["rows"]
        tensors = _tensors(fields[names.index("tensors")], sum(r.length for r in rows), limits)
        if values["failed"] and not {s for s, _ in values["failed"]} <= {r.sequence for r in rows}:
            raise fail("a failed sequence has no row")
    return Header(kind, theirs, integer(step, "step"), values, tensors)


def _tensors(value: object, tokens: int, limits: Limits) -> tuple[TensorMeta, ...]:
    """Each tensor must be exactly what the rows and the plan imply."""
    found: dict[str, TensorMeta] = {}
    for item in items_of(value, "tensors", len(_TENSORS)):
        if type(item) is not dict or len(item) != 4:
            raise fail("tensor is not {name, dtype, shape, codec}")
        name = item.get("name")
        if type(name) is not str or name not in _TENSORS:
            raise fail(f"tensor {str(name)[:40]!r} is unknown")
        dtype, width_of, codecs_of = _TENSORS[name]
        shape = (tokens, *width_of(limits))
        if item.get("dtype") != dtype or item.get("shape") != list(shape):
            raise fail(
                f"{name} is {str(item.get('dtype'))[:40]} {str(item.get('shape'))[:80]}, not {dtype} {shape}"
            )
        allowed = codecs_of(limits)
        if item.get("codec") not in allowed:
            raise fail(
                f"{name} comes as {str(item.get('codec'))[:40]!r}; the plan allows {', '.join(allowed)}"
            )
        if name in found:
            raise fail("a tensor appears twice")
        how = codec(item["codec"])
        found[name] = TensorMeta(name, dtype, shape, how, how.nbytes(dtype, shape))
    if "token_ids" not in found:
        raise fail("a step has no token_ids")
    return tuple(found.values())


_TENSORS: dict[str, tuple[str, Callable[[Limits], tuple[int, ...]], Callable[[Limits], tuple[str, ...]]]] = {
    "token_ids": ("int32", lambda limits: (), lambda limits: ("raw",)),
    "hidden": ("float32", lambda limits: (limits.hidden_size,), lambda limits: limits.wires),
}
"""By name: dtype, the shape after the tokens, codecs."""
