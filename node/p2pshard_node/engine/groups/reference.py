"""The product's definition in numpy: the very floats that the compiled one gives, one operation at a time."""

from __future__ import annotations

import numpy as np

from p2pshard.models.groups import FINE, GROUP
from p2pshard_node.engine.groups.repack import GroupRows

__all__ = ["reference_product"]

_F = np.float32


def _quantised(x_TK: np.ndarray, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """Integers [T, G, 32] and float32 scales [T, G]."""
    x = x_TK.reshape(len(x_TK), -1, GROUP)
    most = _F(127 * 128 if wide else 127)
    largest = np.abs(x).max(axis=2)
    some = largest > _F(2.0**-100)
    safe = np.where(some, largest, _F(1))
    scale = np.where(some, safe / most, _F(0))
    integers = np.rint(x * np.where(some, most / safe, _F(0))[..., None]).astype(np.int64)
    return integers, scale


def reference_product(weights: GroupRows, x_TK: np.ndarray, wide: bool) -> np.ndarray:
    """float32 [T, N] of finite float32 `x_TK`."""
    layout = weights.layout
    x_TGK, a_TG = _quantised(x_TK, wide)
    tokens, groups, _ = x_TGK.shape
    q_NGK = weights.q_RGK.astype(np.int64) - layout.zero
    scale_NG = np.repeat(weights.scale_RB.astype(_F), layout.groups, axis=1)
    low_NG = None
    if weights.low_RB is not None:
        low_NG = np.repeat(weights.low_RB.astype(_F), layout.groups, axis=1)
    parts = [slice(0, GROUP)]
    scales = [scale_NG]
    if weights.sub_RG2 is not None and layout.scales == FINE:
        parts = [slice(0, GROUP // 2), slice(GROUP // 2, GROUP)]
        scales = [scale_NG * weights.sub_RG2.view(np.int8)[..., i].astype(_F) for i in range(2)]
    elif weights.sub_RG2 is not None:
        scales = [scale_NG * weights.sub_RG2[..., 0].astype(_F)]
        low_NG = None if low_NG is None else low_NG * weights.sub_RG2[..., 1].astype(_F)
    b_TG = a_TG * x_TGK.sum(axis=2).astype(_F)
    y_TN = np.zeros((tokens, len(q_NGK)), _F)
    for g in range(groups):
        term_TN: np.ndarray | None = None
        for part, scale in zip(parts, scales, strict=True):
            sums_TN = x_TGK[:, g, part] @ q_NGK[:, g, part].T
            some_TN = sums_TN.astype(_F) * scale[:, g]
            term_TN = some_TN if term_TN is None else term_TN + some_TN
        assert term_TN is not None
        term_TN = term_TN * a_TG[:, g, None]
        if low_NG is not None:
            term_TN = term_TN - low_NG[:, g] * b_TG[:, g, None]
        y_TN = y_TN + term_TN
    return y_TN
