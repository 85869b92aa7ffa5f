"""One stage of a model: a contiguous run of decoder layers with their sequence state."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from p2pshard.errors import Internal, InvalidRequest, ProtocolError
from p2pshard_node.engine import numerics
from p2pshard_node.engine.attention import STEP, AttentionStep, spans_of
from p2pshard_node.engine.build import Part, StageModules, build, finish
from p2pshard_node.engine.fused.prepare import COMPILING, prepare
from p2pshard_node.engine.fused.recognise import recognise
from p2pshard_node.engine.fused.runner import FusedStage
from p2pshard_node.engine.fused.structure import Unrecognised
from p2pshard_node.engine.fused.tiles import has_dot_instruction
from p2pshard_node.engine.groups.features import target_features
from p2pshard_node.engine.heap import returned_at_once
from p2pshard_node.engine.heirloom import Heirloom
from p2pshard_node.engine.kv import KvPool
from p2pshard_node.engine.load import Weights, load_weights, weight_bytes
from p2pshard_node.engine.placement import Placement
from p2pshard_node.engine.quant import check_exact

if TYPE_CHECKING:
    from p2pshard_node.engine.source import TensorSource

__all__ = ["Row", "StageModel", "StepBatch"]

log = logging.getLogger(__name__)

#: Name → dtype of the hidden state, keys and values. Weights have the same, but with ``int8`` and ``int4``.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,
    "int4": torch.float32,
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
    """``none``, ``sample`` or ``logits``: whether its last token's logits are wanted; ``verify``: every token's."""


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
        self.golden: numerics.Golden | None = None
        """What the golden model gave in this dtype."""
        self.fingerprint = ""
        """Of the kernels: equal where the golden model gives equal bits."""
        self.kernels = f"torch {device} {dtype}"
        """Which way the layers run."""
        self._fused: FusedStage | None = None
        if dtype == "int8":
            dot = "avx512-vnni" if has_dot_instruction() else "integer"
            self.kernels = f"plain w8a8 numba {dot}"
            self._fuse(f"fused w8a8 numba {dot}")
        elif dtype == "int4":
            self.kernels = f"plain groups numba {target_features().dot}"
            self._fuse(f"fused groups numba {target_features().dot}")

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
        progress: Callable[[str, int, int], None] | None = None,
        follows: StageModel | None = None,
        beside: bool = False,
        golden: numerics.Golden | None = None,
    ) -> StageModel:
        """Load a part of the model behind `source` and check it.

        `layers`: first and last, inclusive. `progress(phase, done, total)` counts weights. `follows`: a stage of the same
        model in the same dtype, which hands over what both have and is of no use afterwards, whatever comes of this;
        ``beside``: it shares that instead, and goes on.
        `golden`: as `rehearse` gave it for this dtype and device, in this process. Raises `UnsupportedModel` before anything
        is read where that can be told, `ModelCorrupt`, `InvalidRequest`.
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
            follows=follows,
            beside=beside,
            golden=golden,
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
        progress: Callable[[str, int, int], None] | None = None,
        check: bool = True,
        follows: StageModel | None = None,
        beside: bool = False,
        golden: numerics.Golden | None = None,
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
        if follows is None:
            taken = Heirloom()
        else:
            taken = follows.share(part) if beside else follows.hand_over(part)
        taken.make_way(modules)
        if dtype in ("int8", "int4"):
            prepare(alive=lambda: progress(COMPILING, 0, 0) if progress else None)
        with returned_at_once():
            load_weights(
                modules,
                weights(),
                int8=dtype == "int8",
                int4=dtype == "int4",
                device=device,
                progress=progress,
            )
        finish(modules, device)
        taken.put_into(modules)
        if dtype == "int8":
            check_exact()
        # after the weights, so that what loading needs for a moment and the pool are never held together
        pool = KvPool(modules.kv, blocks=blocks, block_size=block_size, dtype=DTYPES[dtype], device=device)
        stage = cls(modules, pool, dtype, device)
        if check:
            stage.self_check(golden)
        return stage

    def share(self, part: Part) -> Heirloom:
        """What a stage with that part, which is to follow this one, has in common with it."""
        return Heirloom.of(self._modules, part, shared=True)

    def hand_over(self, part: Part) -> Heirloom:
        """What a stage with that part needs of this one. Pool, kernels and all else here are given up."""
        self._fused = None
        self._pool = KvPool(
            {}, blocks=self._pool.blocks, block_size=self._pool.block_size, dtype=self._modules.dtype
        )
        taken = Heirloom.of(self._modules, part)
        gc.collect()  # modules whose own forward was put on them are cycles: their memory is wanted now
        return taken

    # -- running ------------------------------------------------------------------------------------
    def forward(self, batch: StepBatch, hidden_TD: np.ndarray | None) -> np.ndarray:
        """Run one step.

        `hidden_TD`: float32 [T, D] of the stage before, None on the stage with the embedding. Returns
        float32 [T, D], or with the head float32 logits [R, V], one row for the last token of each `Row`
        whose output is not ``none``, and for each token of one that is to be verified. Raises `ProtocolError`
        for a step that contradicts itself or the pool, `Internal` when a result is not finite.
        """
        tokens = len(batch.token_ids)
        placement = self._place(batch)
        if self._modules.part.embedding:
            if hidden_TD is not None:
                raise ProtocolError("the first stage was given a hidden state")
            if tokens and not (batch.token_ids.min() >= 0 and batch.token_ids.max() < self.vocab_size):
                raise ProtocolError(f"a token id is outside the vocabulary of {self.vocab_size}")
            given = batch.token_ids
        else:
            if hidden_TD is None or hidden_TD.shape != (tokens, self.hidden_size):
                shape = None if hidden_TD is None else hidden_TD.shape
                raise ProtocolError(
                    f"a hidden state of shape {shape} came for {tokens} tokens of {self.hidden_size}"
                )
            given = hidden_TD
        if not self._modules.part.head:
            return self._run(placement, given, None)
        return self._run(placement, given, _wanted(batch.rows))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks of the pool, (from, to) each, on every layer. Raises `ProtocolError` for a block
        outside it."""
        if any(not 0 <= block < self._pool.blocks for pair in pairs for block in pair):
            raise ProtocolError(f"a block to copy is outside the pool of {self._pool.blocks}")
        self._pool.copy_blocks(pairs)

    # -- what another stage takes over ---------------------------------------------------------------
    def kv_block_bytes(self, layer: int) -> int:
        """Of one block's keys and values in one layer."""
        return self._pool.block_bytes(layer)

    def read_kv(self, layer: int, blocks: Sequence[int]) -> bytes:
        """Keys and values of these blocks in one layer, in the compute dtype."""
        return self._pool.read(layer, blocks)

    def write_kv(self, layer: int, blocks: Sequence[int], data: bytes) -> None:
        """Put in place what `read_kv` of another stage gave. Raises `ValueError` for another number of bytes."""
        self._pool.write(layer, blocks, data)

    def take_kv(self, other: StageModel, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy from a stage of this process, with a pool of the same shape."""
        self._pool.take(other._pool, layers, blocks)

    def _place(self, batch: StepBatch) -> Placement:
        """Where the rows' tokens lie. Raises `ProtocolError` for a step that contradicts itself or the pool."""
        size, first, used = self._pool.block_size, 0, 0
        rows, tables = [], []
        for row in batch.rows:
            end, blocks = row.start + row.length, row.blocks
            if row.start < 0 or row.length < 1 or end > len(blocks) * size:
                raise ProtocolError(
                    f"a row of positions {row.start}-{end - 1} is not within {len(blocks)} blocks of {size}"
                )
            rows.append((first, first + row.length, row.start, used))
            tables.append(blocks)
            first += row.length
            used += len(blocks)
        if first != len(batch.token_ids) or not rows:
            raise ProtocolError(f"rows of {first} tokens came with {len(batch.token_ids)} token ids")
        table = np.fromiter(chain.from_iterable(tables), np.int64, used)
        if table.min() < 0 or table.max() >= self._pool.blocks:
            raise ProtocolError(f"a row names a block outside the pool of {self._pool.blocks}")
        return Placement(np.array(rows, dtype=np.int64), table, first)

    def _run(self, placement: Placement, given: np.ndarray, take: np.ndarray | None) -> np.ndarray:
        """float32 hidden states [T, D], or logits [R, V] of the columns `take`. Raises `Internal`."""
        if take is not None and not len(take):
            run_for_state = self._run(placement, given, None)
            return np.empty((0, self.vocab_size), run_for_state.dtype)
        if self._fused is None:
            result = self._run_plain(placement, given, take)
            finite = bool(np.isfinite(result).all())
        else:
            result, finite = self._fused.run(placement, given)
            if finite and take is not None:
                result, finite = self._fused.logits(result, take)
        if not finite:
            part = self._modules.part
            raise Internal(
                f"layers {part.first}-{part.last} gave a number that is not finite in {self.dtype}"
                + ("; use bfloat16 or float32" if self.dtype == "float16" else "")
            )
        return result

    def _run_plain(self, placement: Placement, given: np.ndarray, take: np.ndarray | None) -> np.ndarray:
        modules, device = self._modules, self._device
        spans, slots, positions = spans_of(placement, self._pool.block_size, device)
        wanted = None if take is None else torch.from_numpy(take).to(device)
        arguments = {}
        if modules.part.embedding:
            ids = torch.from_numpy(given.astype(np.int64)).to(device)
            arguments["input_ids"] = ids.unsqueeze(0)
        else:
            hidden = torch.from_numpy(np.ascontiguousarray(given, dtype=np.float32)).to(device)
            arguments["inputs_embeds"] = hidden.to(modules.dtype).unsqueeze(0)
        token = STEP.set(AttentionStep(self._pool, spans, slots, modules.windows, wanted))
        try:
            with torch.inference_mode():
                model = modules.base if take is None else modules.model
                out = model(**arguments, position_ids=positions.unsqueeze(0), use_cache=False)
                result: torch.Tensor = (out.last_hidden_state if take is None else out.logits)[0].float()
                return result.cpu().numpy()
        finally:
            STEP.reset(token)

    def _fuse(self, kernels: str) -> None:
        """Run the layers on fused kernels from now on, if they can."""
        try:
            self._fused = recognise(self._modules, self._pool, self._probe)
            self.kernels = kernels
        except Unrecognised as reason:
            log.info("%s runs on plain modules: %s", self._modules.config.model_type, reason)

    def _probe(self, given: np.ndarray) -> np.ndarray:
        count = len(given)
        used = -(-count // self._pool.block_size)
        placement = Placement(np.array([[0, count, 0, 0]]), np.arange(used), count)
        take = np.arange(count) if self._modules.part.head else None
        return self._run_plain(placement, given, take)

    # -- checking -----------------------------------------------------------------------------------
    def self_check(self, golden: numerics.Golden | None = None) -> None:
        """Set `numerics` and `fingerprint`. Raises `UnsupportedModel` when chunks differ from the whole.

        Writes into the pool, so before any sequence lives there. `golden` as in `load`.
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
        judged = golden or self.rehearse(self.dtype, self._device)
        fused = self._fused is not None
        self.golden = judged
        self.numerics = "invariant" if fused and own and judged.invariant else "tolerant"
        # two stages whose rotations were computed differently, or that run in different ways, are no pair
        own_way = self._fused.frequencies.tobytes() if self._fused is not None else b"plain"
        self.fingerprint = hashlib.sha256(bytes.fromhex(judged.fingerprint) + own_way).hexdigest()

    @staticmethod
    def rehearse(dtype: str, device: str = "cpu") -> numerics.Golden:
        """Run the golden model, which has all that a load of this dtype needs in memory afterwards: compiled kernels, and
        what libraries make when they are first used."""
        model = StageModel.from_weights(
            numerics.GoldenWeights,
            numerics.GOLDEN_CONFIG,
            layers=(0, 0),
            embedding=True,
            head=True,
            dtype=dtype,
            device=device,
            blocks=32,
            block_size=16,
            chunk_tokens=512,
            check=False,
        )
        return numerics.golden(lambda rows: model._hidden_states(rows, 4), dtype)

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
        placement = self._place(batch)
        result = self._run(placement, np.concatenate([values for _, values in rows]), None)
        return [result[first:last] for first, last, _, _ in placement.rows]


def _wanted(rows: Sequence[Row]) -> np.ndarray:
    """int64: the tokens of a step whose logits are wanted."""
    columns: list[int] = []
    end = 0
    for row in rows:
        end += row.length
        if row.output != "none":
            columns.extend(range(end - row.length if row.output == "verify" else end - 1, end))
    return np.array(columns, dtype=np.int64)
