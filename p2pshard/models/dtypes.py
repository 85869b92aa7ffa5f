"""Storage types of tensors in model files: how large a tensor is, and which types we read.

The block sizes are those of ggml (``ggml/src/ggml-common.h``); the names of the others are known so that a
refusal can say what a file holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2pshard.errors import ModelCorrupt, UnsupportedModel

__all__ = ["GGML_TYPES", "READABLE_GGUF", "StorageType", "gguf_type", "refuse_storage", "tensor_nbytes"]


@dataclass(frozen=True)
class StorageType:
    """How values lie in a file."""

    name: str
    block: int
    """Values in one block; a row is a whole number of blocks."""
    nbytes: int
    """Bytes of one block."""


_READABLE = {
    0: StorageType("F32", 1, 4),
    1: StorageType("F16", 1, 2),
    2: StorageType("Q4_0", 32, 18),
    3: StorageType("Q4_1", 32, 20),
    6: StorageType("Q5_0", 32, 22),
    7: StorageType("Q5_1", 32, 24),
    8: StorageType("Q8_0", 32, 34),
    10: StorageType("Q2_K", 256, 84),
    11: StorageType("Q3_K", 256, 110),
    12: StorageType("Q4_K", 256, 144),
    13: StorageType("Q5_K", 256, 176),
    14: StorageType("Q6_K", 256, 210),
    30: StorageType("BF16", 1, 2),
}
GGML_TYPES: dict[int, StorageType] = _READABLE
"""By ggml's type number: what we read."""
READABLE_GGUF: dict[str, StorageType] = {t.name: t for t in _READABLE.values()}

_OTHER_GGML = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SAFETENSORS = _FLOATS | {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "U32": 4,
    "I32": 4, "U64": 8, "I64": 8,
}  # fmt: skip
_SPOKEN = {
    "F8_E4M3": "FP8 (E4M3)",
    "F8_E5M2": "FP8 (E5M2)",
    "F8_E8M0": "MX scales (E8M0)",
    "F4": "FP4",
    "U8": "packed bytes (U8, as MXFP4 and bitsandbytes write)",
    "I32": "packed integers (I32, as GPTQ and AWQ write)",
}


def gguf_type(number: int, tensor: str, where: str) -> StorageType:
    """The storage type of a GGUF tensor. Raises `UnsupportedModel`, naming the quantisation."""
    if found := GGML_TYPES.get(number):
        return found
    name = _OTHER_GGML.get(number, f"number {number}")
    raise UnsupportedModel(
        f"{where}: tensor {tensor!r} is stored as {name}, which is not read here; "
        f"use a file in one of {', '.join(READABLE_GGUF)}",
        quantisation=name,
    )


def refuse_storage(dtype: str, tensor: str, where: str) -> None:
    """Raise `UnsupportedModel`, naming the type, unless it holds plain numbers that we read."""
    if dtype in _FLOATS:
        return
    name = _SPOKEN.get(dtype, dtype[:20])
    raise UnsupportedModel(
        f"{where}: tensor {tensor!r} is stored as {name}, which is not read here; "
        "use an unquantised checkpoint (float32, float16, bfloat16) or a GGUF file",
        quantisation=name,
    )


def tensor_nbytes(format: str, dtype: str, shape: tuple[int, ...], tensor: str, where: str) -> int:
    """Bytes of a tensor, exactly.

    Raises:
        UnsupportedModel: a storage type that we do not read.
        ModelCorrupt: a row that is not a whole number of blocks, or a size beyond 2^62.
    """
    if format == "gguf":
        storage = READABLE_GGUF.get(dtype)
        if storage is None:
            raise UnsupportedModel(f"{where}: tensor {tensor!r} is stored as {dtype}, which is not read here")
        row = shape[-1] if shape else 1
        if row % storage.block:
            raise ModelCorrupt(
                f"{where}: rows of {tensor!r} have {row} values, not a multiple of {storage.block}"
            )
        nbytes = math.prod(shape) // storage.block * storage.nbytes
    else:
        if dtype not in _SAFETENSORS:
            refuse_storage(dtype, tensor, where)
        nbytes = math.prod(shape) * _SAFETENSORS[dtype]
    if nbytes > 2**62:
        raise ModelCorrupt(f"{where}: tensor {tensor!r} claims {nbytes} bytes")
    return nbytes
