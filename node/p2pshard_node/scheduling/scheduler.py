"""Continuous batching: which tokens of which sequences the next step holds. Pure: no torch, clock or I/O.

Sequences wait first-in first-out and are admitted when blocks for their prompt and all they may still
generate are free, so that a sequence once running never waits for memory. A step holds decode rows and
chunks of prompts, together at most `chunk_tokens`; at most `window` steps are under way, so that each stage
can work on another one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pshard.errors import ContextExceeded, Overloaded
from p2pshard.planning.memory import MAX_LOGIT_ROWS
from p2pshard_node.scheduling.blocks import BlockAllocator, Run

__all__ = ["Advance", "Request", "Scheduler", "Step", "StepRow"]

MIN_GROUP = 4
"""Decode rows that share a step before another is opened for more: fewer cost about as much."""


@dataclass(frozen=True)
class Request:
    """What the scheduler needs to know of a sequence."""

    sequence: int
    """64 bit, never used twice."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    """Output tokens in all, those already given included."""
    output_ids: tuple[int, ...] = ()
    """Already given, by an earlier attempt: computed again like a prompt, continued after."""
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepRow:
    sequence: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    """Its last token's logits are sampled."""


@dataclass(frozen=True)
class Step:
    """One pass through all stages. Stages execute `freed` before `allocated`."""

    number: int
    rows: tuple[StepRow, ...]
    admitted: tuple[int, ...]
    """Sequences whose first row is in this step."""
    allocated: tuple[tuple[int, tuple[Run, ...]], ...]
    freed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True)
class Advance:
    """One sampled token taken into its sequence."""

    sequence: int
    index: int
    """Output index."""
    token: int
    finished: str
    """``stop``, ``length`` or empty."""


@dataclass
class _Sequence:
    request: Request
    ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    sent: int = 0
    """Tokens of `ids` that a step holds or held."""
    flying: int = 0
    """Rows in steps under way."""

    @property
    def outputs(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)


class Scheduler:
    """The driver's policy: `add` and `cancel` at any time, `next_step` until None, `complete` on return."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        chunk_tokens: int,
        window: int,
        context: int,
        max_waiting: int = 256,
        max_samples: int = MAX_LOGIT_ROWS,
    ) -> None:
        """``max_samples``: rows of one step that are sampled, at least 2; the plan has memory for so many logits."""
        self.blocks = BlockAllocator(blocks)
        self._block_size = block_size
        self._chunk = chunk_tokens
        self.window = window
        self._context = context
        self._max_waiting = max_waiting
        self._max_samples = max_samples
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._prefill: deque[int] = deque()
        """Running sequences with ids beyond the next decode token still to send, oldest first."""
        self._ready: deque[int] = deque()
        """Running sequences whose next token may be computed, longest waiting first."""
        self._ending: dict[int, int] = {}
        """Sequences that are over, with the rows that steps under way still hold."""
        self._to_free: list[int] = []
        self._flight: dict[int, Step] = {}
        self._decode_steps: set[int] = set()
        """Those under way that hold decode rows."""
        self._number = 0
        self._prefilled = False
        """Whether the last step held a chunk of a prompt; with a budget of one token they alternate."""

    # -- what is there --------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self._flight)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, flies or has blocks to give back."""
        return not (self._waiting or self._running or self._flight or self._ending or self._to_free)

    def need(self, request: Request) -> int:
        """Blocks reserved for a request. The last token it may give is never computed on."""
        positions = min(self._context, len(request.prompt_ids) + request.max_tokens - 1)
        return math.ceil(max(1, positions) / self._block_size)

    # -- requests -------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request.

        Raises `ContextExceeded` when it can never run, `Overloaded` when the queue is full.
        """
        prompt = len(request.prompt_ids)
        if (
            not prompt
            or prompt + len(request.output_ids) > self._context
            or self.need(request) > self.blocks.total
        ):
            room = min(self._context, self.blocks.total * self._block_size)
            raise ContextExceeded(
                f"{prompt} prompt tokens and up to {request.max_tokens} to generate do not fit: "
                f"1 to {self._context} tokens of context, {room} of KV cache; "
                "shorten one or deploy with more --context",
                prompt_tokens=prompt,
                context=room,
            )
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting already; try again shortly", retry_after_s=1.0
            )
        self._waiting.append(_Sequence(request, [*request.prompt_ids, *request.output_ids]))

    def cancel(self, sequence: int) -> bool:
        """End a sequence now; its rows under way are ignored when they return. False when it is not here."""
        if sequence in self._running:
            self._end(sequence)
            return True
        before = len(self._waiting)
        self._waiting = deque(s for s in self._waiting if s.request.sequence != sequence)
        return len(self._waiting) < before

    def _end(self, sequence: int) -> None:
        state = self._running.pop(sequence)
        for queue in (self._prefill, self._ready):
            if sequence in queue:
                queue.remove(sequence)
        if state.flying:
            self._ending[sequence] = state.flying
        else:
            self._to_free.append(sequence)

    # -- steps ----------------------------------------------------------------------------------
    def next_step(self) -> Step | None:
        """The next step to send, or None: nothing to do, or `window` steps are under way.

        A step without rows only gives blocks back; it is made when nothing else would carry them.
        """
        if len(self._flight) >= self.window:
            return None
        freed, self._to_free = tuple(self._to_free), []
        for sequence in freed:
            self.blocks.free(sequence)
        allocated = self._admit()
        decodes = self._decode_rows()
        rows = (
            *decodes,
            *self._prefill_rows(self._chunk - len(decodes), self._max_samples - len(decodes)),
        )
        if not rows and not freed and not allocated:
            return None
        self._number += 1
        admitted = tuple(r.sequence for r in rows if r.start == 0)
        step = Step(self._number, rows, admitted, allocated, freed)
        for row in rows:
            self._running[row.sequence].flying += 1
        self._flight[step.number] = step
        if decodes:
            self._decode_steps.add(step.number)
        return step

    def _admit(self) -> tuple[tuple[int, tuple[Run, ...]], ...]:
        allocated = []
        while self._waiting:
            state = self._waiting[0]
            sequence = state.request.sequence
            runs = self.blocks.allocate(sequence, self.need(state.request))
            if runs is None:
                break  # strictly in order: a small one that overtakes could starve a large one for ever
            self._waiting.popleft()
            self._running[sequence] = state
            self._prefill.append(sequence)
            allocated.append((sequence, runs))
        return tuple(allocated)

    def _decode_rows(self) -> tuple[StepRow, ...]:
        """The next group: as many as stages can work on at once, none below `MIN_GROUP` by choice."""
        # A prompt always gets on: one token of the budget is kept for it, or every second step.
        keep = int(bool(self._prefill) and (self._chunk > 1 or not self._prefilled))
        decoding = len(self._running) - len(self._prefill)
        groups = max(1, min(self.window, decoding // MIN_GROUP))
        if len(self._decode_steps) >= groups:
            return ()  # those that are ready wait for a group to return, and share the next step
        group = min(
            self._chunk - keep, self._max_samples - keep, math.ceil(decoding / groups), len(self._ready)
        )
        return tuple(self._row(self._ready.popleft(), 1) for _ in range(group))

    def _prefill_rows(self, budget: int, samples: int) -> tuple[StepRow, ...]:
        rows: list[StepRow] = []
        while budget and samples and self._prefill:
            state = self._running[self._prefill[0]]
            length = min(budget, len(state.ids) - state.sent)
            rows.append(self._row(self._prefill[0], length))
            budget -= length
            if state.sent == len(state.ids):
                self._prefill.popleft()
                samples -= 1
        self._prefilled = bool(rows)
        return tuple(rows)

    def _row(self, sequence: int, length: int) -> StepRow:
        state = self._running[sequence]
        start, state.sent = state.sent, state.sent + length
        return StepRow(
            sequence, start, tuple(state.ids[start : state.sent]), sample=state.sent == len(state.ids)
        )

    def complete(self, number: int, tokens: Mapping[int, int]) -> tuple[Advance, ...]:
        """Take a returned step's sampled tokens ({sequence: id}). Raises `KeyError` for a step not under way.

        A sequence whose sampled row has no token is left as it is: cancel it when a stage failed.
        """
        step = self._flight.pop(number)
        self._decode_steps.discard(number)
        advances = []
        for row in step.rows:
            if row.sequence in self._ending:
                self._ending[row.sequence] -= 1
                if not self._ending[row.sequence]:
                    del self._ending[row.sequence]
                    self._to_free.append(row.sequence)
                continue
            state = self._running[row.sequence]
            state.flying -= 1
            if row.sample and row.sequence in tokens:
                advances.append(self._advance(state, tokens[row.sequence]))
        return tuple(advances)

    def _advance(self, state: _Sequence, token: int) -> Advance:
        request = state.request
        state.ids.append(token)
        finished = ""
        if token in request.eos_ids:
            finished = "stop"
        elif state.outputs >= request.max_tokens or len(state.ids) > self._context:
            finished = "length"
        if finished:
            self._end(request.sequence)
        else:
            self._ready.append(request.sequence)
        return Advance(request.sequence, state.outputs - 1, token, finished)
