"""Continuous batching: which tokens of which sequences the next step holds. Pure: no torch, clock or I/O.

A sequence is admitted when blocks for the tokens it has now are there, with some to grow into for all that
run; further blocks come as it grows. When they run out, the youngest sequence gives its blocks back, and is
computed again, prompt and output, once there is room. The oldest can always go on, so all come to an end.
What a sequence has in common with earlier ones (whole blocks from its first token on) is not computed again.

A step holds decode rows and chunks of prompts, together at most `chunk_tokens`; at most `window` steps are
under way, so that each stage can work on another one. Stages execute steps in order, so blocks may be
given to another sequence while steps that use them are under way.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from p2pshard.errors import ContextExceeded, Overloaded
from p2pshard.planning.memory import MAX_LOGIT_ROWS
from p2pshard.speculation import ADAPTIVE
from p2pshard_node.scheduling.blocks import BlockPool, runs_of
from p2pshard_node.scheduling.drafting import Drafter
from p2pshard_node.scheduling.prefix import extend_keys
from p2pshard_node.scheduling.sequence import Sequence
from p2pshard_node.scheduling.step import Advance, Changes, Counts, Request, Step, StepRow

__all__ = ["Scheduler"]

MIN_GROUP = 2
"""Decode rows that share a step before another is opened for more: a weight's bytes are what one row waits for, so two
cost about as much, and where stages share a machine's memory, two groups of one took half as long again as one of two."""
SHARED_CHUNK = 64
"""Prompt tokens of a step while other sequences wait for their next token: it comes no later than so many tokens take
on each stage. Kernels take prompts in tiles of as many, so that larger steps would hardly be faster."""
STEPS_EACH = 4
"""Steps for each stage that what is to be read of prompts is taken in, at least: with one step each, every stage but one
would stand still at any time."""
GROWTH_BLOCKS = 4
"""That each running sequence must be able to take before another is admitted; doubled for one each time it
lost its blocks, so that this happens seldom, and never for ever."""
WAIT_BLOCKS = 4
"""Length of a common beginning from which on a sequence waits for what another one is computing of it."""
ADAPTIVE_ROWS = 12
"""Room for adaptive drafts in a step, less three for each sequence in it: 9 for one, 3 each for two, 1 each for
three, none for four: guesses, which are often wrong, do not pay where the step is full already."""


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
        root: bytes = b"",
    ) -> None:
        """``max_samples``: rows of one step that are sampled, at least 2; the plan has memory for so many logits.

        ``root``: `p2pshard_node.scheduling.prefix.root_key`.
        """
        self.blocks = BlockPool(blocks)
        self.counts = Counts()
        self.window = window
        self._block_size = block_size
        self._chunk = chunk_tokens
        self._context = context
        self._max_waiting = max_waiting
        self._max_samples = max_samples
        self._root = root
        self._arrivals = 0
        self._waiting: list[Sequence] = []
        """In order of arrival."""
        self._running: dict[int, Sequence] = {}
        self._prefill: deque[Sequence] = deque()
        """Running sequences with ids beyond the next decode token still to send, oldest first."""
        self._ready: deque[Sequence] = deque()
        """Running sequences whose next token may be computed, longest waiting first."""
        self._filling: dict[bytes, int] = {}
        """Keys of blocks that a running sequence will complete while it reads its prompt."""
        self._freed: list[int] = []
        self._flight: dict[int, Step] = {}
        self._decode_steps: set[int] = set()
        """Those under way that hold decode rows."""
        self._number = 0
        self._prefilled = False
        """Whether the last step held a chunk of a prompt; with a budget of one token they alternate."""
        self._next = Changes()

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
        return not (self._waiting or self._running or self._flight or self._freed)

    def need(self, request: Request) -> int:
        """Most blocks a request can come to use. The last token it may give is never computed on."""
        positions = min(self._context, len(request.prompt_ids) + request.max_tokens - 1)
        return self._blocks_for(max(1, positions))

    def _blocks_for(self, positions: int) -> int:
        return math.ceil(positions / self._block_size)

    def content(self) -> tuple[tuple[bytes, int], ...]:
        """Key and block of all that running sequences have in complete blocks; of each in order of position, each once."""
        found: dict[bytes, int] = {}
        for state in self._running.values():
            found.update(zip(state.keys, self.blocks.find(state.keys), strict=False))
        return tuple(found.items())

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
        self._arrivals += 1
        state = Sequence(request, self._arrivals, [*request.prompt_ids, *request.output_ids])
        state.drafter = Drafter(request.draft) if request.draft else None
        self._waiting.append(state)

    def cancel(self, sequence: int) -> bool:
        """End a sequence now; its rows under way are ignored when they return. False when it is not here."""
        state = self._running.get(sequence)
        if state is not None:
            self._stop(state)
            return True
        before = len(self._waiting)
        self._waiting = [s for s in self._waiting if s.number != sequence]
        return len(self._waiting) < before

    def _stop(self, state: Sequence) -> None:
        """It runs no longer; its blocks are there for others from the next step on."""
        del self._running[state.number]
        for queue in (self._prefill, self._ready):
            if state in queue:
                queue.remove(state)
        for key in state.keys:
            if self._filling.get(key) == state.number:
                del self._filling[key]
        self.blocks.free(state.number)
        self._freed.append(state.number)

    def _preempt(self, state: Sequence) -> None:
        """Take the blocks of a sequence; it waits, in its old place, to be computed again."""
        assert state.number not in self._next.admitted, "admitted without room to grow"
        self._stop(state)
        state.turn, state.sent, state.done = state.turn + 1, 0, 0
        bisect.insort(self._waiting, state, key=lambda s: s.arrival)
        self.counts.preempted += 1

    # -- steps ----------------------------------------------------------------------------------
    def next_step(self) -> Step | None:
        """The next step to send, or None: nothing to do, or `window` steps are under way.

        A step without rows only gives blocks back; it is made when nothing else would carry them.
        """
        if len(self._flight) >= self.window:
            return None
        self._next = Changes()
        # A prompt always gets on: one token of the budget is kept for it, or every second step.
        reading = (bool(self._prefill) or self._admit()) and (self._chunk > 1 or not self._prefilled)
        decodes = self._decode_rows(keep=int(reading))
        used = sum(len(row.token_ids) for row in decodes)
        budget = min(self._chunk - used, self._prompt_tokens())
        rows = (*decodes, *self._prefill_rows(budget, self._max_samples - used))
        freed, self._freed = tuple(self._freed), []
        if not rows and not freed:
            return None
        self._number += 1
        changes = self._next
        step = Step(
            self._number,
            rows,
            tuple(changes.admitted),
            tuple(changes.shared),
            tuple(changes.allocated.items()),
            freed,
        )
        self._flight[step.number] = step
        if decodes:
            self._decode_steps.add(step.number)
        return step

    def _prompt_tokens(self) -> int:
        """Most tokens of prompts that the next step takes: few while others wait for a token of theirs, and not so many
        that stages wait for the first step or the last."""
        if len(self._running) > len(self._prefill):
            return SHARED_CHUNK
        if self.window == 1:
            return self._chunk
        unread = sum(len(s.ids) - s.sent for s in self._prefill) + sum(len(s.ids) for s in self._waiting)
        return max(1, math.ceil(unread / (self.window * SHARED_CHUNK * STEPS_EACH))) * SHARED_CHUNK

    def _decode_rows(self, keep: int) -> tuple[StepRow, ...]:
        """The next group: as many as stages can work on at once, none below `MIN_GROUP` by choice."""
        decoding = len(self._running) - len(self._prefill)
        groups = max(1, min(self.window, decoding // MIN_GROUP))
        if len(self._decode_steps) >= groups:
            return ()  # those that are ready wait for a group to return, and share the next step
        group = min(
            self._chunk - keep, self._max_samples - keep, math.ceil(decoding / groups), len(self._ready)
        )
        chosen = [self._ready.popleft() for _ in range(group)]
        fed = []
        # The oldest first: whoever has to make room for it is younger, hence not yet in the step.
        for state in sorted(chosen, key=lambda s: s.arrival):
            if state.number in self._running and self._grow(state, state.sent + 1):
                fed.append(state)
        rows = []
        spare = min(self._chunk, self._max_samples) - keep - len(fed)
        for index, state in enumerate(fed):
            most = spare // (len(fed) - index)
            if state.request.draft == ADAPTIVE:
                most = min(most, max(0, ADAPTIVE_ROWS - 3 * len(fed)) // len(fed))
            draft = self._draft(state, most)
            spare -= len(draft)
            row = self._row(state, 1)
            rows.append(replace(row, token_ids=row.token_ids + draft, drafted=len(draft)) if draft else row)
        return tuple(rows)

    def _draft(self, state: Sequence, most: int) -> tuple[int, ...]:
        """Tokens that may follow, as far as budget, answer, context and free blocks go."""
        if state.drafter is None:
            return ()
        most = min(most, state.request.max_tokens - state.outputs - 1, self._context - len(state.ids))
        draft = state.drafter.draft(state.ids, most) if most > 0 else ()
        missing = self._blocks_for(state.sent + 1 + len(draft)) - len(self.blocks.blocks(state.number))
        if missing <= 0:
            return draft
        if self.blocks.available - missing < len(self._running):  # a guess takes no block that one may need
            return draft[: len(self.blocks.blocks(state.number)) * self._block_size - state.sent - 1]
        self._grow(state, state.sent + 1 + len(draft))
        return draft

    def _grow(self, state: Sequence, positions: int) -> bool:
        """Give a sequence blocks for so many positions; False when it had to give up its own."""
        missing = self._blocks_for(positions) - len(self.blocks.blocks(state.number))
        if missing <= 0:
            return True
        while (runs := self.blocks.extend(state.number, missing)) is None:
            youngest = max(self._running.values(), key=lambda s: s.arrival)
            self._preempt(youngest)
            if youngest is state:
                return False
        self._next.allocate(state.number, runs)
        return True

    def _prefill_rows(self, budget: int, samples: int) -> tuple[StepRow, ...]:
        rows: list[StepRow] = []
        while budget and samples and (self._prefill or self._admit()):
            state = self._prefill[0]
            length = min(budget, len(state.ids) - state.sent)
            rows.append(self._row(state, length))
            budget -= length
            if state.sent == len(state.ids):
                self._prefill.popleft()
                samples -= 1
        self._prefilled = bool(rows)
        return tuple(rows)

    def _row(self, state: Sequence, length: int) -> StepRow:
        start, state.sent = state.sent, state.sent + length
        ids = tuple(state.ids[start : state.sent])
        return StepRow(state.number, start, ids, sample=state.sent == len(state.ids), turn=state.turn)

    # -- admission ------------------------------------------------------------------------------
    def _admit(self) -> bool:
        """Let the first in the queue run, if there is room for it."""
        for state in self._waiting:
            if state.awaits in self._filling:
                continue  # another sequence reads the same; whoever follows need not wait for that
            extend_keys(
                state.keys, state.ids, self._block_size, len(state.ids) // self._block_size, self._root
            )
            # At least one token is computed: the logits after the last one are needed.
            keys = state.keys[: (len(state.ids) - 1) // self._block_size]
            hits = self.blocks.find(keys)
            known = len(hits) + self._filled_soon(keys[len(hits) :])
            if known > len(hits) and known >= WAIT_BLOCKS:
                state.awaits = keys[known - 1]
                continue
            if not self._fits(state, hits) or not self._next.room_for(hits, self.blocks.total):
                return (
                    False  # strictly in order: a small one that overtakes could starve a large one for ever
                )
            self._waiting.remove(state)
            self._begin(state, hits)
            return True
        return False

    def _filled_soon(self, keys: Items[bytes]) -> int:
        """How many of these, from the first on, are being computed for another sequence."""
        return next((i for i, key in enumerate(keys) if key not in self._filling), len(keys))

    def _fits(self, state: Sequence, hits: tuple[int, ...]) -> bool:
        """Whether there are blocks for its tokens, and some for all that run to grow into."""
        if not self._running:
            return True  # all blocks are available, and `add` has seen to it that they are enough
        most = GROWTH_BLOCKS << min(state.turn, 32)
        growth = min(most, self.need(state.request) - self._blocks_for(len(state.ids)))
        for other in self._running.values():
            growth += min(most, self.need(other.request) - len(self.blocks.blocks(other.number)))
        new = self._blocks_for(len(state.ids)) - len(hits)
        return new + growth <= self.blocks.available - self.blocks.idle(hits)

    def _begin(self, state: Sequence, hits: tuple[int, ...]) -> None:
        number = state.number
        if hits:
            self.blocks.share(number, hits)
            self._next.shared.append((number, runs_of(hits)))
        runs = self.blocks.extend(number, self._blocks_for(len(state.ids)) - len(hits))
        assert runs is not None, "admitted without room"
        self._next.allocate(number, runs)
        self._next.admitted.append(number)
        state.sent = state.done = len(hits) * self._block_size
        for key in state.keys[len(hits) :]:
            self._filling.setdefault(key, number)
        self._running[number] = state
        self._prefill.append(state)
        self.counts.admitted_tokens += len(state.ids)
        self.counts.hit_tokens += state.sent

    # -- returns --------------------------------------------------------------------------------
    def complete(
        self, number: int, tokens: Mapping[int, Items[int]], failed: Collection[int] = ()
    ) -> tuple[Advance, ...]:
        """Take a returned step's sampled tokens by sequence: one, and for each that was drafted right one more.

        A sequence of `failed`, which a stage could not compute, is left as it is: cancel it. Raises `KeyError`
        for a step not under way.
        """
        step = self._flight.pop(number)
        self._decode_steps.discard(number)
        advances: list[Advance] = []
        for row in step.rows:
            state = self._running.get(row.sequence)
            if state is None or state.turn != row.turn or row.sequence in failed:
                continue
            given = tokens.get(row.sequence, ())[: row.drafted + 1] if row.sample else ()
            right = max(0, len(given) - 1)
            state.sent = max(state.sent, row.start + len(row.token_ids) - row.drafted + right)
            taken = state.take(given, self._context)
            self._done(state, min(row.start + len(row.token_ids) - row.drafted + right, len(state.ids)))
            if state.drafter is not None:
                state.drafter.judge(row.drafted, right, len(state.ids))
                self.counts.drafted += row.drafted
                self.counts.accepted += right
            if taken and taken[-1].finished:
                self._stop(state)
            elif taken:
                self._ready.append(state)
            advances += taken
        return tuple(advances)

    def _done(self, state: Sequence, positions: int) -> None:
        """Every stage has keys and values of so many: blocks that are full now can be found by others."""
        first, end = state.done // self._block_size, positions // self._block_size
        extend_keys(state.keys, state.ids, self._block_size, end, self._root)
        blocks = self.blocks.blocks(state.number)
        for block, key in zip(blocks[first:end], state.keys[first:end], strict=True):
            self.blocks.keep(block, key)
            if self._filling.get(key) == state.number:
                del self._filling[key]
        state.done = positions
