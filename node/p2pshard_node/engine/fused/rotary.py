"""Rotary position embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from p2pshard_node.engine.fused.maths import rotation
from p2pshard_node.engine.kernel_cache import kernel

__all__ = ["angles", "rotate"]

from numba import njit


@kernel
def angles(positions: Any, frequencies: Any, scalings: Any, cos: Any, sin: Any) -> None:
    """float32 cos and sin [F, T, half] of `positions` (int64 [T]) times `frequencies` (float32 [F, half]).

    The angle is rounded to float32 first, as transformers does.
    """
    for kind in range(frequencies.shape[0]):
        for token in range(positions.shape[0]):
            for i in range(frequencies.shape[1]):
                angle = np.float32(positions[token]) * frequencies[kind, i]
                c, s = rotation(np.float64(angle))
                cos[kind, token, i] = np.float32(c) * scalings[kind]
                sin[kind, token, i] = np.float32(s) * scalings[kind]


@njit
def rotate(x: Any, token: int, at: int, cos: Any, sin: Any, interleaved: int) -> None:
    """One head, x[token, at:], in place: pairs (i, i + half), or (2i, 2i + 1) when interleaved."""
    half = cos.shape[0]
    row = x[token]
    if interleaved:
        for i in range(half):
            a, b = row[at + 2 * i], row[at + 2 * i + 1]
            row[at + 2 * i] = a * cos[i] - b * sin[i]
            row[at + 2 * i + 1] = b * cos[i] + a * sin[i]
    else:
        low, high = row[at : at + half], row[at + half : at + 2 * half]
        for i in range(half):
            a, b = low[i], high[i]
            low[i] = a * cos[i] - b * sin[i]
            high[i] = b * cos[i] + a * sin[i]
