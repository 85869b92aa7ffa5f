"""Groups made by us from float weights: 4 bits with the best scale and minimum found, or 8 bits.

The same weights give the same bytes on every processor: groups are searched side by side, so that nothing is
summed across lanes, and no operation is reordered.
"""

from __future__ import annotations

import numpy as np

from p2pshard.errors import UnsupportedModel
from p2pshard.models.groups import GROUP, LAYOUTS, GroupLayout
from p2pshard_node.engine.groups.repack import GroupRows
from p2pshard_node.engine.kernel_cache import kernel

__all__ = ["make_groups"]

_SIDE = 64
"""Groups searched side by side."""
_TRIALS = 20
"""Ranges tried, from a little wider than the group's own to a third narrower."""


def make_groups(layout: GroupLayout, rows_RK: np.ndarray) -> GroupRows:
    """float32 rows in the layout ``Q4_1`` or ``Q8_0``. Raises `UnsupportedModel` for values beyond float16's
    range or not finite."""
    x_RGK = np.ascontiguousarray(rows_RK, np.float32).reshape(len(rows_RK), -1, GROUP)
    largest = float(np.abs(x_RGK).max(initial=0.0))
    if not largest <= 60_000:
        raise UnsupportedModel(f"int4 cannot hold weights as large as {largest:.3g}; use bfloat16 or float32")
    if layout is LAYOUTS["Q4_1"]:
        scale_RG, low_RG = _search(x_RGK)
        return GroupRows(layout, _nearest(x_RGK, scale_RG, low_RG, 0, 15), scale_RG, low_RG)
    if layout is not LAYOUTS["Q8_0"]:
        raise ValueError(f"groups of {layout.name} are not made from floats")
    scale_RG = (np.abs(x_RGK).max(axis=2) / np.float32(127)).astype(np.float16)
    return GroupRows(layout, _nearest(x_RGK, scale_RG, np.zeros_like(scale_RG), 1, 255), scale_RG)


def _nearest(
    x_RGK: np.ndarray, scale_RG: np.ndarray, low_RG: np.ndarray, least: int, most: int
) -> np.ndarray:
    """Integers from `least` to `most`, 128 added where there is no minimum."""
    scale, low = scale_RG.astype(np.float32).ravel(), low_RG.astype(np.float32).ravel()
    q_RGK = np.empty(x_RGK.shape, np.uint8)
    zero = 0 if least == 0 else 128
    _round(x_RGK.reshape(-1, GROUP), scale, low, q_RGK.reshape(-1, GROUP), zero, least, most)
    return q_RGK


def _search(x_RGK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and what is subtracted, float16 [R, G] each."""
    flat = x_RGK.reshape(-1, GROUP)
    lack = -len(flat) % _SIDE
    if lack:
        flat = np.concatenate([flat, np.zeros((lack, GROUP), np.float32)])
    made = np.empty((2, len(flat)), np.float32)
    _fit(flat, made)
    scale, low = made[:, : len(flat) - lack].reshape(2, *x_RGK.shape[:2]).astype(np.float16)
    return scale, low


@kernel
def _round(x, scale, low, q, zero, least, most):  # type: ignore[no-untyped-def]
    one, offset = np.float32(1), np.float32(zero) + np.float32(0.5)
    lowest, highest = np.float32(least), np.float32(most)
    for group in range(len(x)):
        inverse = one / scale[group] if scale[group] > 0 else np.float32(0)
        for k in range(GROUP):
            value = np.floor((x[group, k] + low[group]) * inverse + offset)
            q[group, k] = np.uint8(min(max(value, lowest), highest))


@kernel
def _fit(x, made):  # type: ignore[no-untyped-def]
    """For every group the range, of `_TRIALS`, whose rounded integers leave the least squared error once scale
    and minimum are fitted to them (least squares), as ggml's ``make_qkx2_quants`` does."""
    one, half, zero = np.float32(1), np.float32(0.5), np.float32(0)
    v = np.empty((GROUP, _SIDE), np.float32)
    low, high = np.empty(_SIDE, np.float32), np.empty(_SIDE, np.float32)
    best, inverse, begin = (
        np.empty(_SIDE, np.float32),
        np.empty(_SIDE, np.float32),
        np.empty(_SIDE, np.float32),
    )
    sums = np.empty((5, _SIDE), np.float32)
    for first in range(0, len(x), _SIDE):
        low[:], high[:] = 0, 0  # zero stays representable: many weights are
        for k in range(GROUP):
            for i in range(_SIDE):
                value = x[first + i, k]
                v[k, i] = value
                low[i] = min(low[i], value)
                high[i] = max(high[i], value)
        best[:] = np.inf
        for trial in range(_TRIALS):
            share = np.float32(1.06) - np.float32(0.02) * np.float32(trial)
            for i in range(_SIDE):
                span = (high[i] - low[i]) * share
                begin[i] = low[i] + (high[i] - low[i] - span) * half
                inverse[i] = np.float32(15) / span if span > zero else zero
            sums[:] = 0
            for k in range(GROUP):
                for i in range(_SIDE):
                    value = v[k, i]
                    q = np.floor((value - begin[i]) * inverse[i] + half)
                    q = min(max(q, zero), np.float32(15))
                    sums[0, i] += q
                    sums[1, i] += q * q
                    sums[2, i] += value
                    sums[3, i] += q * value
                    sums[4, i] += value * value
            for i in range(_SIDE):
                count = np.float32(GROUP)
                spread = count * sums[1, i] - sums[0, i] * sums[0, i]
                if spread > zero:
                    scale = (count * sums[3, i] - sums[0, i] * sums[2, i]) / spread
                    base = (sums[2, i] - scale * sums[0, i]) / count
                else:
                    scale, base = zero, sums[2, i] / count
                # of sum (scale q + base - v)^2
                error = (
                    sums[4, i]
                    + scale * (scale * sums[1, i] + (one + one) * (base * sums[0, i] - sums[3, i]))
                    + base * (count * base - (one + one) * sums[2, i])
                )
                if error < best[i]:
                    best[i] = error
                    made[0, first + i] = scale
                    made[1, first + i] = -base
