"""RMSNorm and LayerNorm of single rows, summed in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.vectors import LANES, floats, load, store, total

__all__ = ["LAYER_NORM", "NONE", "NORM", "RMS", "normalise"]

NONE, RMS, LAYER_NORM = 0, 1, 2
#: A norm in memory: addresses of its weight and bias (float32 [width], 0: none).
NORM = np.dtype(
    [
        ("weight", np.int64),
        ("bias", np.int64),
        ("width", np.int64),
        ("kind", np.int64),
        ("eps", np.float32),
    ],
    align=True,
)


@njit
def _sum(x: Any, at: int, width: int, mean: Any, square: bool) -> Any:
    """Sum of x - mean, or of its square: four accumulators of sixteen lanes."""
    a = floats(np.float32(0.0))
    b, c, d = a, a, a
    i = 0
    while i + 4 * LANES <= width:
        v0, v1 = load(x, at + i) - mean, load(x, at + i + 16) - mean
        v2, v3 = load(x, at + i + 32) - mean, load(x, at + i + 48) - mean
        if square:
            v0, v1, v2, v3 = v0 * v0, v1 * v1, v2 * v2, v3 * v3
        a, b, c, d = a + v0, b + v1, c + v2, d + v3
        i += 4 * LANES
    while i < width:
        v0 = load(x, at + i) - mean
        a = a + (v0 * v0 if square else v0)
        i += LANES
    return total((a + b) + (c + d))


@njit
def normalise(x: Any, at: int, norm: Any, y: Any, to: int) -> None:
    """`norm.width` floats of `x` from `at`, normalised to `y` from `to` (which may be the same place)."""
    width = norm.width
    mean = floats(np.float32(0.0))
    if norm.kind == LAYER_NORM:
        mean = floats(_sum(x, at, width, mean, False) / np.float32(width))
    variance = _sum(x, at, width, mean, True) / np.float32(width)
    factor = floats(np.float32(1.0) / np.sqrt(variance + norm.eps))
    for i in range(0, width, LANES):
        value = (load(x, at + i) - mean) * factor * load(norm.weight, i)
        if norm.bias:
            value = value + load(norm.bias, i)
        store(y, to + i, value)
