"""Runs step frames on one stage: block table, engine, and on the last stage the sampler.

Synchronous; used from the worker's compute thread alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from p2pshard.errors import P2PShardError, ProtocolError
from p2pshard.planning.plan import Plan
from p2pshard.transport.frames import Admitted, Deltas, Frame, Hop, RowHeader, SampledToken
from p2pshard_node.engine.sampling import Draw, Sampled
from p2pshard_node.engine.stage import Row, StepBatch
from p2pshard_node.worker.naming import compute_failed
from p2pshard_node.worker.table import BlockTable

__all__ = ["Engine", "Sampler", "StageExecutor"]

_LEAST = -1e30
"""Stands for minus infinity, the logprob of a token that was ruled out: frames carry finite numbers."""

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What this needs of `StageModel`."""

    def forward(self, batch: StepBatch, hidden_TD: np.ndarray | None) -> np.ndarray: ...
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...


Sampler = Callable[[np.ndarray, Sequence[Draw]], Sequence[Sampled | P2PShardError]]
"""``sample_rows(logits_RV, draws)``"""


@dataclass(frozen=True)
class _Computed:
    """What the engine gave for the rows that it could compute."""

    out: np.ndarray
    """float32 [T, D], or on the last stage logits [R, V]; the rows' parts one after another."""
    parts: dict[int, slice]
    """By sequence, in the order of the rows."""


@dataclass(frozen=True)
class _Wanted:
    """One sequence to sample in a step."""

    admitted: Admitted
    first: int
    """Row of its first logits."""
    length: int
    """Tokens of the sequence before the first one that is sampled."""
    draft: list[int]
    found: list[Sampled | P2PShardError] = field(default_factory=list)

    def goes_on(self, step: int) -> bool:
        """Whether the token just found, after `step` others, is the drafted one, so that what follows it counts."""
        got = self.found[-1]
        return step < len(self.draft) and isinstance(got, Sampled) and got.id == self.draft[step]


_NOTHING = _Computed(np.empty((0, 0), np.float32), {})


class StageExecutor:
    """One epoch's state on one stage. `run` takes each step frame once, in order."""

    def __init__(
        self, engine: Engine, plan: Plan, index: int, sampler: Sampler, carried: BlockTable | None = None
    ) -> None:
        """``carried``: the table that stands for what the pool holds of the epoch before."""
        self._engine, self._plan, self._index, self._sampler = engine, plan, index, sampler
        self._head = plan.stages[index].head
        self.table = carried or BlockTable(plan.blocks, plan.block_size)
        self._kept = int(carried is not None)
        self._admitted: dict[int, Admitted] = {}

    @property
    def blocks_used(self) -> int:
        return self.table.used

    @property
    def sequences(self) -> int:
        return self.table.sequences

    def run(self, frame: Frame, queued_us: int) -> Frame:
        """The frame for the next stage, or from the last stage the ``tokens`` frame for the driver.

        What the engine cannot compute fails the rows concerned, each with an error that names this stage.
        Raises `ProtocolError` when the block table's changes contradict what is here: the epoch is then over.
        """
        begun = time.perf_counter()
        self._apply(frame)
        failed = dict(frame.failed)
        self._write(frame, failed)
        computed = self._forward(frame, failed)
        forwarded = time.perf_counter()
        if self._head:
            tokens = self._sample(frame, computed, failed)
            out = replace(
                frame, kind="tokens", rows=(), token_ids_T=None, hidden_TD=None, deltas=Deltas(), admitted=(),
                tokens=tokens,
            )  # fmt: skip
        else:
            out = replace(frame, hidden_TD=self._join(frame, computed))
        hop = Hop(
            self._index,
            queued_us,
            compute_us=int((forwarded - begun) * 1e6),
            sample_us=int((time.perf_counter() - forwarded) * 1e6) if self._head else 0,
            serialise_us=frame.arrival.serialise_us if frame.arrival else 0,
            nbytes=frame.arrival.nbytes if frame.arrival else 0,
            kept=self._kept,
        )
        return replace(out, failed=tuple(failed.items()), arrival=None).with_hop(hop)

    # -- block table ----------------------------------------------------------------------------
    def _apply(self, frame: Frame) -> None:
        self.table.apply(frame.deltas)
        if frame.deltas.copy:
            self._engine.copy_blocks(list(frame.deltas.copy))
        for sequence in frame.deltas.free:
            self._admitted.pop(sequence, None)
        for admitted in frame.admitted:
            self._admitted[admitted.sequence] = admitted

    def _write(self, frame: Frame, failed: dict[int, P2PShardError]) -> None:
        """Take note of every row's token ids; a row that has no place here fails."""
        assert frame.token_ids_T is not None
        first = 0
        for row in frame.rows:
            ids, first = frame.token_ids_T[first : first + row.length], first + row.length
            if row.sequence in failed:
                continue
            try:
                self.table.write(row.sequence, row.start, ids)
            except ProtocolError as error:
                failed[row.sequence] = compute_failed(self._plan, self._index, error)

    # -- engine ---------------------------------------------------------------------------------
    def _forward(self, frame: Frame, failed: dict[int, P2PShardError]) -> _Computed:
        live = [r for r in frame.rows if r.sequence not in failed]
        try:
            return self._compute(frame, live) if live else _NOTHING
        except Exception as error:
            log.exception("step %s failed with %s rows", frame.step, len(live))
            if len(live) == 1:
                failed[live[0].sequence] = compute_failed(self._plan, self._index, error)
                return _NOTHING
        # Each row again on its own (a row writes the same slots as before), so that only those at fault fail.
        outs: list[np.ndarray] = []
        parts: dict[int, slice] = {}
        for row in live:
            try:
                out = self._compute(frame, [row]).out
            except Exception as error:
                failed[row.sequence] = compute_failed(self._plan, self._index, error)
                continue
            first = sum(map(len, outs))
            parts[row.sequence] = slice(first, first + len(out))
            outs.append(out)
        return _Computed(np.concatenate(outs), parts) if outs else _NOTHING

    def _compute(self, frame: Frame, rows: list[RowHeader]) -> _Computed:
        whole = len(rows) == len(frame.rows)
        spans: dict[int, slice] = {}
        first = 0
        for row in frame.rows:
            spans[row.sequence] = slice(first, first + row.length)
            first += row.length

        def pick(array: np.ndarray) -> np.ndarray:
            return array if whole else np.concatenate([array[spans[r.sequence]] for r in rows])

        assert frame.token_ids_T is not None
        hidden_TD = None
        if not self._plan.stages[self._index].embedding:
            if frame.hidden_TD is None:
                raise ProtocolError("a step without hidden states")
            hidden_TD = pick(frame.hidden_TD)
        batch = StepBatch(
            tuple(Row(r.sequence, r.start, r.length, self.table.blocks(r.sequence), r.output) for r in rows),
            pick(frame.token_ids_T),
        )
        out = self._engine.forward(batch, hidden_TD)
        parts, first = {}, 0
        for row in rows:
            length = row.length if not self._head or row.output == "verify" else int(row.output != "none")
            parts[row.sequence] = slice(first, first + length)
            first += length
        return _Computed(out, parts)

    def _join(self, frame: Frame, computed: _Computed) -> np.ndarray | None:
        """Hidden states of all rows; zeros for those that failed. None when nothing was computed."""
        if not computed.parts:
            return None
        if len(computed.parts) == len(frame.rows):
            return computed.out
        zeros = np.zeros((max(r.length for r in frame.rows), computed.out.shape[1]), np.float32)
        return np.concatenate(
            [
                computed.out[computed.parts[r.sequence]]
                if r.sequence in computed.parts
                else zeros[: r.length]
                for r in frame.rows
            ]
        )

    # -- sampler --------------------------------------------------------------------------------
    def _sample(
        self, frame: Frame, computed: _Computed, failed: dict[int, P2PShardError]
    ) -> tuple[SampledToken, ...]:
        """A token for each row that is sampled; for one with a draft also the next ones, while it is right.

        Each token has its own random number, keyed by its index: what is drawn does not depend on the draft.
        """
        assert frame.token_ids_T is not None
        wanted: list[_Wanted] = []
        first = 0
        for row in frame.rows:
            ids, first = frame.token_ids_T[first : first + row.length], first + row.length
            part = computed.parts.get(row.sequence)
            if part is None or row.output == "none":
                continue
            admitted = self._admitted.get(row.sequence)
            if admitted is None:
                error = ProtocolError("it was never said how to sample from it")
                failed[row.sequence] = compute_failed(self._plan, self._index, error)
                continue
            draft = ids[1:].tolist() if row.output == "verify" else []
            wanted.append(_Wanted(admitted, part.start, row.start + row.length - len(draft), draft))
        open_ = wanted
        for step in range(1 + max((len(w.draft) for w in wanted), default=-1)):
            where = [w.first + step for w in open_]
            logits_RV = computed.out if len(where) == len(computed.out) else computed.out[where]
            draws = [self._draw(w.admitted, w.length + step) for w in open_]
            for w, got in zip(open_, self._sampler(logits_RV, draws), strict=True):
                w.found.append(got)
            open_ = [w for w in open_ if w.goes_on(step)]
            if not open_:
                break
        tokens = []
        for w in wanted:
            sequence = w.admitted.sequence
            for got in w.found:
                if isinstance(got, P2PShardError):
                    failed[sequence] = compute_failed(self._plan, self._index, got)
                    break
                top = tuple((i, max(p, _LEAST)) for i, p in got.top)
                tokens.append(SampledToken(sequence, got.id, max(got.logprob, _LEAST), top))
        return tuple(tokens)

    def _draw(self, admitted: Admitted, length: int) -> Draw:
        """What the token after the first `length` ones of a sequence is sampled with."""
        params, prompt = admitted.sampling, admitted.prompt_length
        ids = self.table.ids(admitted.sequence, length) if params.penalised else _NO_IDS
        return Draw(params, ids[:prompt], ids[prompt:], length - prompt)


_NO_IDS = np.empty(0, np.int32)
