"""Runs step frames on one stage: block table, engine, and on the last stage histories and the sampler.

Synchronous; used from the worker's compute thread alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from p2pshard.errors import Internal, P2PShardError, ProtocolError
from p2pshard.planning.plan import Plan
from p2pshard.sampling import SamplingParams
from p2pshard.transport.frames import Deltas, Frame, Hop, RowHeader, SampledToken
from p2pshard_node.engine.sampling import Draw, Sampled
from p2pshard_node.engine.stage import Row, StepBatch
from p2pshard_node.worker.naming import compute_failed

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


@dataclass
class _History:
    """All ids of one sequence, as the last stage saw them pass."""

    prompt_length: int
    sampling: SamplingParams
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def extend(self, ids: list[int]) -> None:
        room = self.prompt_length - len(self.prompt_ids)
        self.prompt_ids += ids[:room]
        self.output_ids += ids[room:]


class StageExecutor:
    """One epoch's state on one stage. `run` takes each step frame once, in order."""

    def __init__(self, engine: Engine, plan: Plan, index: int, sampler: Sampler) -> None:
        self._engine, self._plan, self._index, self._sampler = engine, plan, index, sampler
        self._head = plan.stages[index].head
        self._table: dict[int, tuple[int, ...]] = {}
        self._owned: set[int] = set()
        self._histories: dict[int, _History] = {}

    @property
    def blocks_used(self) -> int:
        return len(self._owned)

    @property
    def sequences(self) -> int:
        return len(self._table)

    def run(self, frame: Frame, queued_us: int) -> Frame:
        """The frame for the next stage, or from the last stage the ``tokens`` frame for the driver.

        What the engine cannot compute fails the rows concerned, each with an error that names this stage.
        Raises `ProtocolError` when the block table's changes contradict what is here: the epoch is then over.
        """
        begun = time.perf_counter()
        self._apply(frame.deltas)
        failed = dict(frame.failed)
        results = self._forward(frame, failed)
        computed = time.perf_counter()
        if self._head:
            tokens = self._sample(frame, results, failed)
            out = replace(
                frame, kind="tokens", rows=(), token_ids_T=None, hidden_TD=None, deltas=Deltas(), admitted=(),
                tokens=tokens,
            )  # fmt: skip
        else:
            out = replace(frame, hidden_TD=self._join(frame, results))
        hop = Hop(
            self._index,
            queued_us,
            compute_us=int((computed - begun) * 1e6),
            sample_us=int((time.perf_counter() - computed) * 1e6) if self._head else 0,
            serialise_us=frame.arrival.serialise_us if frame.arrival else 0,
            nbytes=frame.arrival.nbytes if frame.arrival else 0,
        )
        return replace(out, failed=tuple(failed.items()), arrival=None).with_hop(hop)

    # -- block table ----------------------------------------------------------------------------
    def _apply(self, deltas: Deltas) -> None:
        for sequence in deltas.free:
            self._owned.difference_update(self._blocks(sequence))
            del self._table[sequence]
            self._histories.pop(sequence, None)
        for sequence, kept in deltas.truncate:
            blocks = self._blocks(sequence)
            self._table[sequence] = blocks[:kept]
            self._owned.difference_update(blocks[kept:])
        if deltas.copy:
            self._engine.copy_blocks(list(deltas.copy))
        for sequence, runs in deltas.allocate:
            new = [b for first, count in runs for b in range(first, first + count)]
            if not self._owned.isdisjoint(new):
                raise ProtocolError(f"sequence {sequence} is given blocks that another one has")
            self._owned.update(new)
            self._table[sequence] = self._table.get(sequence, ()) + tuple(new)

    def _blocks(self, sequence: int) -> tuple[int, ...]:
        try:
            return self._table[sequence]
        except KeyError:
            raise ProtocolError(f"sequence {sequence} has no blocks here") from None

    # -- engine ---------------------------------------------------------------------------------
    def _forward(self, frame: Frame, failed: dict[int, P2PShardError]) -> dict[int, np.ndarray]:
        """Per sequence: hidden states of its tokens, or on the last stage its logits where it is sampled."""
        assert frame.token_ids_T is not None
        offsets = np.concatenate([[0], np.cumsum([r.length for r in frame.rows], dtype=np.int64)])
        spans = {r.sequence: slice(offsets[i], offsets[i + 1]) for i, r in enumerate(frame.rows)}
        live = [r for r in frame.rows if r.sequence not in failed]
        try:
            return self._compute(frame, live, spans) if live else {}
        except Exception as error:
            log.exception("step %s failed with %s rows", frame.step, len(live))
            if len(live) == 1:
                failed[live[0].sequence] = compute_failed(self._plan, self._index, error)
                return {}
        # Each row again on its own (a row writes the same slots as before), so that only those at fault fail.
        results: dict[int, np.ndarray] = {}
        for row in live:
            try:
                results |= self._compute(frame, [row], spans)
            except Exception as error:
                failed[row.sequence] = compute_failed(self._plan, self._index, error)
        return results

    def _compute(self, frame: Frame, rows: list[RowHeader], spans: dict[int, slice]) -> dict[int, np.ndarray]:
        whole = len(rows) == len(frame.rows)

        def pick(array: np.ndarray) -> np.ndarray:
            return array if whole else np.concatenate([array[spans[r.sequence]] for r in rows])

        assert frame.token_ids_T is not None
        hidden_TD = None
        if not self._plan.stages[self._index].embedding:
            if frame.hidden_TD is None:
                raise ProtocolError("a step without hidden states")
            hidden_TD = pick(frame.hidden_TD)
        batch = StepBatch(
            tuple(Row(r.sequence, r.start, r.length, self._blocks(r.sequence), r.output) for r in rows),
            pick(frame.token_ids_T),
        )
        out = self._engine.forward(batch, hidden_TD)
        sampled = [r for r in rows if r.output != "none"]
        if not np.isfinite(out).all():
            raise Internal("a result is not a finite number")
        if self._head:
            return {r.sequence: out[i] for i, r in enumerate(sampled)}
        results, first = {}, 0
        for row in rows:
            results[row.sequence] = out[first : first + row.length]
            first += row.length
        return results

    def _join(self, frame: Frame, results: dict[int, np.ndarray]) -> np.ndarray | None:
        """Hidden states of all rows; zeros for those that failed. None when nothing was computed."""
        if not results:
            return None
        if len(frame.rows) == 1:
            return results[frame.rows[0].sequence]
        width = next(iter(results.values())).shape[1]
        return np.concatenate(
            [results.get(r.sequence, np.zeros((r.length, width), np.float32)) for r in frame.rows]
        )

    # -- sampler --------------------------------------------------------------------------------
    def _sample(
        self, frame: Frame, logits: dict[int, np.ndarray], failed: dict[int, P2PShardError]
    ) -> tuple[SampledToken, ...]:
        assert frame.token_ids_T is not None
        for admitted in frame.admitted:
            self._histories[admitted.sequence] = _History(admitted.prompt_length, admitted.sampling)
        wanted: list[tuple[int, Draw]] = []
        first = 0
        for row in frame.rows:
            ids = frame.token_ids_T[first : first + row.length].tolist()
            first += row.length
            history = self._histories.get(row.sequence)
            if history is None or len(history) != row.start:
                gap = ProtocolError(f"its tokens before position {row.start} never came")
                failed.setdefault(row.sequence, compute_failed(self._plan, self._index, gap))
                continue
            history.extend(ids)
            if row.sequence not in failed and row.output == "sample":
                index = len(history.output_ids)
                draw = Draw(history.sampling, history.prompt_ids, history.output_ids, index)
                wanted.append((row.sequence, draw))
        if not wanted:
            return ()
        rows = [logits[sequence] for sequence, _ in wanted]
        found = self._sampler(np.stack(rows), [draw for _, draw in wanted])
        tokens = []
        for (sequence, _), got in zip(wanted, found, strict=True):
            if isinstance(got, P2PShardError):
                failed[sequence] = compute_failed(self._plan, self._index, got)
                continue
            top = tuple((i, max(p, _LEAST)) for i, p in got.top)
            tokens.append(SampledToken(sequence, got.id, max(got.logprob, _LEAST), top))
        return tuple(tokens)
