"""Compiled products of a grouped matrix with a few or many rows of activations.

Two steps: `quantise` turns activations into integers with a scale for every 32, once for all matrices that
share an input; `multiply` runs through a matrix's panels. Neither depends on how many rows there are: a tile of
eight rows runs the same operations, in the same order, as eight tiles of one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from p2pshard.models import groups
from p2pshard.models.groups import GROUP, LANES, LAYOUTS, GroupLayout
from p2pshard_node.engine.fused.cache import kernel
from p2pshard_node.engine.groups import emit, features
from p2pshard_node.engine.groups.emit import emit_panel, emit_record, record_bytes
from p2pshard_node.engine.groups.features import target_features

__all__ = ["multiplier", "quantiser", "records"]

_BY_CODE = tuple(LAYOUTS.values())
_TILE = target_features().tile
_STAMP = zlib.crc32(b"".join(Path(str(m.__file__)).read_bytes() for m in (emit, features, groups)))
"""Of the sources that compiled code depends on beside this one, which is all that numba's cache looks at."""
_CACHED = 384 * 1024
"""Bytes of activations that one panel after the other is multiplied with: what stays in a core's cache."""


def _type_panel(
    typing: Any, code: Any, rows: Any, wide: Any, panel: Any, acts: Any, blocks: Any, out: Any, stride: Any
) -> Any:
    layout, count, both = _BY_CODE[code.literal_value], rows.literal_value, bool(wide.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit_panel(builder, layout, target_features(), count, both, *arguments[3:])
        return context.get_dummy_value()

    word = types.intp
    return types.void(code, rows, wide, word, word, word, word, word), generate


_panel: Any = intrinsic(prefer_literal=True)(_type_panel)


def _type_record(typing: Any, wide: Any, x: Any, record: Any) -> Any:
    both = bool(wide.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit_record(builder, both, *arguments[1:])
        return context.get_dummy_value()

    return types.void(wide, types.intp, types.intp), generate


_record: Any = intrinsic(prefer_literal=True)(_type_record)


@njit(inline="always")
def _tile_of(left: int) -> int:
    """Rows that are computed together, when so many are left."""
    if left >= 8 and _TILE >= 8:
        return 8
    if left >= 4 and _TILE >= 4:
        return 4
    return 2 if left >= 2 else 1


def _make_multiply(code: int, wide: int, stamp: int) -> Any:
    block_bytes, per_block = _BY_CODE[code].block_bytes, _BY_CODE[code].groups
    size = record_bytes(bool(wide))

    def run(data, acts, blocks, rows, first, last, out, column):  # type: ignore[no-untyped-def]
        if stamp < 0:  # never; it is part of the cache's key
            return
        tokens, row_bytes = out.shape[0], blocks * per_block * size
        spare = np.empty((8, LANES), np.float32)
        chunk = max(8, _CACHED // row_bytes // 8 * 8)
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            for panel in range(first, last):
                weights = data.ctypes.data + panel * blocks * block_bytes
                count = min(LANES, rows - panel * LANES)
                at = column + panel * LANES
                done = begin
                while done < end:
                    tile = _tile_of(end - done)
                    where = acts.ctypes.data + done * row_bytes
                    target, step = out.ctypes.data + 4 * (done * out.shape[1] + at), 4 * out.shape[1]
                    if count < LANES:
                        target, step = spare.ctypes.data, 4 * LANES
                    if tile == 8:
                        _panel(code, 8, wide, weights, where, blocks, target, step)
                    elif tile == 4:
                        _panel(code, 4, wide, weights, where, blocks, target, step)
                    elif tile == 2:
                        _panel(code, 2, wide, weights, where, blocks, target, step)
                    else:
                        _panel(code, 1, wide, weights, where, blocks, target, step)
                    if count < LANES:
                        out[done : done + tile, at : at + count] = spare[:tile, :count]
                    done += tile

    return kernel(run)


def _make_quantise(wide: int, stamp: int) -> Any:
    size = record_bytes(bool(wide))

    def run(x, acts):  # type: ignore[no-untyped-def]
        if stamp < 0:
            return
        tokens, count = x.shape[0], x.shape[1] // GROUP
        done = 0
        while done < tokens:
            tile = _tile_of(tokens - done)
            start = acts.ctypes.data + done * count * size
            for row in range(tile):
                values = x.ctypes.data + 4 * (done + row) * x.shape[1]
                for group in range(count):
                    _record(wide, values + 4 * GROUP * group, start + (group * tile + row) * size)
            done += tile

    return kernel(run)


_BYTES, _FLOATS = types.uint8[::1], types.float32[:, ::1]


@cache
def multiplier(layout: GroupLayout, wide: bool) -> Callable[..., None]:
    """``run(data, records, blocks, rows, first, last, out_TN, column)``, compiled: panels [first, last) of a
    matrix of `rows` rows, written into columns `column` + 16 first and on."""
    run = _make_multiply(layout.code, int(wide), _STAMP)
    word = types.intp
    run.compile((_BYTES, _BYTES, word, word, word, word, _FLOATS, word))
    return cast("Callable[..., None]", run)


@cache
def quantiser(wide: bool) -> Callable[..., None]:
    """``run(x_TK, records)``, compiled; see `emit.emit_record`."""
    run = _make_quantise(int(wide), _STAMP)
    run.compile((_FLOATS, _BYTES))
    return cast("Callable[..., None]", run)


def records(x_TK: np.ndarray, wide: bool) -> np.ndarray:
    """Activations, float32 and contiguous, as `multiplier`'s functions read them: uint8, one run of bytes."""
    acts = np.empty(x_TK.shape[0] * (x_TK.shape[1] // GROUP) * record_bytes(wide), np.uint8)
    quantiser(wide)(x_TK, acts)
    return acts
