"""Exponential, sine and cosine from additions and products alone: the same bits on every processor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from p2pshard_node.engine.fused.vectors import bits, floats, ints, lowest_bits, pick, shifted

__all__ = ["exp", "rotation"]

#: Added and taken away again, it rounds a small float32 to a whole number; its bits then hold the number.
ROUND = np.float32(12582912.0)
ROUND_BITS = np.int32(0x4B400000)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)


@njit(inline="always")
def exp(x: Any) -> Any:
    """e^x of sixteen lanes, within 2 units of the last place; exactly 0 below -87, and of 88 above that.

    After Cephes' expf: x = n ln 2 + r, and a polynomial in r.
    """
    # compared this way round, a NaN stays one
    inside = pick(x, floats(_LOWEST), floats(_LOWEST), x)
    inside = pick(floats(_HIGHEST), inside, floats(_HIGHEST), inside)
    shift = floats(ROUND)
    rounded = inside * floats(np.float32(1.44269504088896341)) + shift
    n = rounded - shift
    r = inside - n * floats(np.float32(0.693359375)) - n * floats(np.float32(-2.12194440e-4))
    p = floats(np.float32(1.9875691500e-4))
    p = p * r + floats(np.float32(1.3981999507e-3))
    p = p * r + floats(np.float32(8.3334519073e-3))
    p = p * r + floats(np.float32(4.1665795894e-2))
    p = p * r + floats(np.float32(1.6666665459e-1))
    p = p * r + floats(np.float32(5.0000001201e-1))
    y = p * (r * r) + r + floats(np.float32(1.0))
    power = shifted(bits(rounded) - ints(ROUND_BITS))
    return pick(x, floats(_LOWEST), floats(np.float32(0.0)), lowest_bits(bits(y) + power))


@njit
def rotation(angle: float) -> tuple[float, float]:
    """(cos, sin) of a float64 angle up to 2^30, within 1e-9: reduced by quarter turns, then by Taylor series."""
    turns = np.floor(angle * 0.6366197723675814 + 0.5)
    r = angle - turns * 1.5707963109016418
    r = r - turns * 1.5893254712295857e-08 - turns * 6.123233995736765e-17
    z = r * r
    s = -7.647163731819816e-13
    s = s * z + 1.605904383682161e-10
    s = s * z - 2.505210838544172e-08
    s = s * z + 2.755731922398589e-06
    s = s * z - 1.984126984126984e-04
    s = s * z + 8.333333333333333e-03
    s = s * z - 1.666666666666667e-01
    s = s * z * r + r
    c = 2.087675698786810e-09
    c = c * z - 2.755731922398589e-07
    c = c * z + 2.480158730158730e-05
    c = c * z - 1.388888888888889e-03
    c = c * z + 4.166666666666666e-02
    c = c * z - 0.5
    c = c * z + 1.0
    quarter = np.int64(turns) & 3
    if quarter == 0:
        return c, s
    if quarter == 1:
        return -s, c
    if quarter == 2:
        return -c, -s
    return s, -c
