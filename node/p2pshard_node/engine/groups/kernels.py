"""Compiled products of a grouped matrix with a few or many rows of activations.

Two steps: `record_row` turns a row of activations into integers with a scale for every 32, once for all matrices
that share an input; `multiplier` runs through a matrix's panels. Neither depends on how many rows there are: a
tile of eight rows runs the same operations, in the same order, as eight tiles of one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from p2pshard.models.groups import GROUP, LANES, LAYOUTS, GroupLayout
from p2pshard_node.engine.groups.emit import emit_panel, emit_record, record_bytes
from p2pshard_node.engine.groups.features import target_features
from p2pshard_node.engine.kernel_cache import native

__all__ = ["call_product", "multiplier", "record_row"]

_BY_CODE = tuple(LAYOUTS.values())
_TILE = target_features().tile
_CACHED = 384 * 1024
"""Bytes of activations that one panel after the other is multiplied with: what stays in a core's cache."""
_NARROW, _WIDE = record_bytes(False), record_bytes(True)
_ARGUMENTS = 11


def _type_panel(
    typing: Any,
    code: Any,
    rows: Any,
    wide: Any,
    panel: Any,
    acts: Any,
    blocks: Any,
    bias: Any,
    out: Any,
    stride: Any,
) -> Any:
    layout, count, both = _BY_CODE[code.literal_value], rows.literal_value, bool(wide.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit_panel(builder, layout, target_features(), count, both, *arguments[3:])
        return context.get_dummy_value()

    return types.void(code, rows, wide, *[types.intp] * 6), generate


_panel: Any = intrinsic(prefer_literal=True)(_type_panel)


def _type_record(typing: Any, wide: Any, x: Any, record: Any) -> Any:
    both = bool(wide.literal_value)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return emit_record(builder, both, *arguments[1:])

    return types.boolean(wide, types.intp, types.intp), generate


_record: Any = intrinsic(prefer_literal=True)(_type_record)


@intrinsic
def _copy(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """`count` float32 from one address to another."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, of = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@njit(inline="always")
def _tile_of(left: int) -> int:
    """Rows that are computed together, when so many are left."""
    if left >= 8 and _TILE >= 8:
        return 8
    if left >= 4 and _TILE >= 4:
        return 4
    return 2 if left >= 2 else 1


@njit
def record_row(x: int, width: int, wide: int, acts: int, row: int, rows: int) -> bool:
    """Row `row` of the `rows` that are multiplied together, from `width` float32 at `x`, as `multiplier`'s
    products read it at `acts`; whether all are finite."""
    begin, tile = 0, _tile_of(rows)
    while row >= begin + tile:
        begin += tile
        tile = _tile_of(rows - begin)
    finite, groups = True, width // GROUP
    if wide:
        start = acts + (begin * groups + row - begin) * _WIDE
        for group in range(groups):
            finite &= _record(1, x + 4 * GROUP * group, start + group * tile * _WIDE)
    else:
        start = acts + (begin * groups + row - begin) * _NARROW
        for group in range(groups):
            finite &= _record(0, x + 4 * GROUP * group, start + group * tile * _NARROW)
    return finite


def _make_product(code: int, wide: int) -> Any:
    block_bytes, per_block = _BY_CODE[code].block_bytes, _BY_CODE[code].groups
    size = record_bytes(bool(wide))

    def product(data, bias, acts, blocks, rows, first, last, tokens, out, stride, column):  # type: ignore[no-untyped-def]
        row_bytes = blocks * per_block * size
        spare, none = np.empty((8, LANES), np.float32), np.zeros(LANES, np.float32)
        chunk = max(8, _CACHED // row_bytes // 8 * 8)
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            for panel in range(first, last):
                weights = data + panel * blocks * block_bytes
                count = min(LANES, rows - panel * LANES)
                own = bias + 4 * LANES * panel if bias else none.ctypes.data
                done = begin
                while done < end:
                    tile = _tile_of(end - done)
                    where = acts + done * row_bytes
                    place = out + 4 * (done * stride + column + panel * LANES)
                    target, step = place, 4 * stride
                    if count < LANES:
                        target, step = spare.ctypes.data, 4 * LANES
                    if tile == 8:
                        _panel(code, 8, wide, weights, where, blocks, own, target, step)
                    elif tile == 4:
                        _panel(code, 4, wide, weights, where, blocks, own, target, step)
                    elif tile == 2:
                        _panel(code, 2, wide, weights, where, blocks, own, target, step)
                    else:
                        _panel(code, 1, wide, weights, where, blocks, own, target, step)
                    if count < LANES:
                        for row in range(tile):
                            _copy(place + 4 * row * stride, target + 4 * LANES * row, count)
                    done += tile

    return native(product, _ARGUMENTS)


@cache
def multiplier(layout: GroupLayout, wide: bool) -> Any:
    """The compiled product of a layout; its `address` is what `call_product` takes."""
    return _make_product(layout.code, int(wide))


@intrinsic
def call_product(
    typing: Any,
    address: Any,
    data: Any,
    bias: Any,
    acts: Any,
    blocks: Any,
    rows: Any,
    first: Any,
    last: Any,
    tokens: Any,
    out: Any,
    stride: Any,
    column: Any,
) -> Any:
    """Call a product of `multiplier`: panels [first, last) of a matrix of `rows` rows at `data` with `tokens` rows
    of `record_row` at `acts`, into float32 columns `column` + 16 first and on of rows `stride` apart at `out`.
    `bias`: an address of float32 for every row of whole panels, 0: none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        word = context.get_value_type(types.intp)
        function = ir.FunctionType(ir.VoidType(), [word] * _ARGUMENTS)
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * (1 + _ARGUMENTS)), generate
