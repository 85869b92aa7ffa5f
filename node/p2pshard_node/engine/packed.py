"""What the linear layers over int8 and over grouped weights have in common."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from p2pshard_node.engine.fused.ends import linear
from p2pshard_node.engine.fused.phases import TILE
from p2pshard_node.engine.fused.product import GROUPS, MATRIX, SCRATCH, TWO_ROWS, input_bytes
from p2pshard_node.engine.fused.team import Work, team
from p2pshard_node.engine.fused.tiles import PANEL

__all__ = ["PackedLinear"]


class PackedLinear(nn.Module):
    """In place of a ``nn.Linear``: weights in panels, multiplied by rows of activations that are quantised on the way.

    The compiled loops over whole layers take its `matrix`; called by itself it computes the same bits.
    """

    nbytes: int
    """Of the weights and all that belongs to them."""

    def __init__(
        self, in_features: int, out_features: int, width: int, bias: nn.Parameter | None, form: int
    ) -> None:
        """``width``: columns of the panels, padding included; ``form``: of `p2pshard_node.engine.fused.product`."""
        super().__init__()
        self.in_features, self.out_features, self.width = in_features, out_features, width
        self.bias, self.form = bias, form
        self._matrix: np.ndarray | None = None
        self._bias_N: torch.Tensor | None = None
        self._team = team(torch.get_num_threads())

    def _places(self) -> dict[str, int]:
        """Addresses and the rest of a `MATRIX` that depend on how the weights lie."""
        raise NotImplementedError

    @property
    def matrix(self) -> np.ndarray:
        """Where the weights lie: one `MATRIX`, valid as long as this module; once the bias has its value."""
        if self._matrix is None:
            self._matrix = np.zeros(1, MATRIX)
            record = self._matrix[0]
            record["outputs"], record["inputs"], record["form"] = self.out_features, self.width, self.form
            for name, value in self._places().items():
                record[name] = value
            if self.bias is not None:
                self._bias_N = torch.zeros(
                    -(-self.out_features // PANEL) * PANEL
                )  # panels are added to whole
                self._bias_N[: self.out_features] = self.bias
                record["bias"] = self._bias_N.data_ptr()
        return self._matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.detach().reshape(-1, self.in_features).contiguous()
        if self.width != self.in_features:
            x_TK = nn.functional.pad(x_TK, (0, self.width - self.in_features))
        y_TN = x.new_empty(len(x_TK), self.out_features)
        tokens, lines = min(TILE, len(x_TK)), 1 + (self.form == TWO_ROWS)
        q = np.empty((tokens, input_bytes(self.width, self.form)), np.int8)
        sums, scales = np.empty(tokens * lines, np.int32), np.empty(tokens * lines, np.float32)
        scratches = np.empty((self._team.threads, SCRATCH), np.int32)
        work = Work(self.nbytes, 1, len(x_TK))
        matrix, given, out = self.matrix, x_TK.numpy(), y_TN.numpy()
        finite = self._team.call(work, linear, given, matrix, out, q, sums, scales, scratches)
        if not finite and self.form < GROUPS:  # of groups each row has its own NaN already
            y_TN.fill_(float("nan"))
        return y_TN.view(*x.shape[:-1], self.out_features)
