"""Linear layers over grouped weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from p2pshard.models.groups import LANES
from p2pshard_node.engine.fused.ends import linear
from p2pshard_node.engine.fused.phases import TILE
from p2pshard_node.engine.fused.product import GROUPS, MATRIX, WIDE_GROUPS, input_bytes
from p2pshard_node.engine.fused.team import Work, team
from p2pshard_node.engine.groups.kernels import multiplier
from p2pshard_node.engine.groups.matrix import GroupMatrix

__all__ = ["GroupLinear"]


class GroupLinear(nn.Module):
    """In place of a ``nn.Linear``.

    Activations become int8 with a scale for every 32 of them; `wide`: two int8 each, value and remainder,
    which costs nothing while the weights' bytes are what takes the time. A row's bits depend on nothing but
    the row.
    """

    def __init__(self, table: GroupMatrix, bias: torch.Tensor | None, *, wide: bool) -> None:
        super().__init__()
        self.table, self.wide = table, wide
        self.in_features, self.out_features = table.columns, table.rows
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._product = multiplier(table.layout, wide)
        self._matrix: np.ndarray | None = None
        self._bias_N: torch.Tensor | None = None
        self._team = team(torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        """Of the weights and all that belongs to their groups."""
        return self.table.nbytes

    @property
    def matrix(self) -> np.ndarray:
        """Where the weights lie: one `MATRIX`, valid as long as this module; once the bias has its value."""
        if self._matrix is None:
            table, bias = self.table, 0
            if self.bias is not None:
                self._bias_N = torch.zeros(table.panels * LANES)
                self._bias_N[: table.rows] = self.bias
                bias = self._bias_N.data_ptr()
            self._matrix = np.zeros(1, MATRIX)
            self._matrix[0] = (
                table.data.ctypes.data,
                0,
                bias,
                table.rows,
                table.columns,
                WIDE_GROUPS if self.wide else GROUPS,
                self._product.address,
                table.blocks,
            )
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.detach().reshape(-1, self.in_features).contiguous()
        y_TN = torch.empty(len(x_TK), self.out_features)
        form = int(self.matrix["form"][0])
        q = np.empty((min(TILE, len(x_TK)), input_bytes(self.in_features, form)), np.int8)
        sums, scales = np.empty(0, np.int32), np.empty(0, np.float32)
        scratches = np.empty((self._team.threads, 0), np.int32)
        work = Work(self.table.nbytes, 1, len(x_TK))
        # rows that are not finite come out as NaN, and only they
        self._team.call(work, linear, x_TK.numpy(), self.matrix, y_TN.numpy(), q, sums, scales, scratches)
        return y_TN.view(*x.shape[:-1], self.out_features)
