"""Blocks of a GGUF file → groups, value for value.

The block formats are those of ggml (``ggml/src/ggml-common.h``); ``gguf.quants`` reads the same ones. Every type
here keeps its integers and its scales as the file has them, so a weight's value is the same float32 that
``gguf.quants.dequantize`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2pshard.models.groups import FINE, GROUP, LAYOUTS, PLAIN, GroupLayout

__all__ = ["GroupRows", "repack"]


@dataclass(frozen=True)
class GroupRows:
    """Some rows of a matrix: R rows of B blocks, G groups in all."""

    layout: GroupLayout
    q_RGK: np.ndarray
    """uint8 [R, G, 32]."""
    scale_RB: np.ndarray
    """float16."""
    low_RB: np.ndarray | None = None
    """float16, what is subtracted; None without a minimum."""
    sub_RG2: np.ndarray | None = None
    """uint8 (the bits of int8 in a fine layout); None in a plain one."""

    def values(self) -> np.ndarray:
        """float32 [R, K], in the order of operations of ``gguf.quants``."""
        rows, groups, _ = self.q_RGK.shape
        layout = self.layout
        scale = self.scale_RB.astype(np.float32)
        low = None if self.low_RB is None else self.low_RB.astype(np.float32)
        if self.sub_RG2 is not None:
            scale = np.repeat(scale, layout.groups, axis=1)
            if layout.scales == FINE:
                scale = scale[..., None] * self.sub_RG2.view(np.int8)
            else:
                scale = scale * self.sub_RG2[..., 0]
            if low is not None:
                low = np.repeat(low, layout.groups, axis=1) * self.sub_RG2[..., 1]
        q = self.q_RGK.astype(np.float32)
        if layout.zero:
            q -= np.float32(layout.zero)
        parts = 2 if layout.scales == FINE else 1
        q = q.reshape(rows, groups * parts, GROUP // parts)
        q *= scale.reshape(rows, groups * parts, 1)
        if low is not None:
            q -= low.reshape(rows, groups, 1)
        return q.reshape(rows, groups * GROUP)


def repack(dtype: str, data: np.ndarray) -> GroupRows | None:
    """Rows as the file stores them, uint8 [R, row bytes]; None for a type that has no layout (Q2_K, floats)."""
    make = _TYPES.get(dtype)
    return None if make is None else make(data)


def _fields(data: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """The parts of every block, uint8 [R, B, size] each."""
    blocks = data.reshape(len(data), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=2)


def _half(field: np.ndarray) -> np.ndarray:
    halves: np.ndarray = np.ascontiguousarray(field).view("<f2").reshape(field.shape[:-1])
    return halves


def _nibbles(field: np.ndarray, run: int) -> np.ndarray:
    """Low, then high halves of every `run` bytes: [R, ..., 32]."""
    pairs = field.reshape(*field.shape[:2], -1, 1, run)
    both = np.concatenate([pairs & 15, pairs >> 4], axis=3)
    return both.reshape(len(field), -1, GROUP)


def _bits(field: np.ndarray, count: int, width: int) -> np.ndarray:
    """Every 32 bytes as `count` groups, from the lowest bits up, `width` bits a value: [R, groups, 32]."""
    shifts = np.arange(count, dtype=np.uint8)[:, None] * np.uint8(width)
    runs = field.reshape(*field.shape[:2], -1, 1, GROUP)
    return ((runs >> shifts) & ((1 << width) - 1)).reshape(len(field), -1, GROUP)


def _fifth(field: np.ndarray) -> np.ndarray:
    """Four bytes of a block as 32 single bits: [R, B, 32]."""
    return np.unpackbits(np.ascontiguousarray(field), axis=2, bitorder="little")


def _q4_0(data: np.ndarray) -> GroupRows:
    d, q = _fields(data, 2, 16)
    return GroupRows(LAYOUTS["Q4_0"], _nibbles(q, 16), _half(d))


def _q4_1(data: np.ndarray) -> GroupRows:
    d, m, q = _fields(data, 2, 2, 16)
    return GroupRows(LAYOUTS["Q4_1"], _nibbles(q, 16), _half(d), -_half(m))


def _q5_0(data: np.ndarray) -> GroupRows:
    d, top, q = _fields(data, 2, 4, 16)
    return GroupRows(LAYOUTS["Q5_0"], _nibbles(q, 16) | _fifth(top) << 4, _half(d))


def _q5_1(data: np.ndarray) -> GroupRows:
    d, m, top, q = _fields(data, 2, 2, 4, 16)
    return GroupRows(LAYOUTS["Q5_1"], _nibbles(q, 16) | _fifth(top) << 4, _half(d), -_half(m))


def _q8_0(data: np.ndarray) -> GroupRows:
    d, q = _fields(data, 2, 32)
    return GroupRows(LAYOUTS["Q8_0"], np.ascontiguousarray(q) ^ 128, _half(d))


def _six_bit_pairs(field: np.ndarray) -> np.ndarray:
    """Scale and minimum of the eight groups of a block, uint8 [R, G, 2]."""
    low, high, mixed = np.split(field, 3, axis=2)
    scale = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=2)
    minimum = np.concatenate([high & 63, (mixed >> 4) | ((high >> 2) & 48)], axis=2)
    return np.stack([scale, minimum], axis=3).reshape(len(field), -1, 2)


def _q4_k(data: np.ndarray) -> GroupRows:
    d, m, scales, q = _fields(data, 2, 2, 12, 128)
    return GroupRows(LAYOUTS["Q4_K"], _nibbles(q, 32), _half(d), _half(m), _six_bit_pairs(scales))


def _q5_k(data: np.ndarray) -> GroupRows:
    d, m, scales, top, q = _fields(data, 2, 2, 12, 32, 128)
    whole = _nibbles(q, 32) | _bits(top, 8, 1) << 4
    return GroupRows(LAYOUTS["Q5_K"], whole, _half(d), _half(m), _six_bit_pairs(scales))


def _q3_k(data: np.ndarray) -> GroupRows:
    top, q, scales, d = _fields(data, 32, 64, 12, 2)
    low = np.concatenate([scales[..., :8] & 15, scales[..., :8] >> 4], axis=2)
    high = np.concatenate([(scales[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    sub = ((low | high << 4).astype(np.int8) - np.int8(32)).view(np.uint8)
    # a set top bit means that 4 is not subtracted: with it as the value's third bit, 4 always is
    whole = _bits(q, 4, 2) | _bits(top, 8, 1) << 2
    return GroupRows(LAYOUTS["Q3_K"], whole, _half(d), None, sub.reshape(len(data), -1, 2))


def _q6_k(data: np.ndarray) -> GroupRows:
    low, top, scales, d = _fields(data, 128, 64, 16, 2)
    whole = _nibbles(low, 64).reshape(len(data), -1, GROUP) | _bits(top, 4, 2) << 4
    sub = np.ascontiguousarray(scales).reshape(len(data), -1, 2)
    return GroupRows(LAYOUTS["Q6_K"], whole, _half(d), None, sub)


_TYPES: dict[str, Callable[[np.ndarray], GroupRows]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
assert _TYPES.keys() == LAYOUTS.keys()
assert all((layout.scales == PLAIN) == (layout.groups == 1) for layout in LAYOUTS.values())
