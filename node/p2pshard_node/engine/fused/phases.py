"""Phases of a step that threads share: products by panels of outputs, all else by tokens.

Each takes its first ticket and returns that of the phase after it; all its items are done by then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.gate import activate
from p2pshard_node.engine.fused.norm import NONE, normalise
from p2pshard_node.engine.fused.product import multiply, panels_of, quantise
from p2pshard_node.engine.fused.tickets import fail, items, share
from p2pshard_node.engine.fused.vectors import LANES, floats, load, store

__all__ = ["TILE", "add", "add_and_prepare", "gate", "prepare", "prepare_row", "products", "quantise_rows"]

TILE = 64
"""Tokens that pass through a layer's products together: bounds the scratch, and keeps it in the cache."""


@njit
def _chunks(matrices: Any, step: int) -> int:
    """How many items the matrices' panels are, `step` panels each."""
    count = 0
    for m in range(matrices.shape[0]):
        count += (panels_of(matrices[m]) + step - 1) // step
    return count


@njit
def products(
    crew: Any,
    ticket: int,
    matrices: Any,
    q: Any,
    sums: Any,
    scales: Any,
    count: int,
    y: Any,
    stride: int,
    column: int,
    scratch: Any,
) -> int:
    """Outputs of `matrices` of one input, the rows of `q`, side by side from `column` of `y` on."""
    step = share(crew, _chunks(matrices, 1))
    chunks = _chunks(matrices, step)
    for item in items(crew, ticket, chunks):
        begin, m, place = item * step, 0, column
        while begin >= panels_of(matrices[m]):
            begin -= (panels_of(matrices[m]) + step - 1) // step * step
            place += matrices[m].outputs
            m += 1
        multiply(matrices[m], begin, begin + step, q, sums, scales, count, y, stride, place, scratch)
    return ticket + chunks


@njit
def prepare_row(
    x: Any,
    at: int,
    norm: Any,
    width: int,
    form: int,
    work: Any,
    q: Any,
    sums: Any,
    scales: Any,
    token: int,
    count: int,
) -> bool:
    """Row of the next product: normalised, if the layer does that, and quantised."""
    if norm.kind == NONE:
        return quantise(x, at, width, form, q, sums, scales, token, count)
    normalise(x, at, norm, work, 0)
    return quantise(work, 0, width, form, q, sums, scales, token, count)


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
def prepare(
    crew: Any,
    ticket: int,
    hidden: Any,
    begin: int,
    count: int,
    norm: Any,
    form: int,
    work: Any,
    q: Any,
    sums: Any,
    scales: Any,
) -> int:
    """Rows of the next product from `count` rows of `hidden`, from `begin` on."""
    width = hidden.shape[1]
    for t in items(crew, ticket, count):
        if not prepare_row(hidden, (begin + t) * width, norm, width, form, work, q, sums, scales, t, count):
            fail(crew)
    return ticket + count


@njit
def quantise_rows(
    crew: Any,
    ticket: int,
    x: Any,
    begin: int,
    count: int,
    width: int,
    form: int,
    q: Any,
    sums: Any,
    scales: Any,
) -> int:
    """As `prepare`, without a norm and from rows of `width`."""
    for t in items(crew, ticket, count):
        if not quantise(x, (begin + t) * width, width, form, q, sums, scales, t, count):
            fail(crew)
    return ticket + count


@njit
def add(crew: Any, ticket: int, hidden: Any, begin: int, count: int, y: Any, norm: Any, factor: Any) -> int:
    """`count` rows of `y` to those of `hidden` from `begin` on."""
    width = hidden.shape[1]
    for t in items(crew, ticket, count):
        _add(hidden, (begin + t) * width, y, t, norm, width, factor)
    return ticket + count


@njit
def add_and_prepare(
    crew: Any,
    ticket: int,
    hidden: Any,
    begin: int,
    count: int,
    y: Any,
    norm: Any,
    factor: Any,
    following: Any,
    form: int,
    work: Any,
    q: Any,
    sums: Any,
    scales: Any,
) -> int:
    """`add`, then `prepare` with the norm `following`."""
    width = hidden.shape[1]
    for t in items(crew, ticket, count):
        at = (begin + t) * width
        _add(hidden, at, y, t, norm, width, factor)
        if not prepare_row(hidden, at, following, width, form, work, q, sums, scales, t, count):
            fail(crew)
    return ticket + count


@njit
def gate(
    crew: Any,
    ticket: int,
    gated: Any,
    count: int,
    inner: int,
    activation: int,
    form: int,
    q: Any,
    sums: Any,
    scales: Any,
) -> int:
    """gated [T, 2 x inner]: the activation of each row's first half times the second, as rows of a product."""
    for t in items(crew, ticket, count):
        at = t * 2 * inner
        activate(gated, at, inner, activation)
        if not quantise(gated, at, inner, form, q, sums, scales, t, count):
            fail(crew)
    return ticket + count
