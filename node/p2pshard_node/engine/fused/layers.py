"""A run of decoder layers as one compiled call: nothing of a step is done in Python between its layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.attend import KEYS, QUERIES, attend
from p2pshard_node.engine.fused.norm import NONE, normalise
from p2pshard_node.engine.fused.phases import (
    TILE,
    add,
    add_and_prepare,
    gate,
    prepare,
    products,
    quantise_rows,
)
from p2pshard_node.engine.fused.rotary import rotate
from p2pshard_node.engine.fused.tickets import failed, items
from p2pshard_node.engine.fused.vectors import LANES, load, store
from p2pshard_node.engine.kernel_cache import kernel

__all__ = ["LAYER", "MATRICES", "NORMS", "run_layers", "state_size"]

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
    crew: Any,
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
    q: Any,
    sums: Any,
    scales: Any,
    works: Any,
    scratches: Any,
    states: Any,
    blocks: Any,
    copies: Any,
) -> bool:
    """hidden [T, D] through all `layers`, in place; whether every number stayed finite.

    `rows`, `table`, `size`: see `attend`; `slots`: int64 [T], where each token's keys go; `cos`, `sin`: see
    `angles`. The rest is scratch, from `works` on a row for each rank: see `FusedStage`.
    """
    tokens, wide_hidden = hidden.shape
    work, scratch, state = works[crew.rank], scratches[crew.rank], states[crew.rank]
    ticket = crew.begin
    for index in range(layers.shape[0]):
        layer, matrix, norm = layers[index], matrices[index], norms[index]
        heads, shared, width, inner = layer.heads, layer.shared, layer.width, layer.inner
        lines, across = (heads + 2 * shared) * width, heads * width
        before, form = norm[BEFORE_ATTENTION], matrix[QUERY].form
        for begin in range(0, tokens, TILE):
            count = min(TILE, tokens - begin)
            ticket = prepare(crew, ticket, hidden, begin, count, before, form, work, q, sums, scales)
            ticket = products(
                crew, ticket, matrix[QUERY:OUT], q, sums, scales, count, qkv, lines, begin * lines, scratch
            )
        for t in items(crew, ticket, tokens):
            _rotate_and_keep(layer, norm, qkv, t, slots[t], cos, sin, lines)
        ticket += tokens
        ticket = attend(
            crew,
            ticket,
            layer,
            rows,
            table,
            size,
            qkv,
            attended,
            state,
            blocks[crew.rank],
            copies[crew.rank],
        )
        for begin in range(0, tokens, TILE):
            count = min(TILE, tokens - begin)
            up, down, form = matrix[GATE:DOWN], matrix[DOWN:], matrix[GATE].form
            if layer.parallel:
                ticket = prepare(crew, ticket, hidden, begin, count, before, form, work, q, sums, scales)
                ticket = products(crew, ticket, up, q, sums, scales, count, gated, 2 * inner, 0, scratch)
            ticket = quantise_rows(
                crew, ticket, attended, begin, count, across, matrix[OUT].form, q, sums, scales
            )
            ticket = products(
                crew, ticket, matrix[OUT:GATE], q, sums, scales, count, y, wide_hidden, 0, scratch
            )
            after = norm[AFTER_ATTENTION]
            if layer.parallel:
                ticket = add(crew, ticket, hidden, begin, count, y, after, layer.residual)
            else:
                ticket = add_and_prepare(
                    crew,
                    ticket,
                    hidden,
                    begin,
                    count,
                    y,
                    after,
                    layer.residual,
                    norm[BEFORE_MLP],
                    form,
                    work,
                    q,
                    sums,
                    scales,
                )
                ticket = products(crew, ticket, up, q, sums, scales, count, gated, 2 * inner, 0, scratch)
            ticket = gate(
                crew, ticket, gated, count, inner, layer.activation, matrix[DOWN].form, q, sums, scales
            )
            ticket = products(crew, ticket, down, q, sums, scales, count, y, wide_hidden, 0, scratch)
            ticket = add(crew, ticket, hidden, begin, count, y, norm[AFTER_MLP], layer.residual)
    return not failed(crew)
