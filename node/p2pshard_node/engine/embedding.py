"""An embedding whose table is quantised."""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

__all__ = ["QuantEmbedding", "Table"]


class Table(Protocol):
    """A quantised matrix whose rows can be read."""

    def take(self, indices: np.ndarray) -> np.ndarray:
        """float32 [len(indices), columns] of some rows."""


class QuantEmbedding(nn.Module):
    """In place of an ``nn.Embedding``: the rows looked up become float32, and the module's own scaling is applied
    to them. A tied head multiplies by the same table."""

    def __init__(self, embedding: nn.Module, table: Table, columns: int) -> None:
        super().__init__()
        embedding.weight = nn.Parameter(torch.empty(0, columns), requires_grad=False)
        self.embedding = embedding
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self.table.take(ids.reshape(-1).numpy()))
        order = torch.arange(len(rows)).view(ids.shape)
        return cast(torch.Tensor, torch.func.functional_call(self.embedding, {"weight": rows}, (order,)))
