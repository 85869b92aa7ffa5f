"""Random blocks of ggml's types, as a file would hold them."""

from __future__ import annotations

import gguf
import numpy as np

from p2pshard.models.dtypes import READABLE_GGUF

__all__ = ["dequantised", "random_blocks"]

#: Where a block's float16 numbers lie; all other bytes may be anything.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(dtype: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, row bytes]; every integer, sub-scale and sign occurs."""
    random = np.random.default_rng(seed)
    storage = READABLE_GGUF[dtype]
    data = random.integers(0, 256, (rows, columns // storage.block, storage.nbytes)).astype(np.uint8)
    for place in _HALVES[dtype]:
        halves = random.normal(0, 0.01, data.shape[:2]).astype("<f2")
        data[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def dequantised(dtype: str, data: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] by the ``gguf`` package."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])
