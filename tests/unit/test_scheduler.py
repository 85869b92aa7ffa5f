"""The scheduler against a model of the stages: nothing starves, leaks, overlaps or exceeds its budget."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from p2pshard_node.scheduling.scheduler import SHARED_CHUNK, Scheduler
from p2pshard_node.scheduling.step import Request, Step, StepRow

from p2pshard.errors import ContextExceeded, Overloaded


class Stages:
    """What the stages would hold, checked at every step.

    A sequence's tokens are a function of what stands in its blocks, so a block that is shared, freed or
    handed out by mistake gives another text than `solo`.
    """

    def __init__(self, scheduler: Scheduler, blocks: int, block_size: int, chunk: int) -> None:
        self.scheduler, self.total, self.block_size, self.chunk = scheduler, blocks, block_size, chunk
        self.blocks: dict[int, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.sampled: dict[int, dict[int, list[int]]] = {}
        self.flight: deque[Step] = deque()
        self.most_rows = 0
        self.most_flight = 0
        self.computed = 0

    @staticmethod
    def token(history: list[int]) -> int:
        """Text that repeats itself, with something else now and then."""
        if len(history) % 20 < 15:
            return (history[-1] + 1) % 6
        return (sum(history) * 31 + len(history)) % 97

    def send(self) -> bool:
        step = self.scheduler.next_step()
        if step is None:
            return False
        assert 0 <= step.tokens <= self.chunk
        assert step.rows or step.freed
        for sequence in step.freed:
            del self.blocks[sequence]
        for sequence, runs in step.shared:
            assert sequence not in self.blocks
            self.blocks[sequence] = list(_blocks(runs))
        assert len(dict(step.allocated)) == len(step.allocated)
        for sequence, runs in step.allocated:
            new = list(_blocks(runs))
            in_use = {b for blocks in self.blocks.values() for b in blocks}
            assert new and not in_use & set(new) and max(new) < self.total
            for block in new:
                for offset in range(self.block_size):
                    self.slots.pop((block, offset), None)
            self.blocks.setdefault(sequence, []).extend(new)
        self.sampled[step.number] = {row.sequence: self.compute(row) for row in step.rows}
        assert len(self.sampled[step.number]) == len(step.rows), "two rows of one sequence"
        samples = [(r.sequence, r.turn) for s in (*self.flight, step) for r in s.rows if r.sample]
        assert len(samples) == len(set(samples)), "two sampled rows of one sequence under way"
        self.flight.append(step)
        logits = sum(1 + r.drafted for r in step.rows if r.sample)
        assert logits <= self.scheduler._max_samples
        self.most_rows = max(self.most_rows, sum(r.sample for r in step.rows))
        self.most_flight = max(self.most_flight, len(self.flight))
        assert len(self.flight) <= self.scheduler.window
        return True

    def compute(self, row: StepRow) -> list[int]:
        assert row.token_ids and row.drafted < len(row.token_ids)
        blocks, end = self.blocks[row.sequence], row.start + len(row.token_ids)
        where = [(blocks[p // self.block_size], p % self.block_size) for p in range(end)]
        for slot, token in zip(where[row.start :], row.token_ids, strict=True):
            users = sum(slot[0] in others for others in self.blocks.values())
            assert users == 1, "written while another sequence reads it"
            self.slots[slot] = token
        self.computed += len(row.token_ids)
        history, found = [self.slots[slot] for slot in where], []
        for position in range(end - row.drafted, end + 1):
            found.append(self.token(history[:position]))
            if position < end and found[-1] != history[position]:
                break  # the rest of the draft is void
        return found

    def receive(self) -> list[tuple[int, int, str]]:
        step = self.flight.popleft()
        tokens = {r.sequence: self.sampled[step.number][r.sequence] for r in step.rows if r.sample}
        return [(a.sequence, a.token, a.finished) for a in self.scheduler.complete(step.number, tokens)]


def _blocks(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (b for first, count in runs for b in range(first, first + count))


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
    beginnings = [tuple(rng.randrange(97) for _ in range(30)) for _ in range(3)]
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
            prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 10)))
            prompt = rng.choice([(), *beginnings]) + prompt
            most = rng.randint(1, 40)
            given: tuple[int, ...] = ()
            eos = frozenset({rng.randrange(97)})
            if rng.random() < 0.3 and most > 3:  # carried on from another driver
                whole = solo(Request(sequence, prompt, most, (), eos), context)
                given = tuple(whole[: len(whole) // 2])
            requests[sequence] = Request(sequence, prompt, most, given, eos, rng.choice([0, 0, -1, 1, 5]))
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
    assert scheduler.blocks.used == 0 and not stages.blocks and not scheduler._filling
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


@pytest.mark.parametrize(
    ("window", "prompts", "expected"),
    [
        (1, [512], [256, 256]),  # one stage: nobody waits for a step to arrive
        (2, [512], [64] * 8),
        (2, [100], [64, 36]),
        (2, [1024], [128] * 4 + [64] * 8),
        (3, [768, 768], [128] * 6 + [64] * 12),  # what waits counts, and is read beside the rest
        (2, [4096], [256] * 10 + [192] * 3 + [128] * 4 + [64] * 7),
    ],
)
def test_a_prompt_is_read_in_steps_that_keep_all_stages_busy(
    window: int, prompts: list[int], expected: list[int]
) -> None:
    scheduler = Scheduler(blocks=512, block_size=16, chunk_tokens=256, window=window, context=8192)
    stages = Stages(scheduler, 512, 16, 256)
    for number, length in enumerate(prompts):
        # They begin unlike each other, so that none waits for what another computes.
        scheduler.add(Request(number, (number, *(i % 90 for i in range(length - 1))), 1))
    steps: list[int] = []
    while True:
        while stages.send():
            steps.append(stages.flight[-1].tokens)
        if not stages.flight:
            break
        stages.receive()
    assert [tokens for tokens in steps if tokens] == expected


@pytest.mark.parametrize("arrive_together", [True, False])
def test_eight_sequences_keep_two_stages_busy_in_two_groups_of_four(arrive_together: bool) -> None:
    scheduler = Scheduler(blocks=64, block_size=16, chunk_tokens=64, window=2, context=128)
    stages = Stages(scheduler, 64, 16, 64)
    sizes: list[tuple[int, ...]] = []
    for sequence in range(200):
        if sequence < 8:
            scheduler.add(Request(sequence, (sequence + 10, 2), 100))
        if sequence >= 7 or not arrive_together:
            while stages.send():
                pass
            sizes.append(tuple(len(step.rows) for step in stages.flight))
            if stages.flight:
                stages.receive()
    assert set(sizes[20:80]) == {(4, 4)}


@pytest.mark.parametrize(("sequences", "groups"), [(2, [2]), (3, [3]), (4, [2, 2]), (5, [2, 3])])
def test_a_second_group_opens_from_four_sequences_on(sequences: int, groups: list[int]) -> None:
    scheduler = Scheduler(blocks=64, block_size=4, chunk_tokens=32, window=2, context=100)
    stages = Stages(scheduler, 64, 4, 32)
    for number in range(1, sequences + 1):
        scheduler.add(Request(number, (number,), 40))
    sizes = []
    for _ in range(30):
        while stages.send():
            pass
        sizes.append(sorted(len(step.rows) for step in stages.flight))
        stages.receive()
    assert sizes[10:] == [groups] * 20


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


def test_a_cancelled_sequence_gives_its_blocks_back_in_the_next_step() -> None:
    scheduler = Scheduler(blocks=4, block_size=16, chunk_tokens=8, window=2, context=64)
    scheduler.add(Request(1, tuple(range(40)), 20))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert first and second and first.allocated and not second.allocated
    assert scheduler.cancel(1) and not scheduler.cancel(1)
    assert scheduler.complete(first.number, {}) == ()
    last = scheduler.next_step()
    assert last is not None and last.freed == (1,) and not last.rows
    assert scheduler.complete(second.number, {1: [3]}) == ()
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


# -- prefixes -------------------------------------------------------------------------------------
def prefixed(count: int, length: int = 1000, own: int = 10) -> list[Request]:
    begin = tuple((7 * i) % 97 for i in range(length))
    return [Request(n, begin + tuple((n * i + 1) % 97 for i in range(own)), 5) for n in range(1, count + 1)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("window", [1, 3])
def test_a_prefix_of_a_thousand_tokens_is_computed_once_for_thirty_two(together: bool, window: int) -> None:
    blocks = 32 * 64
    scheduler = Scheduler(blocks=blocks, block_size=16, chunk_tokens=128, window=window, context=1024)
    stages = Stages(scheduler, blocks, 16, 128)
    requests, outputs = prefixed(32), {}
    got = []
    if not together:
        scheduler.add(requests[0])
        got += drain(stages)
    for request in requests[0 if together else 1 :]:
        scheduler.add(request)
    got += drain(stages)
    for sequence, token, _ in got:
        outputs.setdefault(sequence, []).append(token)
    assert outputs == {r.sequence: solo(r, 1024) for r in requests}
    shared = 1000 // 16 * 16
    assert scheduler.counts.hit_tokens == 31 * shared
    assert stages.computed == 1000 + 32 * (10 + 4) + 31 * (1000 - shared)


def test_a_prompt_that_is_there_whole_has_its_last_block_computed() -> None:
    scheduler = Scheduler(blocks=16, block_size=4, chunk_tokens=64, window=1, context=64)
    stages = Stages(scheduler, 16, 4, 64)
    for sequence in (1, 2):
        scheduler.add(Request(sequence, (5, 6, 7, 8, 9, 10, 11, 12), 2))
        drain(stages)
    assert scheduler.counts.hit_tokens == 4


def test_an_answer_is_part_of_the_next_prompt() -> None:
    scheduler = Scheduler(blocks=64, block_size=4, chunk_tokens=64, window=2, context=200)
    stages = Stages(scheduler, 64, 4, 64)
    scheduler.add(Request(1, tuple(range(10)), 30))
    answer = tuple(token for _, token, _ in drain(stages))
    scheduler.add(Request(2, (*range(10), *answer, 1, 2), 2))
    drain(stages)
    assert scheduler.counts.hit_tokens == 36  # 39 positions were computed: nine blocks


def two_that_begin_alike_and_another(common: int) -> tuple[Scheduler, Stages]:
    """1 and 2 share their first tokens, 3 none."""
    scheduler = Scheduler(blocks=256, block_size=4, chunk_tokens=16, window=1, context=256)
    stages = Stages(scheduler, 256, 4, 16)
    begin = tuple(range(common))
    for request in (Request(1, (*begin, 1), 2), Request(2, (*begin, 2), 2), Request(3, (50, 60), 2)):
        scheduler.add(request)
    return scheduler, stages


def test_one_who_waits_for_a_prefix_holds_up_nobody_and_outlives_its_reader() -> None:
    scheduler, stages = two_that_begin_alike_and_another(96)
    order: list[int] = []
    for _ in range(3):
        stages.send()
        order += [s for s, _, _ in stages.receive()]
    scheduler.cancel(1)  # 48 of its tokens are there
    order += [s for s, _, _ in drain(stages)]
    assert scheduler.counts.hit_tokens >= 44 and order.count(2) == 2 and order.count(3) == 2


def test_who_shares_nothing_is_not_held_up_by_one_who_waits_for_a_prefix() -> None:
    _, stages = two_that_begin_alike_and_another(40)
    order = [sequence for sequence, _, _ in drain(stages)]
    assert order.index(3) < order.index(2), "it takes what room the last chunk of 1 leaves"


def test_many_who_wait_for_one_prefix_cost_little_in_each_step() -> None:
    scheduler = Scheduler(blocks=20_000, block_size=16, chunk_tokens=64, window=1, context=8192)
    stages = Stages(scheduler, 20_000, 16, 64)
    for request in prefixed(256, length=4000):
        scheduler.add(request)
    find, looked = scheduler.blocks.find, []
    scheduler.blocks.find = lambda keys: looked.append(1) or find(keys)  # type: ignore[method-assign,func-returns-value]
    for _ in range(4000 // 64):
        assert stages.send()
        stages.receive()
    assert len(looked) <= 256 + 10
    drain(stages)
    assert scheduler.counts.hit_tokens == 255 * 4000


def test_a_row_that_failed_leaves_nothing_to_be_found() -> None:
    scheduler = Scheduler(blocks=32, block_size=4, chunk_tokens=64, window=1, context=64)
    scheduler.add(Request(1, tuple(range(20)), 2))
    step = scheduler.next_step()
    assert step is not None
    scheduler.complete(step.number, {}, failed={1})
    assert scheduler.cancel(1) and scheduler.blocks.kept == 0
    scheduler.add(Request(2, tuple(range(20)), 2))
    step = scheduler.next_step()
    assert step is not None and not step.shared and step.tokens == 20


# -- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("total", [8, 9, 12, 20])
def test_when_blocks_run_out_the_youngest_is_computed_again(total: int) -> None:
    scheduler = Scheduler(blocks=total, block_size=4, chunk_tokens=16, window=2, context=32)
    stages = Stages(scheduler, total, 4, 16)
    requests = [Request(n, (n, n + 1, n + 2), 28) for n in range(1, 7)]
    for request in requests:
        scheduler.add(request)
    outputs: dict[int, list[int]] = {}
    ended = []
    for sequence, token, reason in drain(stages):
        outputs.setdefault(sequence, []).append(token)
        if reason:
            ended.append(sequence)
    assert outputs == {r.sequence: solo(r, 32) for r in requests}
    assert ended == sorted(ended), "the oldest first"
    # A sequence that lost its blocks comes back only with more room to grow: it does not happen often.
    assert scheduler.counts.preempted <= len(requests) * 3


def test_more_run_at_once_than_their_most_tokens_would_allow() -> None:
    scheduler = Scheduler(blocks=64, block_size=16, chunk_tokens=64, window=1, context=1024)
    stages = Stages(scheduler, 64, 16, 64)
    for sequence in range(1, 9):  # each may come to need all 64 blocks, and ends after a few tokens
        scheduler.add(Request(sequence, (sequence,) * 20, 1000, eos_ids=frozenset(range(6, 97))))
    drain(stages)
    assert stages.most_rows >= 5 and scheduler.counts.preempted == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancels, steps and returns, in a pool that is mostly too small."""

    CONTEXT = 24

    @initialize(
        window=st.integers(1, 3),
        size=st.sampled_from([1, 2, 4]),
        more=st.integers(0, 14),
        chunk=st.integers(1, 9),
    )
    def begin(self, window: int, size: int, more: int, chunk: int) -> None:
        total = -(-self.CONTEXT // size) + more
        self.scheduler = Scheduler(
            blocks=total, block_size=size, chunk_tokens=chunk, window=window, context=self.CONTEXT
        )
        self.stages = Stages(self.scheduler, total, size, chunk)
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.over: set[int] = set()

    @rule(
        common=st.sampled_from([0, 3, 8, 12]),
        own=st.integers(1, 4),
        most=st.integers(1, 20),
        draft=st.sampled_from([0, -1, 1, 4, 16]),
    )
    def arrive(self, common: int, own: int, most: int, draft: int) -> None:
        number = len(self.requests) + 1
        request = Request(
            number, tuple(range(common)) + (number % 97,) * own, most, eos_ids=frozenset({9, 40})
        )
        self.requests[number], self.outputs[number] = request, []
        self.scheduler.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.cancel(number) == (number not in self.over)
        self.over.add(number)

    @rule()
    def send(self) -> None:
        self.stages.send()

    @precondition(lambda self: self.stages.flight)
    @rule()
    def receive(self) -> None:
        for number, token, reason in self.stages.receive():
            assert number not in self.over
            self.outputs[number].append(token)
            if reason:
                self.over.add(number)
                assert self.outputs[number] == solo(self.requests[number], self.CONTEXT)

    @invariant()
    def given_tokens_never_change(self) -> None:
        for number, output in getattr(self, "outputs", {}).items():
            assert output == solo(self.requests[number], self.CONTEXT)[: len(output)]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            while self.stages.send():
                pass
            if not self.stages.flight:
                break
            self.receive()
        assert self.scheduler.idle and self.over == set(self.requests), "starved"
        assert self.scheduler.blocks.used == 0 and not self.stages.blocks and not self.scheduler._filling


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestAnyOrder = SchedulerMachine.TestCase


# -- time -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages_count", [1, 2, 3])
@pytest.mark.parametrize("decoding", [1, 4, 9])
def test_a_long_prompt_adds_the_time_of_one_chunk_to_a_token(stages_count: int, decoding: int) -> None:
    """Stages as a pipeline on a clock of their own: a token costs 1 a stage, a step 2 beside."""
    blocks = 4096
    scheduler = Scheduler(blocks=blocks, block_size=16, chunk_tokens=256, window=stages_count, context=8192)
    stages = Stages(scheduler, blocks, 16, 256)
    for sequence in range(1, decoding + 1):
        scheduler.add(Request(sequence, (sequence,), 400))
    free_at = [0.0] * stages_count
    returns: deque[float] = deque()
    now, last, gaps, asked = 0.0, {}, [], False
    while not scheduler.idle:
        while stages.send():
            at = now
            for stage in range(stages_count):
                at = max(at, free_at[stage]) + 2 + stages.flight[-1].tokens
                free_at[stage] = at
            returns.append(at)
        now = returns.popleft()
        for sequence, _, _ in stages.receive():
            if asked and sequence in last and sequence <= decoding:
                gaps.append(now - last[sequence])
            last[sequence] = now
        if not asked and now > 300:
            asked = True
            scheduler.add(Request(99, tuple(i % 97 for i in range(4000)), 2))
    assert len(gaps) > 100
    # A token's step holds one chunk at most, and takes the time of that through all stages. Only where the
    # prompt comes in may it also find chunks of the steps before it on the first stage, once.
    step = 2 + decoding + SHARED_CHUNK
    chunk_time = stages_count * step
    assert max(gaps) <= chunk_time + (stages_count - 1) * step
    assert sum(gap > chunk_time for gap in gaps) <= decoding


# -- drafts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("draft", "streams"), [(-1, 1), (-1, 2), (4, 1), (4, 6), (16, 1), (16, 6)])
def test_drafts_that_are_right_save_steps_and_change_no_token(draft: int, streams: int) -> None:
    steps = {}
    for length in (0, draft):
        scheduler = Scheduler(blocks=256, block_size=4, chunk_tokens=64, window=2, context=256)
        stages = Stages(scheduler, 256, 4, 64)
        requests = [Request(n, (n, 2, 3), 150, draft=length) for n in range(1, streams + 1)]
        for request in requests:
            scheduler.add(request)
        outputs: dict[int, list[int]] = {}
        for sequence, token, _ in drain(stages):
            outputs.setdefault(sequence, []).append(token)
        assert outputs == {r.sequence: solo(r, 256) for r in requests}
        steps[length] = scheduler._number
    assert scheduler.counts.accepted > 0
    assert steps[draft] < steps[0] * 0.8


def test_adaptive_drafts_are_for_few_sequences_at_once() -> None:
    for streams, expected in ((1, True), (3, True), (4, False), (12, False)):
        scheduler = Scheduler(blocks=512, block_size=4, chunk_tokens=64, window=1, context=128)
        stages = Stages(scheduler, 512, 4, 64)
        for sequence in range(streams):
            scheduler.add(Request(sequence, (1, 2, 3, 4, 5, 0, 1, 2, 3), 60, draft=-1))
        drain(stages)
        assert bool(scheduler.counts.drafted) == expected


def test_a_draft_takes_no_block_that_another_sequence_may_need() -> None:
    scheduler = Scheduler(blocks=9, block_size=2, chunk_tokens=64, window=1, context=18)
    stages = Stages(scheduler, 9, 2, 64)
    requests = [Request(n, (1, 2, 3), 15, draft=16) for n in (1, 2)]
    for request in requests:
        scheduler.add(request)
    outputs: dict[int, list[int]] = {}
    for sequence, token, _ in drain(stages):
        outputs.setdefault(sequence, []).append(token)
    assert outputs == {r.sequence: solo(r, 18) for r in requests}
