"""The gateway against a driver that speaks the real stream on a real port."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import pytest
from p2pshard_node.gateway.gateway import Gateway, Limits
from p2pshard_node.gateway.running import Running

from p2pshard.errors import (
    Cancelled,
    Conflict,
    ContextExceeded,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    P2PShardError,
    ProtocolError,
    StageLost,
)
from p2pshard.planning.plan import Plan
from p2pshard.transport.generated import generate_pb2
from tests.fake_driver import EOS, FakeCluster, FakeDriver, MemoryStore, letters, make_plan, spells
from tests.waiting import come_true


@dataclass
class Bench:
    gateway: Gateway
    driver: FakeDriver
    cluster: FakeCluster
    store: MemoryStore


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store = MemoryStore()
    driver = FakeDriver(make_plan(store.manifest.digest))
    await driver.start()
    cluster = FakeCluster(store, driver)
    gateway = Gateway(
        "node-c", store, cluster, limits=Limits(requests=8, unread_tokens=40, ready_s=0.3, recover_s=0.3)
    )
    yield Bench(gateway, driver, cluster, store)
    await gateway.close()
    await driver.kill()


def ask(text: str = "hi", **fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**{"model": "tiny", "prompt": text, "max_tokens": 5, **fields})  # type: ignore[arg-type]


@dataclass
class Answer:
    record: generate_pb2.ResumeRecord
    text: str
    ids: list[int]
    pieces: list[str]
    finish: generate_pb2.Finish


async def collect(gateway: Gateway, request: generate_pb2.GenerateRequest) -> Answer:
    async with aclosing(gateway.generate(request)) as stream:
        events = [event async for event in stream]
    deltas = [e.delta for e in events if e.HasField("delta")]
    index = 0
    for delta in deltas:
        assert delta.index == index
        index += len(delta.tokens)
    return Answer(
        events[0].resume,
        "".join(d.text for d in deltas),
        [t.id for d in deltas for t in d.tokens],
        [d.text for d in deltas],
        events[-1].finish,
    )


async def test_an_answer_from_record_to_finish(bench: Bench) -> None:
    answer = await collect(bench.gateway, ask("hi", sampling=generate_pb2.Sampling(temperature=0.5)))
    assert answer.text == "cdefg" and answer.ids == [*b"cdefg"]
    assert list(answer.record.prompt_ids) == [*b"hi"]
    assert answer.record.manifest == bench.store.manifest.digest
    assert Plan.from_json(json.loads(answer.record.plan_json)) == bench.driver.plan
    assert (answer.finish.reason, answer.finish.prompt_tokens, answer.finish.completion_tokens) == (
        "length",
        2,
        5,
    )
    assert answer.finish.ttft_ms > 0 and answer.finish.tokens_per_second > 0
    (submit,) = bench.driver.submits
    assert submit.request == answer.record.request and submit.attempt == 1
    assert list(submit.eos_ids) == [EOS] and submit.max_tokens == 5
    assert submit.sampling.seed == answer.record.seed
    assert bench.gateway.ps() == [] and bench.driver.cancelled == []


async def test_a_chat_is_rendered_once_and_the_clients_seed_is_kept(bench: Bench) -> None:
    chat = generate_pb2.Chat(messages=[generate_pb2.ChatMessage(role="user", content="hey")])
    answer = await collect(
        bench.gateway,
        ask(chat=chat, prompt=None, sampling=generate_pb2.Sampling(seed=7), has_seed=True),
    )
    rendered = [257, *b"user\nhey", 258, *b"\n", 257, *b"assistant\n"]
    assert list(answer.record.prompt_ids) == rendered == list(bench.driver.submits[0].prompt_ids)
    assert answer.record.seed == 7 and bench.driver.submits[0].sampling.seed == 7


async def test_eos_ends_the_text_and_is_the_last_token(bench: Bench) -> None:
    bench.driver.next_token = spells("Paris")
    answer = await collect(bench.gateway, ask(max_tokens=50))
    assert (answer.text, answer.ids[-1], answer.finish.reason) == ("Paris", EOS, "stop")
    ignoring = await collect(bench.gateway, ask(max_tokens=8, ignore_eos=True))
    assert (ignoring.text, ignoring.finish.reason, ignoring.finish.completion_tokens) == (
        "Paris",
        "length",
        8,
    )
    assert list(bench.driver.submits[1].eos_ids) == []


async def test_a_draft_reaches_the_driver_and_an_impossible_one_nobody(bench: Bench) -> None:
    await collect(bench.gateway, ask(draft=-1))
    assert bench.driver.submits[0].draft == -1
    with pytest.raises(InvalidRequest, match="speculation"):
        await collect(bench.gateway, ask(draft=17))
    assert len(bench.driver.submits) == 1


async def test_a_stop_string_over_token_borders_ends_the_request_on_the_driver_too(bench: Bench) -> None:
    bench.driver.next_token, bench.driver.delay_s = spells("one two STOP three" * 9), 0.001
    answer = await collect(bench.gateway, ask(max_tokens=100, stop=["STOP", "never"]))
    assert (answer.text, answer.finish.reason, answer.finish.stop_string) == ("one two ", "stop", "STOP")
    assert answer.finish.completion_tokens == len("one two STOP") == len(answer.ids)
    await come_true(lambda: bench.driver.cancelled == [answer.record.request] and not bench.driver.running)


async def test_tokens_after_a_stop_string_in_the_same_message_are_not_taken(bench: Bench) -> None:
    bench.driver.next_token, bench.driver.batch = spells("one STOP three"), 64
    answer = await collect(bench.gateway, ask(max_tokens=100, stop=["STOP"]))
    assert bytes(answer.ids) == b"one STOP" and answer.text == "one "


async def test_characters_are_never_broken(bench: Bench) -> None:
    bench.driver.next_token = spells("a😀é世")
    answer = await collect(bench.gateway, ask(max_tokens=50))
    assert answer.text == "a😀é世" and not any("\ufffd" in piece for piece in answer.pieces)
    cut = await collect(bench.gateway, ask(max_tokens=3))
    assert cut.text == "a\ufffd" and cut.finish.reason == "length"


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(bench: Bench) -> None:
    with pytest.raises(ContextExceeded, match=r"130 tokens .* 128") as caught:
        await collect(bench.gateway, ask("x" * 130))
    assert caught.value.details == {"prompt_tokens": 130, "context": 128}
    with pytest.raises(ContextExceeded):
        await collect(bench.gateway, ask("x" * 128))  # no room for one token
    assert bench.driver.submits == []
    full = await collect(bench.gateway, ask("x" * 127, max_tokens=50))
    assert (full.finish.reason, full.finish.completion_tokens) == ("length", 1)


async def test_max_tokens_by_default_is_what_the_context_has_left(bench: Bench) -> None:
    answer = await collect(bench.gateway, ask("x" * 100, max_tokens=0))
    assert answer.record.max_tokens == 28 == answer.finish.completion_tokens


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model": ""}, InvalidRequest, "no model"),
        (
            {"model": "other"},
            ModelNotFound,
            r"'other' is not deployed \(deployed: tiny\); if a node has it: p2pshard deploy other",
        ),
        ({"prompt": None}, InvalidRequest, "no prompt"),
        ({"prompt": ""}, InvalidRequest, "empty"),
        ({"prompt": None, "prompt_ids": generate_pb2.TokenIds(ids=[1, 259])}, InvalidRequest, "has 259"),
        ({"stop": [""]}, InvalidRequest, "stop string"),
        ({"stop": ["x"] * 17}, InvalidRequest, "17 stop strings"),
        ({"deadline_s": float("nan")}, InvalidRequest, "deadline_s"),
        ({"sampling": generate_pb2.Sampling(temperature=-1)}, InvalidRequest, "temperature"),
    ],
)
async def test_what_is_wrong_is_said_before_the_first_event(
    bench: Bench, fields: dict[str, object], error: type[P2PShardError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await collect(bench.gateway, ask(**fields))
    assert bench.driver.submits == [] and bench.gateway.ps() == []


async def test_a_model_without_a_template_says_so(bench: Bench) -> None:
    store = MemoryStore(template="")
    bench.cluster.store, bench.gateway._store = store, store
    await bench.driver.kill()
    bench.driver.plan = make_plan(store.manifest.digest)
    await bench.driver.start()
    with pytest.raises(InvalidRequest, match="no chat template"):
        await collect(bench.gateway, ask(prompt=None, chat=generate_pb2.Chat(messages=[])))


async def test_a_deployment_that_loads_is_waited_for(bench: Bench) -> None:
    bench.cluster.state = "loading"
    task = asyncio.create_task(collect(bench.gateway, ask()))
    await asyncio.sleep(0.05)
    assert [r["state"] for r in bench.gateway.ps()] == ["waiting"]
    bench.cluster.ready.set()
    assert (await task).text == "cdefg"


async def test_but_not_for_ever_and_a_refused_one_not_at_all(bench: Bench) -> None:
    bench.cluster.state, bench.cluster.reason = "loading", "node-b loads"
    with pytest.raises(NotReady, match="loading"):
        await collect(bench.gateway, ask())
    bench.cluster.state, bench.cluster.reason = "refused", "does not fit"
    with pytest.raises(NotReady, match="does not fit"):
        await collect(bench.gateway, ask())


async def test_requests_share_one_stream_and_do_not_mix(bench: Bench) -> None:
    bench.driver.delay_s = 0.002
    answers = await asyncio.gather(
        *(collect(bench.gateway, ask("x" * n, max_tokens=20)) for n in range(1, 9))
    )
    for n, answer in enumerate(answers, 1):
        assert answer.ids == [letters("x" * n, i) for i in range(20)]  # type: ignore[arg-type]
    assert bench.driver.streams == 1


async def test_leaving_early_cancels_on_the_driver(bench: Bench) -> None:
    bench.driver.delay_s = 0.005
    stream = bench.gateway.generate(ask(max_tokens=100))
    record = (await anext(stream)).resume
    await anext(stream)
    assert [r["state"] for r in bench.gateway.ps()] == ["running"]
    await stream.aclose()
    assert bench.gateway.ps() == []
    await come_true(lambda: bench.driver.cancelled == [record.request] and not bench.driver.running)
    outcome = bench.gateway.outcome(record.request)
    assert outcome is not None and outcome.reason == "cancelled"


async def test_cancel_by_id_finishes_the_stream(bench: Bench) -> None:
    bench.driver.delay_s = 0.005
    reasons = []
    async for event in bench.gateway.generate(ask(max_tokens=100)):
        if event.HasField("resume"):
            request = event.resume.request
        elif event.HasField("delta"):
            bench.gateway.cancel(request)
        else:
            reasons.append(event.finish.reason)
    assert reasons == ["cancelled"] and not bench.gateway.cancel(request)
    await come_true(lambda: bench.driver.cancelled == [request])


async def test_cancel_while_waiting_ends_the_wait(bench: Bench) -> None:
    bench.gateway._limits = Limits(ready_s=30)
    bench.cluster.state = "loading"
    task = asyncio.create_task(collect(bench.gateway, ask()))
    await come_true(lambda: bench.gateway.ps())
    assert bench.gateway.cancel(str(bench.gateway.ps()[0]["id"]))
    with pytest.raises(Cancelled):
        await asyncio.wait_for(task, 1)


async def test_the_deadline_ends_a_request_wherever_it_is(bench: Bench) -> None:
    bench.driver.delay_s = 0.02
    answer = await collect(bench.gateway, ask(max_tokens=100, deadline_s=0.3))
    assert answer.finish.reason == "deadline" and 0 < answer.finish.completion_tokens < 100
    await come_true(lambda: not bench.driver.running)
    bench.gateway._limits = Limits(ready_s=30)
    bench.cluster.state = "loading"
    with pytest.raises(DeadlineExceeded):
        await collect(bench.gateway, ask(deadline_s=0.1))


async def test_a_client_that_does_not_read_is_cancelled_and_holds_up_nobody(bench: Bench) -> None:
    bench.driver.delay_s = 0.001
    lazy = bench.gateway.generate(ask(max_tokens=100))
    await anext(lazy)
    other = await collect(bench.gateway, ask("xyz", max_tokens=60))
    assert other.finish.completion_tokens == 60
    await come_true(lambda: len(bench.driver.cancelled) == 1)
    with pytest.raises(Overloaded, match="unread"):
        async for _ in lazy:
            pass


async def test_nor_does_one_that_leaves_a_finished_answer_unread(bench: Bench) -> None:
    bench.gateway._limits = Limits(unread_s=0.2)
    lazy = bench.gateway.generate(ask(max_tokens=5))
    await anext(lazy)
    assert len(bench.gateway._table) == 1
    await come_true(lambda: len(bench.gateway._table) == 0, 3)
    await lazy.aclose()


async def test_at_the_limit_of_requests_the_next_is_refused(bench: Bench) -> None:
    bench.driver.delay_s = 1
    tasks = [asyncio.create_task(collect(bench.gateway, ask())) for _ in range(8)]
    await come_true(lambda: len(bench.gateway.ps()) == 8)
    with pytest.raises(Overloaded, match="8 requests"):
        await collect(bench.gateway, ask())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.gateway.ps() == []


async def test_a_stage_lost_behind_the_driver_keeps_its_name(bench: Bench) -> None:
    bench.driver.fail_at = 3
    with pytest.raises(StageLost, match="layers 2-3") as caught:
        await collect(bench.gateway, ask())
    assert caught.value.details == {"node": "node-b", "layers": [2, 3]}


async def test_the_loss_of_the_driver_names_its_layers_and_the_next_request_reconnects(bench: Bench) -> None:
    bench.driver.delay_s = 0.01
    tasks = [asyncio.create_task(collect(bench.gateway, ask(max_tokens=100))) for _ in range(3)]
    await come_true(lambda: len(bench.driver.running) == 3)
    started = time.monotonic()
    await bench.driver.kill()
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(failure, StageLost) and "layers 0-1" in failure.message
        assert failure.details == {"node": "node-a", "layers": [0, 1]}
    assert time.monotonic() - started < 2
    with pytest.raises(StageLost, match="layers 0-1"):  # nobody listens
        await collect(bench.gateway, ask())
    await bench.driver.start()
    assert (await collect(bench.gateway, ask())).text == "cdefg"


async def test_a_driver_that_accepts_and_stays_silent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pshard_node.gateway.driver_link._OPEN_TIMEOUT_S", 0.3)
    bench.driver.silent = True
    with pytest.raises(StageLost, match=r"did not answer within 0.3 s"):
        await collect(bench.gateway, ask())


async def test_a_node_that_left_the_cluster_takes_its_requests_with_it(bench: Bench) -> None:
    bench.driver.delay_s = 0.05
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=100)))
    await come_true(lambda: bench.driver.running)
    bench.cluster.gone.add("node-a")
    with pytest.raises(StageLost, match="has left the cluster"):
        await asyncio.wait_for(task, 3)
    await come_true(lambda: not bench.driver.running)  # the stream was closed


async def test_a_new_epoch_gets_a_new_stream_and_the_old_one_is_closed(bench: Bench) -> None:
    assert (await collect(bench.gateway, ask())).text == "cdefg"
    bench.driver.plan = make_plan(bench.store.manifest.digest, n=2)
    assert (await collect(bench.gateway, ask())).text == "cdefg"
    assert bench.driver.streams == 2
    await come_true(lambda: bench.gateway.streams == 1, 3)


async def test_lost_tokens_end_the_request(bench: Bench) -> None:
    bench.driver.skip_at = 2
    with pytest.raises(ProtocolError, match="token 3 came where 2 was due"):
        await collect(bench.gateway, ask())


async def test_an_error_in_the_text_of_one_request_ends_that_one_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Running.take

    def take(self: Running, news: generate_pb2.News) -> None:
        if self.prompt_ids == [*b"bad"]:
            raise IndexError("of a decoder nobody knows")
        plain(self, news)

    monkeypatch.setattr(Running, "take", take)
    async with asyncio.timeout(10):
        with pytest.raises(Internal, match="of a decoder nobody knows"):
            await collect(bench.gateway, ask("bad"))
        assert (await collect(bench.gateway, ask("hi"))).text == "cdefg"
    assert bench.gateway.ps() == []


async def test_logprobs_come_with_their_tokens(bench: Bench) -> None:
    stream = bench.gateway.generate(ask(sampling=generate_pb2.Sampling(logprobs=2)))
    tokens = [t async for e in stream for t in e.delta.tokens]
    assert [t.logprob for t in tokens] == [-0.5] * 5
    assert [len(t.top) for t in tokens] == [2] * 5


async def test_a_thousand_requests_cancelled_at_any_moment_leave_nothing(bench: Bench) -> None:
    bench.gateway._limits = Limits()
    bench.driver.delay_s = 0.001

    async def one(number: int) -> None:
        stream = bench.gateway.generate(ask(max_tokens=1 + number % 7))
        try:
            async with asyncio.timeout((number % 13) / 1000):
                async for _ in stream:
                    pass
        except (TimeoutError, Overloaded):
            pass
        finally:
            await stream.aclose()

    for start in range(0, 1000, 8):
        await asyncio.gather(*(one(n) for n in range(start, start + 8)))
    assert bench.gateway.ps() == [] and len(bench.gateway._table) == 0
    await come_true(lambda: not bench.driver.running)
    assert (await collect(bench.gateway, ask())).text == "cdefg"


async def test_close_ends_what_runs_with_a_reason(bench: Bench) -> None:
    bench.driver.delay_s = 0.05
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=100)))
    await come_true(lambda: bench.driver.running)
    await bench.gateway.close()
    with pytest.raises(NotReady, match="stopping"):
        await task
    await come_true(lambda: not bench.driver.running)
    with pytest.raises(NotReady, match="stopping"):
        await collect(bench.gateway, ask())


async def test_a_driver_whose_epoch_ends_names_its_layers(bench: Bench) -> None:
    bench.driver.delay_s, bench.driver.failure = 0.001, Conflict("epoch 1 is over")
    bench.driver.fail_at = 3
    with pytest.raises(StageLost, match=r"layers 0-1.*epoch 1 is over"):
        await collect(bench.gateway, ask())
