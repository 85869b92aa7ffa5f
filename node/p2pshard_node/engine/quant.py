"""Linear layers of int8 weights: one scale an output channel, one dynamic scale a token.

The formula, and the kernels that compute it, are in `p2pshard_node.engine.fused.product`. Integer sums are exact
and all else is one float operation an element, so a row's bits depend neither on its batch nor on the processor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import nn

from p2pshard.errors import Internal
from p2pshard_node.engine.fused.product import ONE_ROW, TWO_ROWS
from p2pshard_node.engine.fused.tiles import PANEL
from p2pshard_node.engine.fused.vectors import LANES
from p2pshard_node.engine.packed import PackedLinear

__all__ = ["Int8Linear", "check_exact", "quantise_rows", "row_blocks", "takes_two_rows"]

#: Most float elements of a matrix held at once while it is converted.
BLOCK_ELEMENTS = 1 << 21
#: Linear layers whose input is quantised to two rows a token (value and remainder): all of the common ones, since
#: with one row the logits of a small model are half as far again from float32's. By role, at load: never by what is
#: in a batch.
_TWO_ROWS = re.compile(r"(^|\.)([qkvo]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|down_proj|lm_head)$")


def takes_two_rows(name: str) -> bool:
    """Whether the linear layer of that name in its model takes two rows a token."""
    return _TWO_ROWS.search(name) is not None


def quantise_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows → (int8 rows, float32 scale of each); the largest value of a row becomes 127. Raises `ValueError`
    for what is not finite."""
    scale_N = weight_NK.abs().amax(dim=1) / 127
    if not bool(torch.isfinite(scale_N).all()):
        raise ValueError("a weight is not finite")
    scale_N = torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))
    return torch.round(weight_NK / scale_N.unsqueeze(1)).to(torch.int8), scale_N


def row_blocks(rows: int, columns: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """[first, end) ranges that cover `rows`, each of at most `BLOCK_ELEMENTS` numbers, or `multiple` rows."""
    step = max(multiple, BLOCK_ELEMENTS // max(1, columns) // multiple * multiple)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


class Int8Linear(PackedLinear):
    """In place of a ``nn.Linear``; made from a function that gives float32 rows [first, end).

    The weights are held once, as panels of 64 rows (see `p2pshard_node.engine.fused.tiles`), padded with zeros to
    64 rows and 16 columns.
    """

    def __init__(
        self,
        rows: Callable[[int, int], torch.Tensor],
        out_features: int,
        in_features: int,
        bias: nn.Parameter | None,
        *,
        two_rows: bool = False,
    ) -> None:
        width = -(-in_features // LANES) * LANES
        super().__init__(in_features, out_features, width, bias, TWO_ROWS if two_rows else ONE_ROW)
        self.nbytes = out_features * in_features + 4 * out_features
        panels = -(-out_features // PANEL)
        # four columns of a row are one int32; 128 is added to each of them by its highest bit
        self._panels = torch.empty(panels, width // 4, PANEL, dtype=torch.int32)
        self._scales_N = torch.zeros(panels * PANEL)
        for first, end in row_blocks(out_features, in_features, multiple=PANEL):
            weight_NK = torch.zeros(-(-(end - first) // PANEL) * PANEL, width, dtype=torch.int8)
            weight_NK[: end - first, :in_features], self._scales_N[first:end] = quantise_rows(
                rows(first, end)
            )
            fours = weight_NK.view(torch.uint8).bitwise_xor_(0x80).view(torch.int32)
            target = self._panels[first // PANEL : -(-end // PANEL)]
            target.copy_(fours.view(-1, PANEL, width // 4).transpose(1, 2))

    def _places(self) -> dict[str, int]:
        return {"panels": self._panels.data_ptr(), "scales": self._scales_N.data_ptr()}

    def weight(self) -> torch.Tensor:
        """The stored values, int8 [N, K]."""
        rows = self._panels.transpose(1, 2).contiguous().view(-1, self.width // 4).view(torch.uint8)
        return (rows ^ 0x80).view(torch.int8)[: self.out_features, : self.in_features]

    def take(self, indices: np.ndarray) -> np.ndarray:
        """float32 [len(indices), K] of some rows."""
        panel, lane = indices // PANEL, indices % PANEL
        fours = self._panels.numpy()[panel, :, lane]
        values = (fours.view(np.uint8) ^ 0x80).view(np.int8)[:, : self.in_features]
        rows: np.ndarray = values.astype(np.float32) * self._scales_N.numpy()[indices, None]
        return rows

    def reference(self, x_TK: torch.Tensor) -> torch.Tensor:
        """What `forward` gives, bit for bit, by plain int64 sums: slow, and independent of the kernels."""
        s_T1 = x_TK.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        value = x_TK * (torch.tensor(127.0) / s_T1)
        q = torch.round(value)
        weight = self.weight().long().t()
        y_TN = (q.long() @ weight).float()
        if self.form == TWO_ROWS:
            rest = torch.round((value - q) * 254.0)
            y_TN = y_TN + (rest.long() @ weight).float() * torch.tensor(1.0 / 254.0)
        y_TN = y_TN * self._scales_N[: self.out_features] * (s_T1 / 127.0)
        return y_TN if self.bias is None else y_TN + self.bias


def _rows(weight_NK: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return weight_NK[first:end]


@functools.cache
def check_exact() -> None:
    """Compare the compiled product with plain integers, extremes included. Raises `Internal`."""
    generator = torch.Generator().manual_seed(7)
    for rows, columns, tokens, two_rows in ((17, 64, 1, False), (33, 577, 3, True), (64, 1536, 9, True)):
        weight = torch.randint(-127, 128, (rows, columns), generator=generator).float()
        x = torch.randn(tokens, columns, generator=generator)
        weight[0], weight[1], x[0] = 127, -127, 1
        layer = Int8Linear(partial(_rows, weight), rows, columns, None, two_rows=two_rows)
        if not torch.equal(layer(x), layer.reference(x)):
            raise Internal(
                f"the compiled int8 product of {rows} x {columns} is not exact on this processor; "
                "use float32 or bfloat16, and report this with the output of `p2pshard status`"
            )
