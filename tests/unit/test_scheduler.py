"""The scheduler against a model of the stages: nothing starves, leaks, overlaps or exceeds its budget."""

from __future__ import annotations

import random
from collections import deque

import pytest
from p2pshard_node.scheduling.scheduler import Request, Scheduler, Step

from p2pshard.errors import ContextExceeded, Overloaded


class Stages:
    """What the stages would hold, checked at every step; tokens are a function of the history alone."""

    def __init__(self, scheduler: Scheduler, blocks: int, block_size: int, chunk: int) -> None:
        self.scheduler, self.total, self.block_size, self.chunk = scheduler, blocks, block_size, chunk
        self.blocks: dict[int, set[int]] = {}
        self.history: dict[int, list[int]] = {}
        self.flight: deque[Step] = deque()
        self.most_rows = 0
        self.most_flight = 0

    @staticmethod
    def token(history: list[int]) -> int:
        return (sum(history) * 31 + len(history)) % 97

    def send(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        assert 0 <= step.tokens <= self.chunk
        assert step.rows or step.freed or step.allocated
        using = {row.sequence for s in self.flight for row in s.rows}
        for sequence in step.freed:
            assert sequence not in using, "freed while a step under way uses it"
            del self.blocks[sequence]
            self.history.pop(sequence, None)
        for sequence, runs in step.allocated:
            blocks = {b for first, count in runs for b in range(first, first + count)}
            taken = set().union(*self.blocks.values()) if self.blocks else set()
            assert blocks and not blocks & taken and max(blocks) < self.total
            self.blocks[sequence] = blocks
        seen = set()
        for row in step.rows:
            assert row.sequence not in seen and row.token_ids
            seen.add(row.sequence)
            history = self.history.setdefault(row.sequence, [])
            assert row.start == len(history)
            history.extend(row.token_ids)
            assert len(history) <= len(self.blocks[row.sequence]) * self.block_size
            assert (row.start == 0) == (row.sequence in step.admitted)
        samples = [r.sequence for s in (*self.flight, step) for r in s.rows if r.sample]
        assert len(samples) == len(set(samples)), "two sampled rows of one sequence under way"
        self.flight.append(step)
        self.most_rows = max(self.most_rows, sum(r.sample for r in step.rows))
        self.most_flight = max(self.most_flight, len(self.flight))
        assert len(self.flight) <= self.scheduler.window
        return True

    def receive(self) -> list[tuple[int, int, str]]:
        step = self.flight.popleft()
        ends = {r.sequence: r.start + len(r.token_ids) for r in step.rows if r.sample}
        tokens = {s: self.token(self.history[s][:end]) for s, end in ends.items()}
        return [(a.sequence, a.token, a.finished) for a in self.scheduler.complete(step.number, tokens)]


def solo(request: Request, context: int) -> list[int]:
    ids, out = [*request.prompt_ids, *request.output_ids], list(request.output_ids)
    while True:
        token = Stages.token(ids)
        ids.append(token)
        out.append(token)
        if token in request.eos_ids or len(out) >= request.max_tokens or len(ids) > context:
            return out


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_with_cancels(seed: int) -> None:
    rng = random.Random(seed)
    window, block_size, chunk = rng.randint(1, 4), rng.choice([1, 4, 16]), rng.choice([1, 2, 7, 64])
    context = 64
    total = rng.choice([1, 2, 3]) * -(-context // block_size)
    scheduler = Scheduler(
        blocks=total, block_size=block_size, chunk_tokens=chunk, window=window, context=context
    )
    stages = Stages(scheduler, total, block_size, chunk)
    requests: dict[int, Request] = {}
    outputs: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    cancelled: set[int] = set()
    pending = list(range(1, 31))
    for _ in range(100_000):
        action = rng.random()
        if pending and action < 0.3:
            sequence = pending.pop(0)
            prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 40)))
            most = rng.randint(1, 40)
            given: tuple[int, ...] = ()
            eos = frozenset({rng.randrange(97)})
            if rng.random() < 0.3 and most > 3:  # carried on from another driver
                whole = solo(Request(sequence, prompt, most, (), eos), context)
                given = tuple(whole[: len(whole) // 2])
            requests[sequence] = Request(sequence, prompt, most, given, eos)
            outputs[sequence] = list(given)
            scheduler.add(requests[sequence])
        elif action < 0.35 and requests:
            sequence = rng.choice(list(requests))
            if scheduler.cancel(sequence):
                cancelled.add(sequence)
        elif action < 0.7:
            stages.send()
        elif stages.flight:
            for sequence, token, reason in stages.receive():
                assert sequence not in finished and sequence not in cancelled
                outputs[sequence].append(token)
                if reason:
                    finished[sequence] = reason
        if not pending and scheduler.idle:
            break
    assert scheduler.idle and not stages.flight, "starved"
    assert scheduler.blocks.used == 0 and not stages.blocks and not stages.history
    assert set(finished) | cancelled == set(requests)
    for sequence in finished:
        assert outputs[sequence] == solo(requests[sequence], context), requests[sequence]


def drain(stages: Stages) -> list[tuple[int, int, str]]:
    got = []
    while True:
        while stages.send():
            pass
        if not stages.flight:
            return got
        got += stages.receive()


def test_room_for_one_sequence_serves_two_in_order() -> None:
    scheduler = Scheduler(blocks=1, block_size=16, chunk_tokens=8, window=1, context=16)
    stages = Stages(scheduler, 1, 16, 8)
    for sequence in (1, 2):
        scheduler.add(Request(sequence, (5, 6, 7), 6))
    got = drain(stages)
    assert [s for s, _, _ in got] == [1] * 6 + [2] * 6
    assert scheduler.blocks.used == 0


def test_a_step_holds_at_least_four_and_every_stage_has_one() -> None:
    scheduler = Scheduler(blocks=64, block_size=16, chunk_tokens=64, window=2, context=128)
    stages = Stages(scheduler, 64, 16, 64)
    for sequence in range(8):
        scheduler.add(Request(sequence, (1, 2), 60))
    drain(stages)
    assert stages.most_rows >= 4 and stages.most_flight == 2


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    scheduler = Scheduler(blocks=64, block_size=16, chunk_tokens=8, window=1, context=512)
    stages = Stages(scheduler, 64, 16, 8)
    scheduler.add(Request(1, (1,), 100))
    stages.send()
    stages.receive()
    scheduler.add(Request(2, tuple(range(97)) * 3, 2))
    order = [s for s, _, _ in drain(stages)]
    assert order.index(2) > 30, "one token of sequence 1 for each of the ~42 chunks of sequence 2"


@pytest.mark.parametrize("window", [1, 2])
def test_a_budget_of_one_token_still_reads_prompts(window: int) -> None:
    scheduler = Scheduler(blocks=8, block_size=16, chunk_tokens=1, window=window, context=64)
    stages = Stages(scheduler, 8, 16, 1)
    scheduler.add(Request(1, (1,), 60))
    stages.send()
    stages.receive()
    scheduler.add(Request(2, tuple(range(20)), 2))
    order = [s for s, _, _ in drain(stages)]
    assert 2 in order and order.index(2) < 30


def test_a_cancelled_sequence_keeps_its_blocks_until_its_steps_return() -> None:
    scheduler = Scheduler(blocks=4, block_size=16, chunk_tokens=8, window=2, context=64)
    scheduler.add(Request(1, tuple(range(40)), 20))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert first and second and first.allocated and not second.allocated
    assert scheduler.cancel(1) and not scheduler.cancel(1)
    assert scheduler.complete(first.number, {}) == ()
    assert scheduler.next_step() is None and scheduler.blocks.used == 4
    scheduler.complete(second.number, {1: 3})
    last = scheduler.next_step()
    assert last is not None and last.freed == (1,) and not last.rows
    assert scheduler.blocks.used == 0
    scheduler.complete(last.number, {})
    assert scheduler.idle


def test_what_cannot_run_is_refused_in_numbers() -> None:
    scheduler = Scheduler(blocks=2, block_size=4, chunk_tokens=8, window=1, context=64, max_waiting=1)
    with pytest.raises(ContextExceeded) as error:
        scheduler.add(Request(1, tuple(range(9)), 1))
    assert error.value.details == {"prompt_tokens": 9, "context": 8}
    scheduler.add(Request(2, (1,), 1))
    with pytest.raises(Overloaded):
        scheduler.add(Request(3, (1,), 1))


@pytest.mark.parametrize("limit", [2, 5, 32])
def test_no_step_samples_more_rows_than_the_plan_has_memory_for(limit: int) -> None:
    scheduler = Scheduler(blocks=128, block_size=4, chunk_tokens=256, window=2, context=16, max_samples=limit)
    stages = Stages(scheduler, 128, 4, 256)
    for sequence in range(1, 81):
        scheduler.add(Request(sequence, (sequence % 97,), 4))
    ended = drain(stages)
    assert stages.most_rows == min(limit, 32)
    assert sum(1 for _, _, reason in ended if reason == "length") == 80
    assert scheduler.idle
