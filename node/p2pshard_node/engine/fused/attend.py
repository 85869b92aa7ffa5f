"""Causal attention over a paged pool, the same bits for a query whatever is computed beside it.

Keys are taken in blocks of 64 aligned to their position in the sequence, with a running maximum
(https://arxiv.org/abs/2112.05682); a query sees exactly the blocks that its own position and window name, in
order. Queries of one row share the blocks they load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.gate import capped
from p2pshard_node.engine.fused.maths import exp
from p2pshard_node.engine.fused.tickets import items
from p2pshard_node.engine.fused.vectors import (
    LANES,
    floats,
    highest,
    keep,
    larger,
    load,
    scores,
    store,
    total,
)

__all__ = ["KEYS", "QUERIES", "attend"]

KEYS = 64
"""Keys of a block."""
QUERIES = 8
"""Queries of a row that are computed together."""


@njit
def _weighted(
    weights: Any, at: int, value: int, stride: int, count: int, out: Any, to: int, width: int
) -> None:
    """out[to:to + width] += the sum of weights[at + i] x the values at address `value` + i x `stride`."""
    d = 0
    while d + 64 <= width:
        a, b = load(out, to + d), load(out, to + d + 16)
        c, e = load(out, to + d + 32), load(out, to + d + 48)
        for i in range(count):
            weight, place = floats(weights[at + i]), value + i * stride
            a, b = a + weight * load(place, d), b + weight * load(place, d + 16)
            c, e = c + weight * load(place, d + 32), e + weight * load(place, d + 48)
        store(out, to + d, a)
        store(out, to + d + 16, b)
        store(out, to + d + 32, c)
        store(out, to + d + 48, e)
        d += 64
    while d < width:
        a = load(out, to + d)
        for i in range(count):
            a = a + floats(weights[at + i]) * load(value + i * stride, d)
        store(out, to + d, a)
        d += LANES


@njit
def _gather(
    pool: int, table: Any, first: int, size: int, base: int, end: int, stride: int, copy: Any, at: int
) -> int:
    """Address of the sixteen keys from position `base` on: in the pool, or copied where blocks break them up."""
    if size % LANES == 0:
        return pool + (table[first + base // size] * size + base % size) * stride
    width = stride // 4
    for i in range(min(LANES, end - base)):
        position = base + i
        slot = table[first + position // size] * size + position % size
        for d in range(0, width, LANES):
            store(copy, at + i * width + d, load(pool + slot * stride, d))
    return copy.ctypes.data + at * 4


@njit
def _parts(crew: Any, count: int, group: int) -> int:
    """Into how many the queries that share a key are cut, where there is little else to share."""
    if crew.ranks == 1 or count == 0:
        return 1
    return max(1, min(group, 2 * crew.ranks // count))


@njit
def attend(
    crew: Any,
    ticket: int,
    layer: Any,
    rows: Any,
    table: Any,
    size: int,
    qkv: Any,
    out: Any,
    state: Any,
    blocks: Any,
    copy: Any,
) -> int:
    """out [T, heads x width]: attention of the queries in qkv [T, ...] over the pool. See `phases`.

    `rows`: int64 [R, 4], columns first and last, position of the first, start in `table`; `table`: blocks of all
    rows; `size`: tokens of a block; `state`: float32 scratch of `state_size`; `blocks`: int64 scratch [8]; `copy`:
    scratch for 128 keys' width.
    """
    shared, count = layer.shared, 0
    for row in range(rows.shape[0]):
        count += (rows[row, 1] - rows[row, 0] + QUERIES - 1) // QUERIES * shared
    parts = _parts(crew, count, layer.heads // shared)
    r, before = 0, 0
    for item in items(crew, ticket, count * parts):
        tile = item // (shared * parts) - before
        while tile * QUERIES >= rows[r, 1] - rows[r, 0]:
            tiles = (rows[r, 1] - rows[r, 0] + QUERIES - 1) // QUERIES
            r, before, tile = r + 1, before + tiles, tile - tiles
        head, part = item // parts % shared, item % parts
        begin = rows[r, 0] + tile * QUERIES
        _attend_some(layer, rows[r], table, size, begin, head, part, parts, qkv, out, state, blocks, copy)
    return ticket + count * parts


@njit
def _attend_some(
    layer: Any,
    row: Any,
    table: Any,
    size: int,
    begin: int,
    head: int,
    part: int,
    parts: int,
    qkv: Any,
    out: Any,
    state: Any,
    blocks: Any,
    copy: Any,
) -> None:
    """Some queries of a row from token `begin` on: part `part` of those that share the keys of `head`."""
    heads, shared, width = layer.heads, layer.shared, layer.width
    group, stride, lines = heads // shared, shared * width * 4, qkv.shape[1]
    window, cap = layer.window, layer.softcap
    lowest = np.float32(-np.inf)
    pairs = QUERIES * group
    first_pair, end_pair = part * group // parts, (part + 1) * group // parts
    # per pair: its maximum, sixteen partial masses; then the weights of one block
    peaks, masses, weights = 0, pairs, pairs * (1 + LANES)
    offset, first_block = row[2] - row[0], row[3]
    end = min(begin + QUERIES, row[1])
    last = end - 1 + offset
    low = max(0, begin + offset - window + 1) if window else 0
    for token in range(begin, end):
        for j in range(first_pair, end_pair):
            pair = (token - begin) * group + j
            state[peaks + pair] = lowest
            store(state, masses + pair * LANES, floats(np.float32(0.0)))
            for d in range(0, width, LANES):
                at = token * heads * width + (head * group + j) * width + d
                store(out, at, floats(np.float32(0.0)))
    for block in range(low // KEYS * KEYS, last + 1, KEYS):
        for g in range(KEYS // LANES):
            base = block + g * LANES
            if base <= last and base + LANES > low:
                at = g * LANES * shared * width
                blocks[2 * g] = (
                    _gather(layer.keys, table, first_block, size, base, last + 1, stride, copy, at)
                    + head * width * 4
                )
                at += KEYS * shared * width
                blocks[2 * g + 1] = (
                    _gather(layer.values, table, first_block, size, base, last + 1, stride, copy, at)
                    + head * width * 4
                )
        for token in range(begin, end):
            position = token + offset
            bottom = max(0, position - window + 1) if window else 0
            if block > position or block + KEYS <= bottom:
                continue
            for j in range(first_pair, end_pair):
                pair = (token - begin) * group + j
                at = (head * group + j) * width
                most = floats(lowest)
                from_group = max(0, bottom - block) // LANES
                to_group = min(KEYS, position - block + 1 + LANES - 1) // LANES
                for g in range(from_group, to_group):
                    s = scores(qkv, token * lines + at, blocks[2 * g], stride, width)
                    s = capped(s * floats(layer.scale), cap)
                    base = block + g * LANES
                    s = keep(s, bottom - base, position + 1 - base, floats(lowest))
                    store(state, weights + g * LANES, s)
                    most = larger(most, s)
                peak = max(state[peaks + pair], highest(most))
                to = token * heads * width + at
                if peak > state[peaks + pair]:
                    less = exp(floats(state[peaks + pair] - peak))
                    store(state, masses + pair * LANES, load(state, masses + pair * LANES) * less)
                    for d in range(0, width, LANES):
                        store(out, to + d, load(out, to + d) * less)
                    state[peaks + pair] = peak
                mass = load(state, masses + pair * LANES)
                for g in range(from_group, to_group):
                    e = exp(load(state, weights + g * LANES) - floats(peak))
                    store(state, weights + g * LANES, e)
                    mass = mass + e
                store(state, masses + pair * LANES, mass)
                for g in range(from_group, to_group):
                    base = block + g * LANES
                    skip = max(0, bottom - base)
                    count = min(LANES, position + 1 - base) - skip
                    place = blocks[2 * g + 1] + skip * stride
                    _weighted(state, weights + g * LANES + skip, place, stride, count, out, to, width)
    for token in range(begin, end):
        for j in range(first_pair, end_pair):
            pair = (token - begin) * group + j
            mass = floats(total(load(state, masses + pair * LANES)))
            for d in range(0, width, LANES):
                at = token * heads * width + (head * group + j) * width + d
                store(out, at, load(out, at) / mass)
