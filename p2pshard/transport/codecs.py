"""How a tensor's bytes lie in a frame: a registry of codecs by the name that frames carry.

``raw`` loses nothing. ``bf16`` and ``q8`` are for hidden states on slow links, where a plan says so. At the middle layer
of SmolLM2-135M (480 tokens of prose, float32) bf16 changes a row of hidden states by 0.16 % and its logits by 0.13 % of
their spread; q8 by 1.0 % and 3.9 %; of Qwen2.5-Coder-1.5B (int8, whose own rounding amplifies any change) 0.16 % and
2.3 %, 0.9 % and 2.7 %. One scale for a whole row, without groups, would be 2.8 % and 9.1 %, 3.4 % and 4.6 %: a few
columns of the residual are hundreds of times larger than the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pshard.errors import ProtocolError

__all__ = ["CODECS", "GROUP", "Q8", "Bf16", "Codec", "Raw", "codec"]

Array = npt.NDArray[Any]

GROUP = 32
"""Values of a row that share a scale in ``q8``; the last group of a row may be shorter."""
_UINT16 = np.dtype("<u2")


class Codec(ABC):
    """Turns an array into bytes and back; the size of the bytes follows from dtype and shape alone."""

    name: str
    dtypes: frozenset[str]

    @abstractmethod
    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Encoded size, known before anything is allocated."""

    @abstractmethod
    def encode(self, array: Array) -> tuple[memoryview, ...]:
        """The bytes in pieces, without a copy where the array already lies right."""

    @abstractmethod
    def decode(self, data: bytearray, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """A writable array over or from ``data[offset:offset + nbytes]``. Raises `ProtocolError`."""


class Raw(Codec):
    """Little-endian values as they lie in memory."""

    name = "raw"
    dtypes = frozenset({"float32", "int32"})

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        return prod(shape) * 4  # both dtypes have four bytes

    def encode(self, array: Array) -> tuple[memoryview, ...]:
        return (_bytes(np.ascontiguousarray(array, array.dtype.newbyteorder("<"))),)

    def decode(self, data: bytearray, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        little = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(data, little, prod(shape), offset).reshape(shape).astype(dtype, copy=False)


class Bf16(Codec):
    """The upper half of each float32, rounded to nearest, ties to even. NaN stays NaN."""

    name = "bf16"
    dtypes = frozenset({"float32"})

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        return prod(shape) * 2

    def encode(self, array: Array) -> tuple[memoryview, ...]:
        return (_bytes(_to_bf16(np.ascontiguousarray(array, np.float32))),)

    def decode(self, data: bytearray, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        return _from_bf16(np.frombuffer(data, _UINT16, prod(shape), offset)).reshape(shape)


class Q8(Codec):
    """int8 values with one scale for each `GROUP` of a row: first all scales, as bf16, then all values.

    A value is off by at most half a scale, and a scale is at most 1.008 / 127 of the largest magnitude of its group (it
    is rounded up to a bf16). Values must be finite, as a stage's results are: `decode` refuses what is not.
    """

    name = "q8"
    dtypes = frozenset({"float32"})

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        rows, width = shape
        return rows * (2 * -(-width // GROUP) + width)

    def encode(self, array: Array) -> tuple[memoryview, ...]:
        rows, width = array.shape
        grouped_TGV = _grouped(np.asarray(array, np.float32))
        largest_TG = np.abs(grouped_TGV).max(axis=2, initial=0.0)
        # Up, so that no value rounds beyond 127; float32 bits grow with the value.
        scale_bits = ((largest_TG / np.float32(127)).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
        scales_TG = _from_bf16(scale_bits.astype(_UINT16))
        divisors_TG = np.where(scales_TG > 0, scales_TG, np.float32(1))
        scaled_TGV = grouped_TGV / divisors_TG[:, :, None]
        values_TD = (
            np.rint(scaled_TGV, out=scaled_TGV)
            .astype(np.int8)
            .reshape(rows, scaled_TGV.shape[1] * GROUP)[:, :width]
        )
        return (_bytes(scale_bits.astype(_UINT16)), _bytes(np.ascontiguousarray(values_TD)))

    def decode(self, data: bytearray, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        rows, width = shape
        groups = -(-width // GROUP)
        scales_TG = _from_bf16(np.frombuffer(data, _UINT16, rows * groups, offset)).reshape(rows, groups)
        if not (np.isfinite(scales_TG) & (scales_TG >= 0)).all():
            raise ProtocolError("bad frame: a scale of hidden states is no finite number of at least 0")
        values_TD = np.frombuffer(data, np.int8, rows * width, offset + 2 * rows * groups).reshape(
            rows, width
        )
        hidden_TD = values_TD.astype(np.float32)
        whole = width - width % GROUP
        in_groups = hidden_TD[:, :whole].reshape(rows, whole // GROUP, GROUP)
        in_groups *= scales_TG[:, : whole // GROUP, None]
        if whole < width:
            hidden_TD[:, whole:] *= scales_TG[:, -1:]
        return hidden_TD


def _grouped(array_TD: Array) -> Array:
    """[T, groups, GROUP], with zeros behind a row that does not fill its last group."""
    rows, width = array_TD.shape
    missing = -width % GROUP
    if missing:
        array_TD = np.pad(array_TD, ((0, 0), (0, missing)))
    return array_TD.reshape(rows, (width + missing) // GROUP, GROUP)


def _to_bf16(array: Array) -> Array:
    bits = array.view(np.uint32)
    rounded = (
        (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    ).astype(_UINT16)
    rounded[np.isnan(array)] = 0x7FC0
    return rounded


def _from_bf16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


CODECS: dict[str, Codec] = {c.name: c for c in (Raw(), Bf16(), Q8())}


def codec(name: str) -> Codec:
    """Raises `ProtocolError` for a codec that this build does not have."""
    try:
        return CODECS[name]
    except KeyError:
        raise ProtocolError(f"unknown tensor codec {name!r}; this build has {', '.join(CODECS)}") from None
