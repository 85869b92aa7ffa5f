"""Work of a kernel shared between threads, inside the kernel: phases of numbered items, taken by whoever is free.

Every thread of a crew calls the same kernel and walks through the same phases. The items of all phases are
numbered through, so two counters that only grow are all that is shared: the next ticket, and how many items are
done. A phase ends when its items are done, not when everyone has arrived: a thread that wakes late, or never,
finds its tickets gone and holds nobody up but where it stopped in the middle of an item. Who computes an item
changes nothing in it.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from p2pshard_node.engine.fused.vectors import I32, I64, pointer

__all__ = ["COUNTERS", "DONE", "FAILED", "Crew", "alone", "fail", "failed", "items", "share"]

log = logging.getLogger(__name__)

_LINE = 16
"""Counters are this many int64 apart, two cache lines, since neighbouring lines are fetched in pairs."""
NEXT, DONE, FAILED = 0, _LINE, 2 * _LINE
COUNTERS = 3 * _LINE
"""Length of the int64 array of counters."""
_SPINS = 200
"""Pauses before a waiting thread offers its processor to others: some microseconds, as long as short items."""
_SHARES = 3
"""Items per thread into which a phase is cut where it can be: fewer leave threads idle at its end, and taking one
costs both cores a cache line's way to the other."""


class Crew(NamedTuple):
    """What a kernel knows of those who work on it."""

    counters: Any
    """int64 [COUNTERS], the same array for all."""
    begin: int
    """First ticket of this call."""
    ranks: int
    """How many work on it at most: decides how finely phases are cut, so it is the same for all."""
    rank: int
    """Which of them this is: its row of the scratch."""


def alone() -> Crew:
    """One thread that shares with nobody."""
    return Crew(np.zeros(COUNTERS, np.int64), 0, 1, 0)


# -- atomics --------------------------------------------------------------------------------------
@intrinsic
def _read(typing: Any, counters: Any, index: Any) -> Any:
    """counters[index]; what was written before it was set is seen."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], I64, 8)
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(counters, types.intp), generate


@intrinsic
def _write(typing: Any, counters: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], I64, 8)
        builder.store_atomic(args[2], at, "release", 8)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), generate


@intrinsic
def _add(typing: Any, counters: Any, index: Any, value: Any) -> Any:
    """counters[index] += value; what was written before is seen by whoever reads the sum."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], I64, 8)
        return builder.atomic_rmw("add", at, args[2], "acq_rel")

    return types.int64(counters, types.intp, types.int64), generate


@intrinsic
def _exchange(typing: Any, counters: Any, index: Any, old: Any, new: Any) -> Any:
    """counters[index] = new if it is `old`; what it was."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], I64, 8)
        result = builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(result, 0)

    return types.int64(counters, types.intp, types.int64, types.int64), generate


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the core that this is a spinning loop, where there is an instruction for it."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            builder.call(_declared(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif machine in ("arm64", "aarch64"):
            hint = _declared(builder, "llvm.aarch64.hint", ir.VoidType(), [I32])
            builder.call(hint, [ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


def _yield_symbol() -> str | None:
    """Name under which compiled code finds the system's call that offers a processor to others.

    A name and not an address, because kernels are read from disk by later processes.
    """
    library, call = ("kernel32", "SwitchToThread") if sys.platform == "win32" else (None, "sched_yield")
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(library), call), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        log.info("no %s here, waiting threads spin: %s", call, error)
        return None
    llvm.add_symbol("p2pshard_give_way", address)
    return "p2pshard_give_way"


_YIELD = _yield_symbol()


@intrinsic
def _give_way(typing: Any) -> Any:
    """Let another thread have this processor."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _YIELD is not None:
            builder.call(_declared(builder, _YIELD, I32, []), [])
        return context.get_dummy_value()

    return types.void(), generate


# -- phases ---------------------------------------------------------------------------------------
@njit
def _claim(crew: Any, end: int) -> int:
    """A ticket below `end` that nobody else has, -1: none is left."""
    ticket = _read(crew.counters, NEXT)
    while ticket < end:
        seen = _exchange(crew.counters, NEXT, ticket, ticket + 1)
        if seen == ticket:
            return ticket
        ticket = seen
    return -1


@njit
def _wait(crew: Any, end: int) -> None:
    """Until the items of all tickets below `end` are done."""
    spins = 0
    while _read(crew.counters, DONE) < end:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _give_way()


@njit
def items(crew: Any, first: int, count: int) -> Iterator[int]:
    """Those of a phase's `count` items that are left for this thread, in order; at the end, all of them are done.

    `first`: the phase's first ticket. Not to be left before its end.
    """
    end = first + count
    ticket = _claim(crew, end)
    while ticket >= 0:
        yield ticket - first
        _add(crew.counters, DONE, 1)
        ticket = _claim(crew, end)
    _wait(crew, end)


@njit
def share(crew: Any, parts: int) -> int:
    """How many of a phase's equal parts to take as one item."""
    if crew.ranks == 1:
        return max(1, parts)
    return max(1, parts // (crew.ranks * _SHARES))


@njit
def fail(crew: Any) -> None:
    """Say that a number was not finite."""
    _write(crew.counters, FAILED, 1)


@njit
def failed(crew: Any) -> bool:
    """Whether anyone said so, once all is done. Who makes a `Crew` clears it."""
    return _read(crew.counters, FAILED) != 0
