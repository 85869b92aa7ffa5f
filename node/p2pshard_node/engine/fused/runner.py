"""A stage of recognised layers, run by compiled kernels: a handful of calls a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from p2pshard_node.engine.embedding import Table
from p2pshard_node.engine.fused import ends
from p2pshard_node.engine.fused.layers import run_layers, state_size
from p2pshard_node.engine.fused.phases import TILE
from p2pshard_node.engine.fused.product import SCRATCH, TWO_ROWS, WIDE_GROUPS, input_bytes
from p2pshard_node.engine.fused.rotary import angles
from p2pshard_node.engine.fused.team import Work, team
from p2pshard_node.engine.fused.vectors import LANES
from p2pshard_node.engine.kv import KvPool
from p2pshard_node.engine.placement import Placement

__all__ = ["Embedding", "FusedStage", "Head"]


@dataclass(frozen=True)
class Embedding:
    table: Table
    factor: float


@dataclass(frozen=True)
class Head:
    norm: np.ndarray
    """`NORM` [1]."""
    matrix: np.ndarray
    """`MATRIX` [1]."""
    factor: float
    softcap: float
    """0: none."""


class FusedStage:
    """Tables of addresses, the scratch of a step, and the threads that work on it: as many as torch has.

    `owners`: whatever the tables' addresses point into. Not to be used from two threads at once.
    """

    def __init__(
        self,
        pool: KvPool,
        layers: np.ndarray,
        matrices: np.ndarray,
        norms: np.ndarray,
        frequencies: np.ndarray,
        scalings: np.ndarray,
        hidden_size: int,
        owners: list[Any],
    ) -> None:
        self._pool, self._owners = pool, owners
        self.layers, self.matrices, self.norms = layers, matrices, norms
        self.frequencies, self.scalings = frequencies, scalings
        self.hidden_size = hidden_size
        self.embedding: Embedding | None = None
        self.head: Head | None = None
        heads, shared, width = (int(layers[name].max()) for name in ("heads", "shared", "width"))
        inner = int(layers["inner"].max())
        self._lines, self._across = (heads + 2 * shared) * width, heads * width
        across = max(hidden_size, inner, self._across)
        self._y = np.empty((TILE, hidden_size), np.float32)
        self._gated = np.empty((TILE, 2 * inner), np.float32)
        most = max(input_bytes(across, form) for form in (TWO_ROWS, WIDE_GROUPS))
        self._q = np.empty((TILE, most), np.int8)
        self._sums, self._scales = np.empty(2 * TILE, np.int32), np.empty(TILE, np.float32)
        self._team = team(torch.get_num_threads())
        ranks = self._team.threads
        self._works = np.empty((ranks, across), np.float32)
        self._scratches = np.empty((ranks, SCRATCH), np.int32)
        group = int((layers["heads"] // layers["shared"]).max())
        self._states = np.empty((ranks, state_size(group)), np.float32)
        self._blocks = np.empty((ranks, 8), np.int64)
        copied = pool.block_size % LANES != 0
        self._copies = np.empty((ranks, 2 * 64 * shared * width if copied else 1), np.float32)
        self._bytes = (matrices["outputs"] * matrices["inputs"]).sum(axis=1)
        self._qkv = np.empty((0, self._lines), np.float32)
        self._attended = np.empty((0, self._across), np.float32)

    def own(self, *things: Any) -> None:
        """Keep what `head` and `embedding` point into."""
        self._owners += things

    def run(self, placement: Placement, given: np.ndarray) -> tuple[np.ndarray, bool]:
        """float32 [T, D] behind the last layer, and whether all numbers are finite.

        `given`: token ids (int [T]) on a stage with the embedding, else float32 [T, D].
        """
        if self.embedding is not None:
            hidden = self.embedding.table.take(given) * np.float32(self.embedding.factor)
        else:
            hidden = np.array(given, dtype=np.float32, order="C")
        return hidden, self.run_layers(placement, hidden, slice(None))

    def run_layers(self, placement: Placement, hidden: np.ndarray, which: slice) -> bool:
        """Layers `which` of the stage, in place; whether all numbers are finite."""
        count, size = placement.tokens, self._pool.block_size
        positions, slots = np.empty(count, np.int64), np.empty(count, np.int64)
        ends.places(placement.rows, placement.table, size, positions, slots)
        cos = np.empty((len(self.frequencies), count, self.frequencies.shape[1]), np.float32)
        sin = np.empty_like(cos)
        angles(positions, self.frequencies, self.scalings, cos, sin)
        if len(self._qkv) < count:
            self._qkv = np.empty((count, self._lines), np.float32)
            self._attended = np.empty((count, self._across), np.float32)
        weights = self._bytes[which]
        finite = self._team.call(
            Work(int(weights.sum()), len(weights), count),
            run_layers,
            self.layers[which],
            self.matrices[which],
            self.norms[which],
            hidden,
            placement.rows,
            placement.table,
            size,
            slots,
            cos,
            sin,
            self._qkv,
            self._attended,
            self._y,
            self._gated,
            self._q,
            self._sums,
            self._scales,
            self._works,
            self._scratches,
            self._states,
            self._blocks,
            self._copies,
        )
        return bool(finite and ends.all_finite(hidden))

    def logits(self, hidden: np.ndarray, take: np.ndarray) -> tuple[np.ndarray, bool]:
        """float32 [R, V] of the rows `take` (int64 [R]), and whether all numbers are finite."""
        head = self.head
        assert head is not None
        y = np.empty((len(take), int(head.matrix["outputs"][0])), np.float32)
        factor, softcap = np.float32(head.factor), np.float32(head.softcap)
        weights = int(head.matrix["outputs"][0] * head.matrix["inputs"][0])
        finite = self._team.call(
            Work(weights, 1, len(take)),
            ends.head,
            hidden,
            take,
            head.norm,
            head.matrix,
            y,
            factor,
            softcap,
            self._q,
            self._sums,
            self._scales,
            self._works,
            self._scratches,
        )
        return y, bool(finite)
