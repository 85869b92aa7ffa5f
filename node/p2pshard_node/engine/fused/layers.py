"""A run of decoder layers as one compiled call: nothing of a step is done in Python between its layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.attend import KEYS, QUERIES, attend
from p2pshard_node.engine.fused.cache import kernel
from p2pshard_node.engine.fused.gate import activate, cap_row
from p2pshard_node.engine.fused.norm import NONE, normalise
from p2pshard_node.engine.fused.product import multiply, quantise
from p2pshard_node.engine.fused.rotary import rotate
from p2pshard_node.engine.fused.vectors import (
    LANES,
    bits,
    floats,
    highest_int,
    ints,
    larger_int,
    load,
    store,
    widen,
)

__all__ = [
    "LAYER",
    "MATRICES",
    "NORMS",
    "TILE",
    "all_finite",
    "embed",
    "head",
    "linear",
    "places",
    "run_layers",
    "state_size",
]

TILE = 64
"""Tokens that pass through a layer's products together: bounds the scratch, and keeps it in the cache."""

#: Columns of a layer's matrices. Query, key and value may be one matrix, and gate and up: then the others have
#: no outputs.
MATRICES = QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = range(7)
#: Columns of a layer's norms.
NORMS = BEFORE_ATTENTION, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP, QUERY_NORM, KEY_NORM = range(6)

#: What a layer is besides: addresses of its keys and values in the pool, shape and constants. `rope`: which of the
#: stage's rotations, -1: none; `window`, `softcap`: 0: none; `parallel`: MLP beside attention, on the same norm.
LAYER = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                "keys",
                "values",
                "heads",
                "shared",
                "width",
                "inner",
                "activation",
                "rope",
                "interleaved",
                "window",
                "parallel",
            )
        ),
        *((name, np.float32) for name in ("scale", "softcap", "residual")),
    ],
    align=True,
)


def state_size(group: int) -> int:
    """Floats of scratch that attention needs when `group` heads share a key."""
    return QUERIES * group * (1 + LANES) + KEYS


@njit
def _prepare(
    x: Any, at: int, norm: Any, width: int, wide: int, work: Any, q: Any, sums: Any, scales: Any, token: int
) -> bool:
    """Row of the next product: normalised, if the layer does that, and quantised."""
    if norm.kind == NONE:
        return quantise(x, at, width, wide, q, sums, scales, token)
    normalise(x, at, norm, work, 0)
    return quantise(work, 0, width, wide, q, sums, scales, token)


@njit
def _add(hidden: Any, at: int, y: Any, row: int, norm: Any, width: int, factor: Any) -> None:
    """hidden[at:] += factor x y[row], normalised first if the layer does that."""
    if norm.kind != NONE:
        normalise(y, row * width, norm, y, row * width)
    for i in range(0, width, LANES):
        value = load(y, row * width + i)
        if factor != np.float32(1.0):
            value = value * floats(factor)
        store(hidden, at + i, load(hidden, at + i) + value)


@njit
def _rotate_and_keep(
    layer: Any, norms: Any, qkv: Any, token: int, slot: int, cos: Any, sin: Any, lines: int
) -> None:
    """Norms and rotation of one token's queries and keys; keys and values into the pool."""
    heads, shared, width = layer.heads, layer.shared, layer.width
    for part in range(2):
        norm, first, count = norms[QUERY_NORM + part], part * heads, heads if part == 0 else shared
        if norm.kind != NONE:
            for at in range(first * width, (first + count) * width, norm.width):
                normalise(qkv, token * lines + at, norm, qkv, token * lines + at)
    if layer.rope >= 0:
        c, s = cos[layer.rope, token], sin[layer.rope, token]
        for h in range(heads + shared):
            rotate(qkv, token, h * width, c, s, layer.interleaved)
    size = shared * width
    for d in range(0, size, LANES):
        store(layer.keys, slot * size + d, load(qkv, token * lines + heads * width + d))
        store(layer.values, slot * size + d, load(qkv, token * lines + heads * width + size + d))


@kernel
def run_layers(
    layers: Any,
    matrices: Any,
    norms: Any,
    hidden: Any,
    rows: Any,
    table: Any,
    size: int,
    slots: Any,
    cos: Any,
    sin: Any,
    qkv: Any,
    attended: Any,
    y: Any,
    gated: Any,
    work: Any,
    q: Any,
    sums: Any,
    scales: Any,
    scratch: Any,
    state: Any,
    copy: Any,
) -> bool:
    """hidden [T, D] through all `layers`, in place; whether every number stayed finite.

    `rows`, `table`, `size`: see `attend`; `slots`: int64 [T], where each token's keys go; `cos`, `sin`: see
    `angles`. The rest is scratch: see `Scratch`.
    """
    tokens, wide_hidden = hidden.shape
    finite = True
    for index in range(layers.shape[0]):
        layer, matrix, norm = layers[index], matrices[index], norms[index]
        heads, shared, width, inner = layer.heads, layer.shared, layer.width, layer.inner
        lines, across = (heads + 2 * shared) * width, heads * width
        for begin in range(0, tokens, TILE):
            count = min(TILE, tokens - begin)
            for t in range(count):
                finite &= _prepare(
                    hidden,
                    (begin + t) * wide_hidden,
                    norm[BEFORE_ATTENTION],
                    wide_hidden,
                    matrix[QUERY].wide,
                    work,
                    q,
                    sums,
                    scales,
                    t,
                )
            column = begin * lines
            for m in range(QUERY, OUT):
                if matrix[m].outputs:
                    multiply(matrix[m], q, sums, scales, count, qkv, lines, column, scratch)
                    column += matrix[m].outputs
            for t in range(begin, begin + count):
                _rotate_and_keep(layer, norm, qkv, t, slots[t], cos, sin, lines)
        attend(layer, rows, table, size, qkv, attended, state, copy)
        for begin in range(0, tokens, TILE):
            count = min(TILE, tokens - begin)
            if layer.parallel:
                for t in range(count):
                    finite &= _prepare(
                        hidden,
                        (begin + t) * wide_hidden,
                        norm[BEFORE_ATTENTION],
                        wide_hidden,
                        matrix[GATE].wide,
                        work,
                        q,
                        sums,
                        scales,
                        t,
                    )
                _expand(matrix, q, sums, scales, count, gated, inner, layer.activation, scratch)
            for t in range(count):
                finite &= quantise(
                    attended, (begin + t) * across, across, matrix[OUT].wide, q, sums, scales, t
                )
            multiply(matrix[OUT], q, sums, scales, count, y, wide_hidden, 0, scratch)
            for t in range(count):
                at = (begin + t) * wide_hidden
                _add(hidden, at, y, t, norm[AFTER_ATTENTION], wide_hidden, layer.residual)
                if not layer.parallel:
                    finite &= _prepare(
                        hidden,
                        at,
                        norm[BEFORE_MLP],
                        wide_hidden,
                        matrix[GATE].wide,
                        work,
                        q,
                        sums,
                        scales,
                        t,
                    )
            if not layer.parallel:
                _expand(matrix, q, sums, scales, count, gated, inner, layer.activation, scratch)
            for t in range(count):
                finite &= quantise(gated, t * 2 * inner, inner, matrix[DOWN].wide, q, sums, scales, t)
            multiply(matrix[DOWN], q, sums, scales, count, y, wide_hidden, 0, scratch)
            for t in range(count):
                at = (begin + t) * wide_hidden
                _add(hidden, at, y, t, norm[AFTER_MLP], wide_hidden, layer.residual)
    return finite


@njit
def _expand(
    matrix: Any,
    q: Any,
    sums: Any,
    scales: Any,
    count: int,
    gated: Any,
    inner: int,
    activation: int,
    scratch: Any,
) -> None:
    """gated [T, 2 x inner]: the first half of each row becomes the activation times the second."""
    multiply(matrix[GATE], q, sums, scales, count, gated, 2 * inner, 0, scratch)
    if matrix[UP].outputs:
        multiply(matrix[UP], q, sums, scales, count, gated, 2 * inner, matrix[GATE].outputs, scratch)
    for t in range(count):
        activate(gated, t * 2 * inner, inner, activation)


@kernel
def head(
    hidden: Any,
    take: Any,
    norm: Any,
    matrix: Any,
    y: Any,
    factor: Any,
    cap: Any,
    work: Any,
    q: Any,
    sums: Any,
    scales: Any,
    scratch: Any,
) -> bool:
    """float32 logits y [R, V] of the rows `take` (int64 [R]) of hidden [T, D]; whether all was finite.

    Scaled by `factor`, then softly capped at `cap` (0: not).
    """
    width, finite = hidden.shape[1], True
    for begin in range(0, take.shape[0], TILE):
        count = min(TILE, take.shape[0] - begin)
        for t in range(count):
            at = take[begin + t] * width
            finite &= _prepare(hidden, at, norm[0], width, matrix[0].wide, work, q, sums, scales, t)
        multiply(matrix[0], q, sums, scales, count, y, y.shape[1], begin * y.shape[1], scratch)
    if factor != np.float32(1.0) or cap > 0:
        for t in range(y.shape[0]):
            cap_row(y[t], factor, cap)
    return finite


@kernel
def linear(x: Any, matrix: Any, y: Any, q: Any, sums: Any, scales: Any, scratch: Any) -> bool:
    """y [T, N]: one layer's product with x [T, K]; whether x was finite."""
    finite = True
    for begin in range(0, x.shape[0], TILE):
        count = min(TILE, x.shape[0] - begin)
        for t in range(count):
            at = (begin + t) * x.shape[1]
            finite &= quantise(x, at, x.shape[1], matrix[0].wide, q, sums, scales, t)
        multiply(matrix[0], q, sums, scales, count, y, y.shape[1], begin * y.shape[1], scratch)
    return finite


@kernel
def embed(table: int, ids: Any, factor: Any, hidden: Any) -> None:
    """hidden [T, D] = factor x rows `ids` (int64) of the bfloat16 table at an address."""
    width = hidden.shape[1]
    for t in range(ids.shape[0]):
        for d in range(0, width, LANES):
            store(hidden, t * width + d, widen(table, ids[t] * width + d) * floats(factor))


@kernel
def places(rows: Any, table: Any, size: int, positions: Any, slots: Any) -> None:
    """Position and slot of every token; `rows`, `table` and `size`: see `attend`."""
    for r in range(rows.shape[0]):
        for t in range(rows[r, 0], rows[r, 1]):
            position = rows[r, 2] + t - rows[r, 0]
            positions[t] = position
            slots[t] = table[rows[r, 3] + position // size] * size + position % size


@kernel
def all_finite(x: Any) -> bool:
    """Whether every float32 of x [T, D] (D a multiple of 16) is finite."""
    most = ints(np.int32(0))
    for i in range(0, x.size, LANES):
        most = larger_int(most, bits(load(x, i)) & ints(np.int32(0x7FFFFFFF)))
    return highest_int(most) < np.int32(0x7F800000)
