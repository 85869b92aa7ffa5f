"""Linear layers over grouped weights."""

from __future__ import annotations

import re

import torch
from torch import nn

from p2pshard_node.engine.fused.product import GROUPS, WIDE_GROUPS
from p2pshard_node.engine.groups.kernels import multiplier
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.packed import PackedLinear

__all__ = ["GroupLinear", "is_wide"]

#: Linear layers whose input becomes two int8 a number. With one everywhere the perplexity of a small model rises by
#: 0.4 %, with two here by less than 0.1 %; the others, two thirds of the weights, are where several rows
#: at once take the processor's time. By role, at load: never by what is in a batch.
_WIDE = re.compile(r"(^|\.)([qkv]_proj|qkv_proj|down_proj|lm_head)$")


def is_wide(name: str) -> bool:
    """Whether the linear layer of that name in its model takes two int8 a number."""
    return _WIDE.search(name) is not None


class GroupLinear(PackedLinear):
    """In place of a ``nn.Linear``.

    Activations become int8 with a scale for every 32 of them; `wide`: two int8 each, value and remainder.
    A row's bits depend on nothing but the row.
    """

    def __init__(self, table: GroupMatrix, bias: torch.Tensor | None, *, wide: bool) -> None:
        kept = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        super().__init__(table.columns, table.rows, table.columns, kept, WIDE_GROUPS if wide else GROUPS)
        self.table, self.nbytes = table, table.nbytes
        self._product = multiplier(table.layout, wide)

    def _places(self) -> dict[str, int]:
        return {
            "panels": self.table.data.ctypes.data,
            "product": self._product.address,
            "blocks": self.table.blocks,
        }
