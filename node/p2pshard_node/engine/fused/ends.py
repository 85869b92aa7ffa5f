"""What is before and behind a stage's layers, and a single linear layer: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from p2pshard_node.engine.fused.gate import cap_row
from p2pshard_node.engine.fused.phases import TILE, prepare_row, products, quantise_rows
from p2pshard_node.engine.fused.tickets import fail, failed, items
from p2pshard_node.engine.fused.vectors import (
    LANES,
    bits,
    highest_int,
    ints,
    larger_int,
    load,
)
from p2pshard_node.engine.kernel_cache import kernel

__all__ = ["all_finite", "head", "linear", "places"]


@kernel
def head(
    crew: Any,
    hidden: Any,
    take: Any,
    norm: Any,
    matrix: Any,
    y: Any,
    factor: Any,
    cap: Any,
    q: Any,
    sums: Any,
    scales: Any,
    works: Any,
    scratches: Any,
) -> bool:
    """float32 logits y [R, V] of the rows `take` (int64 [R]) of hidden [T, D]; whether all was finite.

    Scaled by `factor`, then softly capped at `cap` (0: not).
    """
    width, wanted = hidden.shape[1], y.shape[1]
    work, scratch = works[crew.rank], scratches[crew.rank]
    ticket = crew.begin
    for begin in range(0, take.shape[0], TILE):
        count = min(TILE, take.shape[0] - begin)
        for t in items(crew, ticket, count):
            at = take[begin + t] * width
            if not prepare_row(hidden, at, norm[0], width, matrix[0].form, work, q, sums, scales, t, count):
                fail(crew)
        ticket += count
        ticket = products(crew, ticket, matrix, q, sums, scales, count, y, wanted, begin * wanted, scratch)
    if factor != np.float32(1.0) or cap > 0:
        for t in items(crew, ticket, y.shape[0]):
            cap_row(y[t], factor, cap)
    return not failed(crew)


@kernel
def linear(crew: Any, x: Any, matrix: Any, y: Any, q: Any, sums: Any, scales: Any, scratches: Any) -> bool:
    """y [T, N]: one layer's product with x [T, K]; whether x was finite."""
    width, wanted = x.shape[1], y.shape[1]
    ticket = crew.begin
    for begin in range(0, x.shape[0], TILE):
        count = min(TILE, x.shape[0] - begin)
        ticket = quantise_rows(crew, ticket, x, begin, count, width, matrix[0].form, q, sums, scales)
        ticket = products(
            crew, ticket, matrix, q, sums, scales, count, y, wanted, begin * wanted, scratches[crew.rank]
        )
    return not failed(crew)


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
