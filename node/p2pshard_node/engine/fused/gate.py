"""The gated activation of an MLP."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.maths import exp
from p2pshard_node.engine.fused.vectors import LANES, floats, highest, load, store

__all__ = ["GELU_TANH", "SILU", "activate", "cap_row", "capped"]

SILU, GELU_TANH = 1, 2


@njit
def activate(x: Any, at: int, width: int, kind: int) -> None:
    """x[at:at + width] = f(x[at:at + width]) x[at + width:at + 2 width].

    GELU's tanh form is written x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    one, none = floats(np.float32(1.0)), floats(np.float32(0.0))
    for i in range(0, width, LANES):
        a = load(x, at + i)
        inner = none - a
        if kind == GELU_TANH:
            cubic = a + floats(np.float32(0.044715)) * a * a * a
            inner = floats(np.float32(-1.5957691216057308)) * cubic
        store(x, at + i, a / (one + exp(inner)) * load(x, at + width + i))


@njit
def cap_row(row: Any, factor: Any, cap: Any) -> None:
    """row = factor x row, then softly capped (see `capped`)."""
    width = row.shape[0]
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        store(row, i, capped(load(row, i) * floats(factor), cap))
    for i in range(whole, width):
        row[i] = highest(capped(floats(row[i] * factor), cap))


@njit
def capped(x: Any, cap: Any) -> Any:
    """c tanh(x / c) for a `cap` c above 0, written c - 2 c / (e^(2 x / c) + 1); x for 0."""
    if cap > 0:
        one, twice = floats(np.float32(1.0)), floats(np.float32(2.0) * cap)
        x = floats(cap) - twice / (exp(x * floats(np.float32(2.0) / cap)) + one)
    return x
