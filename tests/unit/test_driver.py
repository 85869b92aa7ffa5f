"""The driver over stages that compute something small and certain, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from p2pshard_node.engine.sampling import Draw, Sampled
from p2pshard_node.engine.stage import StepBatch
from p2pshard_node.worker import outbox
from p2pshard_node.worker.driver import Driver
from p2pshard_node.worker.executor import StageExecutor
from p2pshard_node.worker.outbox import MAX_UNSENT, Outbox
from p2pshard_node.worker.pace import Pace

from p2pshard.errors import ProtocolError, StageLost
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.channels import EOF
from p2pshard.transport.frames import Assembler, Frame, Limits, encode
from p2pshard.transport.generated import generate_pb2, plan_pb2
from tests.waiting import come_true

VOCAB = 97
POISON = 90
"""A token that the second stage cannot compute; it is never sampled."""


def make_plan(blocks: int = 32) -> Plan:
    stages = (Stage((0, 1), True, False, (Rank("a"),)), Stage((2, 3), False, True, (Rank("b"),)))
    return Plan((Replica(stages),), Epoch(1, "a"), "tolerant", "m", "toy", "float32", 64, 2, 4, blocks, 8, 4)


class Adder:
    """Stage with memory: hidden is (token, running sum of the sequence's tokens, kept in its blocks)."""

    def __init__(self, head: bool) -> None:
        self.head = head
        self.slots: dict[tuple[int, int], float] = {}

    def forward(self, batch: StepBatch, hidden_TD: np.ndarray | None) -> np.ndarray:
        tokens = batch.token_ids if hidden_TD is None else hidden_TD[:, 0]
        out, first = [], 0
        for row in batch.rows:
            for i in range(row.length):
                at = row.start + i
                self.slots[row.blocks[at // 4], at % 4] = float(tokens[first + i])
                if self.head and tokens[first + i] == POISON:
                    raise RuntimeError("poison")
            total = sum(self.slots[row.blocks[p // 4], p % 4] for p in range(row.start + row.length))
            if not self.head:
                out += [(float(t), 0.0) for t in tokens[first : first + row.length]]
            elif row.output != "none":
                for end in range(1 if row.output == "verify" else row.length, row.length + 1):
                    total = sum(self.slots[row.blocks[p // 4], p % 4] for p in range(row.start + end))
                    out.append(np.eye(VOCAB, dtype=np.float32)[int(total) % POISON])
            first += row.length
        return np.array(out, np.float32).reshape(len(out), VOCAB if self.head else 2)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        raise AssertionError("nothing is copied here")


def greedy(logits_RV: np.ndarray, draws: Sequence[Draw]) -> list[Sampled]:
    assert all(d.index >= 0 for d in draws)
    for draw in draws:
        if draw.params.penalised:
            assert draw.index == len(draw.output_ids) and len(draw.prompt_ids)
    return [Sampled(int(i), 0.0, ()) for i in logits_RV.argmax(axis=1)]


def reference(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(sum(ids) % POISON)
    return ids[len(prompt) :]


class Call:
    """A gateway's end of the stream."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.commands: asyncio.Queue[Any] = asyncio.Queue()
        self.events: list[generate_pb2.DriverEvent] = []
        self.changed = asyncio.Event()
        self.aborted: tuple[Any, str] | None = None
        self.deaf = False

    async def read(self) -> Any:
        return await self.commands.get()

    async def write(self, data: bytes) -> None:
        if self.deaf:
            await asyncio.Event().wait()
        self.events.append(generate_pb2.DriverEvent.FromString(data))
        self.changed.set()

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        self.aborted = (code, details)
        raise ConnectionAbortedError

    def say(self, **command: Any) -> None:
        self.commands.put_nowait(generate_pb2.DriverCommand(**command).SerializeToString())

    def submit(self, name: str, prompt: list[int], most: int, attempt: int = 1, **more: Any) -> None:
        submit = generate_pb2.Submit(
            request=name, attempt=attempt, prompt_ids=prompt, max_tokens=most, **more
        )
        self.say(submit=submit)

    def hello(self, digest: str = "") -> None:
        epoch = plan_pb2.Epoch(n=1, proposer="a")
        plan = digest or self.plan.digest()
        self.say(hello=generate_pb2.DriverHello(epoch=epoch, plan_digest=plan, deployment="d", gateway="g"))

    def news(self, name: str) -> list[generate_pb2.News]:
        return [p for e in self.events for p in e.batch.news if p.request == name]

    async def end(self, name: str) -> Any:
        async with asyncio.timeout(5):
            while True:
                for news in self.news(name):
                    if end := news.WhichOneof("end"):
                        return getattr(news, end)
                self.changed.clear()
                await self.changed.wait()

    def tokens(self, name: str) -> list[int]:
        return [t.id for p in self.news(name) for t in p.tokens]


class Toy:
    """Driver and two stages; every frame also passes through its wire form."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages = [StageExecutor(Adder(head), plan, i, greedy) for i, head in enumerate((False, True))]
        self.driver = Driver(plan, "d", window=2, vocab_size=VOCAB, submit_step=self._submit)
        self.limits = Limits.of(plan, hidden_size=2, vocab_size=VOCAB)
        self.steps = 0
        self.held: list[Frame] | None = None

    def _submit(self, frame: Frame) -> None:
        self.steps += 1
        if self.held is not None:
            self.held.append(frame)
        else:
            asyncio.get_running_loop().call_later(0.001, self._pass, frame)

    def _pass(self, frame: Frame) -> None:
        for stage in self.stages:
            frame = self._wire(stage.run(frame, 0))
        self.driver.on_tokens(frame)

    def _wire(self, frame: Frame) -> Frame:
        assembler, got = Assembler(self.limits, epoch=self.plan.epoch), None
        for message in encode(frame, chunk_bytes=100):
            got = assembler.feed(message)
        assert got is not None
        return got

    @contextlib.asynccontextmanager
    async def gateway(self, **hello: Any) -> AsyncIterator[Call]:
        call = Call(self.plan)
        call.hello(**hello)
        task = asyncio.create_task(self.driver.serve(call))
        try:
            yield call
        finally:
            call.commands.put_nowait(EOF)
            await asyncio.gather(task, return_exceptions=True)

    async def idle(self) -> None:
        await come_true(lambda: not any(s.blocks_used or s.sequences for s in self.stages))


@pytest.fixture
async def toy() -> Toy:
    toy = Toy(make_plan())
    await toy.driver.probe()
    return toy


async def test_tokens_of_many_requests(toy: Toy) -> None:
    prompts = {f"r{i}": [i + 1, 2 * i, 5] + [1] * (3 * i) for i in range(7)}
    async with toy.gateway() as call:
        for name, prompt in prompts.items():
            call.submit(name, prompt, 9)
        for name, prompt in prompts.items():
            assert await call.end(name) == "length"
            assert call.tokens(name) == reference(prompt, 9)
    await toy.idle()


async def test_a_prefix_is_computed_once_and_history_comes_with_its_blocks(toy: Toy) -> None:
    begin = [(5 * i) % 80 for i in range(40)]
    prompts = {f"r{i}": [*begin, i, 7] for i in range(6)}
    async with toy.gateway() as call:
        for name, prompt in prompts.items():
            # With a penalty the last stage needs the ids of positions that never came by for this sequence.
            call.submit(name, prompt, 9, sampling=generate_pb2.Sampling(presence_penalty=1e-9))
        for name, prompt in prompts.items():
            assert await call.end(name) == "length"
            assert call.tokens(name) == reference(prompt, 9)
        stats = toy.driver.stats()
        assert stats["hit_tokens"] == 5 * 40 and stats["admitted_tokens"] == 6 * 42 + 1
        assert stats["blocks_kept"] >= 10
    await toy.idle()


async def test_a_pool_that_is_too_small_preempts_and_changes_no_token() -> None:
    toy = Toy(make_plan(blocks=18))  # one context of 64 tokens and two blocks more
    await toy.driver.probe()
    prompts = {f"r{i}": [i + 1, 3, 5] for i in range(6)}
    async with toy.gateway() as call:
        for name, prompt in prompts.items():
            call.submit(name, prompt, 50)
        for name, prompt in prompts.items():
            assert await call.end(name) == "length"
            assert call.tokens(name) == reference(prompt, 50)
        assert 0 < toy.driver.stats()["preempted"] <= 18
    await toy.idle()


@pytest.mark.parametrize("penalty", [0.0, 1e-9])
async def test_drafts_change_no_token(toy: Toy, penalty: float) -> None:
    prompts = {f"r{i}": [0, 0, 0, 45, 0, 0, 0, 45, 0, 0, 0][: 5 + i] for i in range(6)}
    async with toy.gateway() as call:
        for i, (name, prompt) in enumerate(prompts.items()):
            sampling = generate_pb2.Sampling(presence_penalty=penalty)
            call.submit(name, prompt, 40, draft=(-1, 1, 4)[i % 3], sampling=sampling)
        for name, prompt in prompts.items():
            assert await call.end(name) == "length"
            assert call.tokens(name) == reference(prompt, 40)
        for draft in (-2, 17):
            call.submit(f"bad{draft}", [1], 2, draft=draft)
            assert (await call.end(f"bad{draft}")).code == "invalid_request"
    stats = toy.driver.stats()
    assert 0 < stats["accepted"] < stats["drafted"]
    await toy.idle()


async def test_only_the_request_that_cannot_be_computed_fails(toy: Toy) -> None:
    async with toy.gateway() as call:
        call.submit("good", [1, 2], 12)
        call.submit("bad", [3, POISON, 4], 12)
        call.submit("other", [4], 12)
        error = await call.end("bad")
        assert error.code == "internal" and "stage 1 (node b" in error.message and "poison" in error.message
        assert json.loads(error.details_json)["layers"] == [2, 3]
        for name, prompt in (("good", [1, 2]), ("other", [4])):
            assert await call.end(name) == "length"
            assert call.tokens(name) == reference(prompt, 12)
        call.submit("after", [1, 2], 3)
        assert await call.end("after") == "length"
    await toy.idle()


async def test_attempts_cancel_deadline_and_refusals(toy: Toy) -> None:
    async with toy.gateway() as call:
        call.submit("a", [1], 50, attempt=2)
        call.submit("a", [1], 50, attempt=1)
        assert (await call.end("a")).code == "conflict"  # the lower attempt; the higher one goes on
        call.say(cancel=generate_pb2.CancelRequest(request="a", attempt=2))
        call.submit("late", [1], 60, deadline_s=0.005)
        assert await call.end("late") == "deadline"
        for name, prompt, most, code in (
            ("long", [1] * 64, 1, "context_length_exceeded"),
            ("empty", [], 1, "invalid_request"),
            ("none", [1], 0, "invalid_request"),
            ("outside", [VOCAB], 1, "invalid_request"),
        ):
            call.submit(name, prompt, most)
            assert (await call.end(name)).code == code
        call.submit("over", [1], 3, output_ids=[1, 2, 4])
        assert await call.end("over") == "length" and call.tokens("over") == []
    await toy.idle()


async def test_a_gateway_that_is_gone_takes_its_requests_along(toy: Toy) -> None:
    async with toy.gateway() as call:
        call.submit("a", [1], 60)
        await come_true(lambda: bool(call.tokens("a")))
    assert toy.driver.sequences == 0
    await toy.idle()


async def test_a_gateway_that_reads_nothing_is_given_up_with_its_requests(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNSENT", 20)
    async with toy.gateway() as deaf, toy.gateway() as call:
        call.submit("b", [2], 50)
        await come_true(lambda: bool(call.tokens("b")))
        deaf.deaf = True
        deaf.submit("a", [1], 60)
        assert await call.end("b") == "length"
        await come_true(lambda: deaf.aborted is not None)
        assert deaf.aborted is not None and "does not read" in deaf.aborted[1]
        assert toy.driver.sequences == 0
        await toy.idle()


async def test_a_stream_that_is_torn_away_ends_without_a_sound(toy: Toy) -> None:
    """gRPC cancels the read of a stream whose server stops; nobody cancelled the handler."""

    async def gone() -> bytes:
        raise asyncio.CancelledError

    call = Call(toy.plan)
    call.hello()
    serving = asyncio.create_task(toy.driver.serve(call))
    call.submit("a", [1, 2], 60)
    await come_true(lambda: bool(call.tokens("a")))
    call.read = gone  # type: ignore[method-assign]
    call.submit("b", [1], 5)
    async with asyncio.timeout(5):
        await serving
    assert call.aborted is None and toy.driver.sequences == 0
    await toy.idle()


async def test_a_step_that_comes_back_without_a_token_it_was_to_give_is_refused(toy: Toy) -> None:
    async with toy.gateway() as call:
        toy.held = []
        call.submit("a", [1, 2], 5)
        await come_true(lambda: bool(toy.held))
        step = toy.held[0]
        with pytest.raises(ProtocolError, match="no token"):
            toy.driver.on_tokens(Frame("tokens", step.epoch, step.step))


async def test_a_lost_stage_fails_everything_with_its_name(toy: Toy) -> None:
    async with toy.gateway() as call:
        toy.held = []
        call.submit("a", [1], 60)
        await come_true(lambda: bool(toy.held))
        step, _, allowed = toy.driver.late() or (0, 0.0, 0.0)
        assert step and allowed >= 2
        toy.driver.break_off(StageLost("stage 1 is gone", node="b", layers=[2, 3]))
        error = await call.end("a")
        assert error.code == "stage_lost" and json.loads(error.details_json) == {
            "node": "b",
            "layers": [2, 3],
        }
        call.submit("b", [1], 2)
        assert (await call.end("b")).code == "stage_lost"


async def test_a_hello_of_another_plan_is_refused(toy: Toy) -> None:
    async with toy.gateway(digest="other") as call:
        await asyncio.sleep(0.02)
    assert call.aborted is not None and "another plan" in call.aborted[1]


async def test_what_a_step_has_for_a_gateway_is_one_message(toy: Toy) -> None:
    async with toy.gateway() as call:
        for i in range(4):
            call.submit(f"r{i}", [i + 1, 5], 9)
        for i in range(4):
            await call.end(f"r{i}")
        batches = [e.batch.news for e in call.events if e.HasField("batch")]
        # Four requests of nine tokens each: a message for each step, in which tokens and ends come together.
        assert len(batches) <= toy.steps and max(len(b) for b in batches) == 4
        assert all(len({p.request for p in b}) == len(b) for b in batches)
        last = call.news("r0")[-1]
        assert last.finished == "length" and last.tokens and call.news("r0")[0].started


async def read(box: Outbox) -> list[generate_pb2.News]:
    return list(generate_pb2.DriverEvent.FromString(await box.get() or b"").batch.news)


async def test_an_outbox_joins_what_is_unsent_in_messages_of_bounded_size() -> None:
    box = Outbox()
    box.started("a", 1)
    for index in range(5000):
        box.token("a", 1, index, generate_pb2.Token(id=index))
    box.token("b", 1, 7, generate_pb2.Token(id=3))
    box.finished("a", 1, "stop")
    box.token("a", 2, 0, generate_pb2.Token(id=9))  # another attempt: never mixed with the first
    first, second = await read(box), await read(box)
    assert sum(len(p.tokens) for p in first) == 4096 and first[0].started
    whole = [p for p in (*first, *second) if p.request == "a" and p.attempt == 1]
    assert [t.id for p in whole for t in p.tokens] == list(range(5000))
    at = 0
    for news in whole:
        assert news.index == at
        at += len(news.tokens)
    assert whole[-1].finished == "stop"
    others = [(p.request, p.attempt, p.index) for p in second if p not in whole]
    assert others == [("b", 1, 7), ("a", 2, 0)]
    box.token("b", 1, 8, generate_pb2.Token(id=4))  # what is on its way is not added to
    assert [p.index for p in await read(box)] == [8]


async def test_an_outbox_gives_a_deaf_gateway_up_and_not_one_that_reads() -> None:
    box = Outbox()
    for _ in range(3):
        for i in range(MAX_UNSENT // 2):
            box.started(str(i % 9), 1 + i // 9)
        while box._unsent:
            assert await read(box)
    for i in range(MAX_UNSENT + 1):
        box.token("a", 1, i, generate_pb2.Token(id=1))
    async with asyncio.timeout(1):
        await box.overflow()


def test_pace_scales_and_forgets() -> None:
    pace = Pace()
    assert pace.allowance(1) == 30.0
    pace.observe(1, 0.5)
    assert pace.allowance(1) == 2.5
    assert pace.predict(8) == pytest.approx(4.0)
    for _ in range(400):
        pace.observe(1, 0.01)
    assert pace.allowance(1) == 2.0
