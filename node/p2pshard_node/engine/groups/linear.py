"""Linear layers and embeddings over grouped weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from p2pshard.models.groups import LANES
from p2pshard_node.engine.groups.kernels import multiplier, records
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.groups.spread import spread

__all__ = ["GroupEmbedding", "GroupLinear", "join"]

_SMALL = 2_000_000
"""Multiplications, in bytes of weights times rows, below which a second thread costs more than it saves."""


class GroupLinear(nn.Module):
    """In place of a ``nn.Linear``: matrices of one input, one under the other.

    Activations become int8 with a scale for every 32 of them; `wide`: two int8 each, value and remainder,
    which costs nothing while the weights' bytes are what takes the time. A row's bits depend on nothing but
    the row.
    """

    def __init__(self, matrices: Sequence[GroupMatrix], bias: torch.Tensor | None, *, wide: bool) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.in_features = self.matrices[0].columns
        self.out_features = sum(m.rows for m in self.matrices)
        if any(m.columns != self.in_features for m in self.matrices):
            raise ValueError(f"matrices of {[m.columns for m in self.matrices]} columns share no input")
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.wide = wide
        self._runs = [multiplier(m.layout, wide) for m in self.matrices]

    @property
    def nbytes(self) -> int:
        """Of the weights and all that belongs to their groups."""
        return sum(m.nbytes for m in self.matrices)

    def product(self, x_TK: np.ndarray, out_TN: np.ndarray) -> None:
        """``out = x W^T + bias``; both float32 and contiguous."""
        tokens = len(x_TK)
        if not tokens:
            return
        acts = records(x_TK, self.wide)
        threads, column = torch.get_num_threads(), 0
        for matrix, run in zip(self.matrices, self._runs, strict=True):

            def part(first: int, last: int, m: Any = matrix, run: Any = run, column: int = column) -> None:
                run(m.data, acts, m.blocks, m.rows, first, last, out_TN, column)

            if threads == 1 or matrix.nbytes * tokens < _SMALL:
                part(0, matrix.panels)
            else:
                spread(matrix.panels, threads, part)
            column += matrix.rows
        if self.bias is not None:
            np.add(out_TN, self.bias.numpy(), out=out_TN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, self.in_features).contiguous().numpy()
        out = torch.empty(len(x_TK), self.out_features)
        self.product(x_TK, out.numpy())
        return out.view(*x.shape[:-1], self.out_features)


def join(linears: Sequence[GroupLinear]) -> GroupLinear:
    """One layer that gives the outputs of several of one input, side by side, bit for bit.

    Neighbours of one layout become one matrix, of which theirs are views from then on; nothing is held twice.
    Raises `ValueError` where their inputs differ in width or in how they are quantised.
    """
    wide = {linear.wide for linear in linears}
    if len(wide) != 1:
        raise ValueError("layers with one and with two int8 an activation share no input")
    if len({linear.in_features for linear in linears}) != 1:
        raise ValueError(f"layers of {[n.in_features for n in linears]} inputs share no input")
    merged: list[GroupMatrix] = []
    run: list[GroupMatrix] = []
    for matrix in [m for linear in linears for m in linear.matrices]:
        if run and (run[-1].layout is not matrix.layout or run[-1].rows % LANES):
            merged.append(GroupMatrix.merged(run))
            run = []
        run.append(matrix)
    merged.append(GroupMatrix.merged(run))
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat(
            [torch.zeros(n.out_features) if n.bias is None else n.bias.detach() for n in linears]
        )
    return GroupLinear(merged, bias, wide=wide.pop())


class GroupEmbedding(nn.Module):
    """An embedding whose table is grouped: the rows looked up become float32, and the module's own scaling is
    applied to them."""

    def __init__(self, embedding: nn.Module, table: GroupMatrix) -> None:
        super().__init__()
        embedding.weight = nn.Parameter(torch.empty(0, table.columns), requires_grad=False)
        self.embedding = embedding
        self.table = table

    @property
    def matrices(self) -> tuple[GroupMatrix, ...]:
        return (self.table,)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self.table.take(ids.reshape(-1).numpy()))
        order = torch.arange(len(rows)).view(ids.shape)
        return cast(torch.Tensor, torch.func.functional_call(self.embedding, {"weight": rows}, (order,)))
