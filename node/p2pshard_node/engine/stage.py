"""One stage of a model: a contiguous run of decoder layers with their sequence state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from p2pshard.errors import Internal, InvalidRequest, ProtocolError
from p2pshard_node.engine import numerics
from p2pshard_node.engine.attention import STEP, AttentionStep, RowSpan
from p2pshard_node.engine.build import Part, StageModules, build, finish
from p2pshard_node.engine.heap import returned_at_once
from p2pshard_node.engine.kv import KvPool
from p2pshard_node.engine.load import Weights, load_weights, weight_bytes
from p2pshard_node.engine.quant import PackedProduct, best_product

if TYPE_CHECKING:
    from p2pshard_node.engine.source import TensorSource

__all__ = ["Row", "StageModel", "StepBatch"]

#: Name → dtype of the hidden state, keys and values. Weights have the same, but with ``int8``.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
}


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step."""

    sequence: int
    start: int
    """Position of its first token of this step."""
    length: int
    """Tokens in this step."""
    blocks: tuple[int, ...]
    """Blocks of the sequence, in order of position; they hold ``start + length`` tokens at least."""
    output: str
    """``none``, ``sample`` or ``logits``: whether its last token's logits are wanted."""


@dataclass(frozen=True)
class StepBatch:
    """A ragged batch: the rows' tokens one after the other."""

    rows: tuple[Row, ...]
    token_ids: np.ndarray
    """int32 [T]."""


class StageModel:
    """Layers first..last of a model, loaded; `forward` is its only business.

    Not to be used from two threads at once.
    """

    def __init__(self, modules: StageModules, pool: KvPool, dtype: str, device: str) -> None:
        self._modules = modules
        self._pool = pool
        self._device = device
        self.dtype = dtype
        self.weight_bytes = weight_bytes(modules.model)
        """Bytes of weights held; see `p2pshard_node.engine.load.weight_bytes`."""
        self.kv_bytes = pool.nbytes
        self.hidden_size = int(modules.config.hidden_size)
        self.vocab_size = int(modules.config.vocab_size)
        self.numerics = "tolerant"
        """``invariant`` when bits depend neither on the batch nor on the chunks, else ``tolerant``."""
        self.fingerprint = ""
        """Of the kernels: equal where the golden model gives equal bits."""
        self.kernels = f"torch {device} {dtype}"
        if dtype == "int8":
            self.kernels += " packed" if best_product() is PackedProduct else " plain"

    # -- loading ------------------------------------------------------------------------------------
    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        layers: tuple[int, int],
        embedding: bool,
        head: bool,
        dtype: str,
        device: str = "cpu",
        blocks: int,
        block_size: int,
        chunk_tokens: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> StageModel:
        """Load a part of the model behind `source` and check it.

        `layers`: first and last, inclusive. `progress(done, total)` counts weights. Raises
        `UnsupportedModel` before anything is read where that can be told, `ModelCorrupt`, `InvalidRequest`.
        """
        from p2pshard_node.engine.gguf_weights import open_weights

        return cls.from_weights(
            lambda: open_weights(source),
            source.manifest.config,
            layers=layers,
            embedding=embedding,
            head=head,
            dtype=dtype,
            device=device,
            blocks=blocks,
            block_size=block_size,
            chunk_tokens=chunk_tokens,
            progress=progress,
        )

    @classmethod
    def from_weights(
        cls,
        weights: Callable[[], Weights],
        config: Mapping[str, Any],
        *,
        layers: tuple[int, int],
        embedding: bool,
        head: bool,
        dtype: str,
        device: str = "cpu",
        blocks: int,
        block_size: int,
        chunk_tokens: int,
        progress: Callable[[int, int], None] | None = None,
        check: bool = True,
    ) -> StageModel:
        """As `load`, from an open set of weights; `weights` is called once the architecture is accepted."""
        if dtype not in DTYPES:
            raise InvalidRequest(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
        if min(blocks, block_size, chunk_tokens) < 1:
            raise InvalidRequest(
                f"a pool of {blocks} blocks of {block_size} tokens, {chunk_tokens} a step: not all above 0"
            )
        part = Part(*layers, embedding=embedding, head=head)
        modules = build(config, part, DTYPES[dtype])
        with returned_at_once():
            load_weights(modules, weights(), int8=dtype == "int8", device=device, progress=progress)
        finish(modules, device)
        # after the weights, so that what loading needs for a moment and the pool are never held together
        pool = KvPool(modules.kv, blocks=blocks, block_size=block_size, dtype=DTYPES[dtype], device=device)
        stage = cls(modules, pool, dtype, device)
        if check:
            stage.self_check()
        return stage

    # -- running ------------------------------------------------------------------------------------
    def forward(self, batch: StepBatch, hidden_TD: np.ndarray | None) -> np.ndarray:
        """Run one step.

        `hidden_TD`: float32 [T, D] of the stage before, None on the stage with the embedding. Returns
        float32 [T, D], or with the head float32 logits [R, V], one row for the last token of each `Row`
        whose output is not ``none``. Raises `ProtocolError` for a step that contradicts itself or the pool,
        `Internal` when a result is not finite.
        """
        spans, slots_T, positions_T = self._plan(batch)
        tokens = len(batch.token_ids)
        if self._modules.part.embedding:
            if hidden_TD is not None:
                raise ProtocolError("the first stage was given a hidden state")
            if tokens and not (batch.token_ids.min() >= 0 and batch.token_ids.max() < self.vocab_size):
                raise ProtocolError(f"a token id is outside the vocabulary of {self.vocab_size}")
            given = torch.from_numpy(batch.token_ids.astype(np.int64)).to(self._device)
        else:
            if hidden_TD is None or hidden_TD.shape != (tokens, self.hidden_size):
                shape = None if hidden_TD is None else hidden_TD.shape
                raise ProtocolError(
                    f"a hidden state of shape {shape} came for {tokens} tokens of {self.hidden_size}"
                )
            given = torch.from_numpy(np.ascontiguousarray(hidden_TD, dtype=np.float32)).to(self._device)
        if not self._modules.part.head:
            return self._run(spans, slots_T, positions_T, given, None).cpu().numpy()
        take = [span.last - 1 for span, row in zip(spans, batch.rows, strict=True) if row.output != "none"]
        wanted = torch.tensor(take, dtype=torch.long, device=self._device)
        return self._run(spans, slots_T, positions_T, given, wanted).cpu().numpy()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks of the pool, (from, to) each, on every layer. Raises `ProtocolError` for a block
        outside it."""
        if any(not 0 <= block < self._pool.blocks for pair in pairs for block in pair):
            raise ProtocolError(f"a block to copy is outside the pool of {self._pool.blocks}")
        self._pool.copy_blocks(pairs)

    def _plan(self, batch: StepBatch) -> tuple[tuple[RowSpan, ...], torch.Tensor, torch.Tensor]:
        """Spans of the rows, slot and position of each token."""
        size, first = self._pool.block_size, 0
        spans, slots, positions = [], [], []
        for row in batch.rows:
            end, blocks = row.start + row.length, row.blocks
            if row.start < 0 or row.length < 1 or end > len(blocks) * size:
                raise ProtocolError(
                    f"a row of positions {row.start}-{end - 1} is not within {len(blocks)} blocks of {size}"
                )
            if not (min(blocks) >= 0 and max(blocks) < self._pool.blocks):
                raise ProtocolError(f"a row names a block outside the pool of {self._pool.blocks}")
            used = blocks[: -(-end // size)]
            where = np.arange(row.start, end)
            positions.append(where)
            if used == tuple(range(used[0], used[0] + len(used))):
                slot, table = used[0] * size, None
                slots.append(where + slot)
            else:
                every = (np.asarray(used)[:, None] * size + np.arange(size)).reshape(-1)[:end]
                slot, table = -1, torch.from_numpy(every).to(self._device)
                slots.append(every[row.start :])
            spans.append(RowSpan(first, first + row.length, row.start, end, slot, table))
            first += row.length
        if first != len(batch.token_ids) or not spans:
            raise ProtocolError(f"rows of {first} tokens came with {len(batch.token_ids)} token ids")
        slots_T = torch.from_numpy(np.concatenate(slots)).to(self._device)
        return tuple(spans), slots_T, torch.from_numpy(np.concatenate(positions)).to(self._device)

    def _run(
        self,
        spans: tuple[RowSpan, ...],
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        given: torch.Tensor,
        take: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32 hidden states [T, D], or logits [R, V] of the columns `take`."""
        modules = self._modules
        step = AttentionStep(self._pool, spans, slots_T, modules.windows, take)
        if modules.part.embedding:
            arguments = {"input_ids": given.unsqueeze(0)}
        else:
            arguments = {"inputs_embeds": given.to(modules.dtype).unsqueeze(0)}
        token = STEP.set(step)
        try:
            with torch.inference_mode():
                logits = take is not None and len(take) > 0
                model = modules.model if logits else modules.base
                out = model(**arguments, position_ids=positions_T.unsqueeze(0), use_cache=False)
                if take is not None and not logits:
                    return torch.empty(0, self.vocab_size)
                result: torch.Tensor = (out.logits if logits else out.last_hidden_state)[0].float()
                if not bool(torch.isfinite(result).all()):
                    raise Internal(
                        f"layers {modules.part.first}-{modules.part.last} gave a number that is not finite "
                        f"in {self.dtype}" + ("; use bfloat16 or float32" if self.dtype == "float16" else "")
                    )
                return result
        finally:
            STEP.reset(token)

    # -- checking -----------------------------------------------------------------------------------
    def self_check(self) -> None:
        """Set `numerics` and `fingerprint`. Raises `UnsupportedModel` when chunks differ from the whole.

        Writes into the pool, so before any sequence lives there.
        """
        length = min(15, self._pool.blocks * self._pool.block_size)
        if self._modules.part.embedding:
            values: np.ndarray = ((np.arange(length) * 7919 + 13) % self.vocab_size).astype(np.int32)
        else:
            values = np.random.default_rng(7).standard_normal((length, self.hidden_size), dtype=np.float32)
        per_sequence = -(-length // self._pool.block_size)
        own = numerics.check_chunks(
            lambda rows: self._hidden_states(rows, per_sequence),
            values,
            sequences=self._pool.blocks // per_sequence,
            dtype=self.dtype,
            architecture=self._modules.config.model_type,
        )
        model = StageModel.from_weights(
            numerics.GoldenWeights,
            numerics.GOLDEN_CONFIG,
            layers=(0, 0),
            embedding=True,
            head=True,
            dtype=self.dtype,
            device=self._device,
            blocks=32,
            block_size=16,
            chunk_tokens=512,
            check=False,
        )
        judged = numerics.golden(lambda rows: model._hidden_states(rows, 4), self.dtype)
        self.numerics = "invariant" if own and judged.invariant else "tolerant"
        self.fingerprint = judged.fingerprint

    def _hidden_states(self, rows: Sequence[tuple[int, np.ndarray]], blocks: int) -> list[np.ndarray]:
        """Last hidden state of every token of (start, values) rows; row i has the pool's blocks from i x
        `blocks` on."""
        batch = StepBatch(
            tuple(
                Row(i, start, len(values), tuple(range(i * blocks, (i + 1) * blocks)), "none")
                for i, (start, values) in enumerate(rows)
            ),
            np.zeros(sum(len(values) for _, values in rows), dtype=np.int32),
        )
        spans, slots_T, positions_T = self._plan(batch)
        given = torch.from_numpy(np.concatenate([values for _, values in rows])).to(self._device)
        given = given.long() if self._modules.part.embedding else given
        result = self._run(spans, slots_T, positions_T, given, None).cpu().numpy()
        return [result[span.first : span.last] for span in spans]
