"""How a tensor's bytes lie in a frame: a registry of codecs by the name that frames carry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pshard.errors import ProtocolError

__all__ = ["CODECS", "Codec", "Raw", "codec"]

Array = npt.NDArray[Any]


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
        """A writable array over or from ``data[offset:offset + nbytes]``."""


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


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


CODECS: dict[str, Codec] = {c.name: c for c in (Raw(),)}


def codec(name: str) -> Codec:
    """Raises `ProtocolError` for a codec that this build does not have."""
    try:
        return CODECS[name]
    except KeyError:
        raise ProtocolError(f"unknown tensor codec {name!r}; this build has {', '.join(CODECS)}") from None
