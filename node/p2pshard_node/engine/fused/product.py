"""Linear layers over int8 or grouped weights and dynamically quantised rows.

Of grouped weights see `p2pshard_node.engine.groups.kernels`; of int8 ones, a scale a row:
y[t, n] = s[t] w[n] (sum_k q1[t, k] v[n, k] + sum_k q2[t, k] v[n, k] / 254) / 127, with s the largest magnitude
of the row, q1 = round(127 x / s), and q2 = round(254 (127 x / s - q1)) on layers that take two rows a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard.models.groups import GROUP
from p2pshard_node.engine.fused.maths import ROUND, ROUND_BITS
from p2pshard_node.engine.fused.tiles import PANEL, tile1, tile2, tile4
from p2pshard_node.engine.fused.vectors import (
    LANES,
    bits,
    converted,
    float_of,
    floats,
    highest_int,
    int_lanes_at,
    ints,
    larger_int,
    load,
    store,
    store_bytes,
    total_int,
)
from p2pshard_node.engine.groups.emit import record_bytes
from p2pshard_node.engine.groups.kernels import call_product, record_row

__all__ = [
    "GROUPS",
    "MATRIX",
    "ONE_ROW",
    "SCRATCH",
    "TWO_ROWS",
    "WIDE_GROUPS",
    "input_bytes",
    "multiply",
    "panels_of",
    "quantise",
]

#: What a matrix multiplies: one int8 row a token, two of them, or the same with a scale for every 32 values.
ONE_ROW, TWO_ROWS, GROUPS, WIDE_GROUPS = range(4)
#: A matrix in memory: addresses of its panels (uint8), scales (float32 [outputs]) and bias (float32 [outputs], 0:
#: none), the form of its input, and of grouped weights the address of their product and the blocks of a row.
MATRIX = np.dtype(
    [
        (name, np.int64)
        for name in ("panels", "scales", "bias", "outputs", "inputs", "form", "product", "blocks")
    ],
    align=True,
)
#: int32 that a thread needs beside.
SCRATCH = 256
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


def input_bytes(width: int, form: int) -> int:
    """Of a token's row of `width` values in a matrix's `form`."""
    if form >= GROUPS:
        return width // GROUP * record_bytes(form == WIDE_GROUPS)
    return width * (1 + (form == TWO_ROWS))


@njit
def quantise(
    x: Any, at: int, width: int, form: int, q: Any, sums: Any, scales: Any, token: int, count: int
) -> bool:
    """Row `token` of the `count` in `q`, from `width` floats (a multiple of 16) of `x`; whether all are finite.

    `q`: int8, rows of `width`, one or two a token; `sums`: int32 sum of each row; `scales`: s / 127. Or, for groups,
    all in `q`.
    """
    if form >= GROUPS:
        return record_row(x.ctypes.data + 4 * at, width, form == WIDE_GROUPS, q.ctypes.data, token, count)
    wide = form
    most = ints(np.int32(0))
    for i in range(0, width, LANES):
        most = larger_int(most, bits(load(x, at + i)) & ints(_MAGNITUDE))
    magnitude = highest_int(most)
    scale = max(float_of(magnitude), np.float32(1e-30))
    factor = floats(np.float32(127.0) / scale)
    scales[token] = scale / np.float32(127.0)
    shift, base = floats(ROUND), ints(ROUND_BITS)
    first, second = ints(np.int32(0)), ints(np.int32(0))
    row = token * (1 + wide)
    for i in range(0, width, LANES):
        value = load(x, at + i) * factor
        rounded = value + shift
        whole = bits(rounded) - base
        first = first + whole
        store_bytes(q, row * width + i, whole)
        if wide:
            rest = bits((value - (rounded - shift)) * floats(np.float32(254.0)) + shift) - base
            second = second + rest
            store_bytes(q, (row + 1) * width + i, rest)
    sums[row] = total_int(first)
    if wide:
        sums[row + 1] = total_int(second)
    return magnitude < _INFINITY


@njit
def panels_of(matrix: Any) -> int:
    rows = PANEL if matrix.form < GROUPS else LANES
    return (matrix.outputs + rows - 1) // rows


@njit
def multiply(
    matrix: Any,
    start: int,
    end: int,
    q: Any,
    sums: Any,
    scales: Any,
    tokens: int,
    y: Any,
    stride: int,
    column: int,
    scratch: Any,
) -> None:
    """Outputs of panels [start, end), in columns from `column` on of the float32 rows `y` (`stride` apart): the
    product with rows of `quantise`.

    `scratch`: int32 [`SCRATCH`].
    """
    if matrix.form >= GROUPS:
        end = min(end, panels_of(matrix))
        call_product(
            matrix.product, matrix.panels, matrix.bias, q.ctypes.data, matrix.blocks, matrix.outputs, start, end,
            tokens, y.ctypes.data, stride, column,
        )  # fmt: skip
        return
    width, outputs, wide = matrix.inputs, min(matrix.outputs, end * PANEL), matrix.form
    rows = tokens * (1 + wide)
    # Of several tiles all but the first find the panel in the cache. So that the memory works meanwhile, each asks for a
    # part of the next panel; one tile alone, which waits for its own, only for half.
    pace = PANEL * 4 // ((rows + 3) // 4)
    address, work = q.ctypes.data, scratch.ctypes.data
    for first in range(start * PANEL, outputs, PANEL):
        panel = matrix.panels + first * width
        ahead = panel + PANEL * width
        count = min(PANEL, outputs - first)
        row = 0
        while row < rows:
            place = address + row * width
            if rows - row >= 4:
                step = 4
                tile4(place, width, panel, width // 4, work, ahead, pace)
            elif rows - row >= 2:
                step = 2
                tile2(place, width, panel, width // 4, work, ahead, pace)
            else:
                step = 1
                tile1(place, width, panel, width // 4, work, ahead, pace)
            ahead += width // 4 * pace
            for i in range(0, step, 1 + wide):
                token = (row + i) // (1 + wide)
                target = token * stride + column + first
                _write(matrix, sums, scales, row + i, token, i, first, count, y, target, scratch)
            row += step


@njit(inline="always")
def _write(
    matrix: Any,
    sums: Any,
    scales: Any,
    row: int,
    token: int,
    line: int,
    first: int,
    count: int,
    y: Any,
    target: int,
    scratch: Any,
) -> None:
    """One token's part of a panel: integer sums to float32, scaled. The last lanes may lie beyond `count`."""
    scale, less = floats(scales[token]), ints(np.int32(128) * sums[row])
    for j in range(0, count, LANES):
        value = converted(int_lanes_at(scratch, line * PANEL + j) - less)
        if matrix.form == TWO_ROWS:
            rest = int_lanes_at(scratch, (line + 1) * PANEL + j) - ints(np.int32(128) * sums[row + 1])
            value = value + converted(rest) * floats(np.float32(1.0 / 254.0))
        value = value * load(matrix.scales, first + j) * scale
        if matrix.bias:
            value = value + load(matrix.bias, first + j)
        if count - j >= LANES:
            store(y, target + j, value)
        else:
            store(scratch, line * PANEL + j, value)
            for k in range(count - j):
                y.flat[target + j + k] = float_of(scratch[line * PANEL + j + k])
