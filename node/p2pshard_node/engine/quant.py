"""Linear layers of int8 weights: one scale an output channel, one dynamic scale a token.

y[t, n] = s[t] w[n] sum_k q[t, k] v[n, k], with q = round(127 x / max|x|) and v the stored int8 weights. The
sum is an int32 and exact, whichever of the two products computes it: fbgemm's packed one, or plain
``torch._int_mm`` where fbgemm is missing or saturates (as its kernels for processors without VNNI may).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from p2pshard_node.engine import compat

__all__ = [
    "Int8Linear",
    "PackedProduct",
    "PlainProduct",
    "WideEmbedding",
    "best_product",
    "is_exact",
    "quantise_rows",
    "row_blocks",
]

STEP = 1.0 / 127
#: Most float elements of a matrix held at once while it is converted, and most rows x columns packed
#: together.
BLOCK_ELEMENTS = 1 << 21
PIECE_ELEMENTS = 1 << 24


class Product(Protocol):
    """Some rows of an int8 matrix, ready to be multiplied."""

    def __init__(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None: ...

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """float32 [T, K] within [-1, 1] → float32 [T, N]."""


class PackedProduct:
    """fbgemm's."""

    def __init__(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None:
        self._packed: Any = compat.int8_prepack(weight_NK, scale_N)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return compat.int8_product(x_TK, STEP, 128, self._packed)


class PlainProduct:
    """An int32 matrix product; slower, and exact everywhere."""

    def __init__(self, weight_NK: torch.Tensor, scale_N: torch.Tensor) -> None:
        self._weight_NK = weight_NK
        self._scale_N = scale_N * STEP

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        q_TK = torch.round(x_TK * 127).to(torch.int8)
        return torch._int_mm(q_TK, self._weight_NK.t()).float() * self._scale_N


@functools.cache
def best_product() -> type[PackedProduct] | type[PlainProduct]:
    """The packed product if its sums are exact here, extremes included; else the plain one."""
    return PackedProduct if is_exact(PackedProduct) else PlainProduct


def is_exact(product: Callable[[torch.Tensor, torch.Tensor], Any]) -> bool:
    """Whether a product's integer sums equal those of float64, for random and for extreme values."""
    generator = torch.Generator().manual_seed(7)
    for rows, columns, tokens in ((17, 64, 1), (33, 577, 3), (64, 1536, 8)):
        v = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
        q = torch.randint(-127, 128, (tokens, columns), generator=generator, dtype=torch.int8)
        v[0], v[1], q[0] = 127, -127, 127
        scale = torch.full((rows,), 2.0**-7)
        try:
            got = product(v, scale)(q.float() / 127)
        except (RuntimeError, NotImplementedError):
            return False
        sums = (got.double() / (2.0**-7 * STEP)).round()
        # int32 sums beyond 2^24 lose their last bits in the float32 result, on every product alike
        if not torch.allclose(sums, q.double() @ v.double().t(), rtol=2.0**-22, atol=0.25):
            return False
    return True


def quantise_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows → (int8 rows, float32 scale of each); the largest value of a row becomes 127."""
    scale_N = weight_NK.abs().amax(dim=1) / 127
    scale_N = torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))
    return torch.round(weight_NK / scale_N.unsqueeze(1)).to(torch.int8), scale_N


def row_blocks(rows: int, columns: int, elements: int = BLOCK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """[first, end) ranges that cover `rows`, each of at most `elements` numbers (one row at least)."""
    step = max(1, elements // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


class Int8Linear(nn.Module):
    """In place of a ``nn.Linear``; made from a function that gives float32 rows [first, end)."""

    def __init__(
        self,
        rows: Callable[[int, int], torch.Tensor],
        out_features: int,
        in_features: int,
        bias: nn.Parameter | None,
        product: Callable[[torch.Tensor, torch.Tensor], Product] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = bias
        make = product or best_product()
        self._pieces: list[Product] = []
        for first, end in row_blocks(out_features, in_features, PIECE_ELEMENTS):
            weight_NK = torch.empty(end - first, in_features, dtype=torch.int8)
            scale_N = torch.empty(end - first)
            for low, high in row_blocks(end - first, in_features):
                weight_NK[low:high], scale_N[low:high] = quantise_rows(rows(first + low, first + high))
            self._pieces.append(make(weight_NK, scale_N))

    @property
    def nbytes(self) -> int:
        """Of the weights and their scales. A packed form pads its rows by up to 15 % beyond, at widths below
        1,000."""
        return self.out_features * self.in_features + 4 * self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        x_TK = x.reshape(-1, self.in_features)
        scale_T1 = torch.linalg.vector_norm(x_TK, float("inf"), dim=1, keepdim=True).clamp_min_(1e-30)
        x_TK = x_TK / scale_T1
        pieces = self._pieces
        y_TN = pieces[0](x_TK) if len(pieces) == 1 else torch.cat([piece(x_TK) for piece in pieces], dim=1)
        y_TN.mul_(scale_T1)
        if self.bias is not None:
            y_TN.add_(self.bias)
        return y_TN.view(*x.shape[:-1], self.out_features)


class WideEmbedding(nn.Module):
    """An embedding whose table is stored in bfloat16 and whose result is computed, scaling included, in
    float32."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table: Any = self.embedding.weight
        rows: torch.Tensor = table.index_select(0, ids.reshape(-1)).float()
        order = torch.arange(len(rows)).view(ids.shape)
        return cast(torch.Tensor, torch.func.functional_call(self.embedding, {"weight": rows}, (order,)))
