"""A request outlives its driver: the next one is given its log, and the client sees the text it would have had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from p2pshard_node.gateway.gateway import Gateway, Limits
from p2pshard_node.gateway.running import MAX_FUTILE

from p2pshard.errors import ContextExceeded, DoesNotFit, Internal, NotReady, Overloaded, StageLost
from p2pshard.transport.generated import generate_pb2
from tests.fake_driver import FakeCluster, FakeDriver, MemoryStore, make_plan, spells
from tests.unit.test_gateway import Bench, ask, collect
from tests.waiting import come_true


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store = MemoryStore()
    driver = FakeDriver(make_plan(store.manifest.digest), delay_s=0.005)
    await driver.start()
    cluster = FakeCluster(store, driver)
    gateway = Gateway("node-c", store, cluster, limits=Limits(requests=8, ready_s=5, mend_s=0.3, recover_s=5))
    yield Bench(gateway, driver, cluster, store)
    await gateway.close()
    await driver.kill()


async def lose(bench: Bench, **next_plan: int) -> None:
    """The driver's process is gone; the cluster knows of it, and plans."""
    await bench.driver.kill()
    bench.cluster.state, bench.cluster.reason = "broken", "layers 0-1 on node node-a are gone"
    bench.driver.plan = make_plan(
        bench.store.manifest.digest, **{"n": bench.driver.plan.epoch.n + 1, **next_plan}
    )


async def replace(bench: Bench) -> None:
    await bench.driver.start()
    bench.cluster.state = "ready"


async def given(bench: Bench, count: int) -> None:
    await come_true(lambda: bench.gateway.ps() and bench.gateway.ps()[0]["completion_tokens"] >= count)


async def test_a_request_goes_on_at_the_next_epoch_with_its_log(bench: Bench) -> None:
    sampling = generate_pb2.Sampling(temperature=0.9, presence_penalty=0.5, logprobs=2)
    whole = await collect(bench.gateway, ask(max_tokens=60, sampling=sampling))
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60, sampling=sampling)))
    await given(bench, 20)
    await lose(bench)
    await asyncio.sleep(0.1)
    assert bench.gateway.ps()[0]["state"] == "waiting"
    await replace(bench)
    answer = await asyncio.wait_for(task, 5)
    assert (answer.text, answer.ids, answer.finish.reason) == (whole.text, whole.ids, "length")
    before, after = bench.driver.submits[-2:]
    assert (after.request, after.attempt) == (before.request, before.attempt + 1)
    assert after.prompt_ids == before.prompt_ids and after.sampling == before.sampling
    assert 20 <= len(after.output_ids) < 60 and list(after.output_ids) == answer.ids[: len(after.output_ids)]
    assert after.max_tokens == 60 and answer.finish.completion_tokens == 60


async def test_a_stop_string_that_straddles_the_loss_is_found(bench: Bench) -> None:
    bench.driver.next_token = spells("x" * 30 + "STOP it here")
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60, stop=["STOP"])))
    await given(bench, 32)
    await lose(bench)
    await replace(bench)
    answer = await asyncio.wait_for(task, 5)
    assert answer.text == "x" * 30 and answer.finish.stop_string == "STOP"


async def test_a_loss_after_the_last_token_and_before_its_reason(bench: Bench) -> None:
    """The log says by itself that it has ended: no driver is needed for that."""
    for text, most, reason in (("abc", 9, "stop"), ("abcdefghi", 4, "length")):
        bench.driver.next_token, bench.driver.mute_end = spells(text), True
        answer = await asyncio.wait_for(collect(bench.gateway, ask(max_tokens=most)), 2)
        assert (answer.finish.reason, len(answer.ids)) == (reason, 4)
    assert len(bench.driver.submits) == 2


async def test_two_losses_in_a_row_and_one_while_it_waits(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60)))
    for count in (10, 30):
        await given(bench, count)
        await lose(bench)
        await asyncio.sleep(0.05)
        await lose(bench)
        await replace(bench)
    answer = await asyncio.wait_for(task, 5)
    assert len(answer.ids) == 60 and answer.text == "".join(chr(ord("a") + (2 + i) % 26) for i in range(60))


async def test_a_stream_that_was_cut_is_opened_again_at_the_same_epoch(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=40)))
    await given(bench, 10)
    await bench.driver.kill()
    await bench.driver.start()
    assert len((await asyncio.wait_for(task, 5)).ids) == 40
    assert bench.driver.submits[-1].attempt == 2 and bench.driver.plan.epoch.n == 1


async def test_a_cancel_while_it_waits_is_never_undone(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60)))
    await given(bench, 10)
    await lose(bench)
    await come_true(lambda: bench.gateway.ps()[0]["state"] == "waiting")
    assert bench.gateway.cancel(str(bench.gateway.ps()[0]["id"]))
    answer = await asyncio.wait_for(task, 1)
    assert answer.finish.reason == "cancelled" and len(answer.ids) >= 10
    submits = len(bench.driver.submits)
    await replace(bench)
    await asyncio.sleep(0.3)
    assert len(bench.driver.submits) == submits and bench.gateway.ps() == []


async def test_what_cannot_be_held_any_more_fails_at_its_deadline_with_the_shortfall(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60, deadline_s=0.6)))
    began = time.monotonic()
    await given(bench, 10)
    await lose(bench)
    bench.cluster.reason += "; the members that are left cannot hold it: 5 bytes are missing"
    bench.cluster.error = DoesNotFit("5 bytes are missing", shortfall_bytes=5, suggestions=["add a node"])
    with pytest.raises(
        StageLost, match=r"layers 0-1.*before the deadline.*cannot hold it: 5 bytes"
    ) as caught:
        await asyncio.wait_for(task, 3)
    assert 0.5 < time.monotonic() - began < 1.5
    assert caught.value.details["shortfall_bytes"] == 5 and caught.value.details["layers"] == [0, 1]


async def test_without_a_deadline_it_waits_as_long_as_the_gateway_says(bench: Bench) -> None:
    bench.gateway._limits = Limits(recover_s=0.5)
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60)))
    await given(bench, 10)
    await lose(bench)
    with pytest.raises(StageLost, match=r"nothing took its place within 0.5 s"):
        await asyncio.wait_for(task, 3)


async def test_the_time_left_travels_with_the_next_attempt(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60, deadline_s=10)))
    await given(bench, 10)
    await lose(bench)
    await asyncio.sleep(0.5)
    await replace(bench)
    await asyncio.wait_for(task, 5)
    first, second = (s.deadline_s for s in bench.driver.submits)
    assert 9.5 < first <= 10 and 8 < second < first - 0.4


async def test_a_request_that_takes_its_drivers_down_is_given_up(bench: Bench) -> None:
    bench.driver.fail_at = 0
    bench.driver.failure = StageLost("its worker died of SIGSEGV", node="node-b", layers=[2, 3])

    async def new_epochs() -> None:
        while True:
            await asyncio.sleep(0.05)
            bench.driver.plan = make_plan(bench.store.manifest.digest, n=bench.driver.plan.epoch.n + 1)

    epochs = asyncio.create_task(new_epochs())
    with pytest.raises(StageLost, match="SIGSEGV"):
        await asyncio.wait_for(collect(bench.gateway, ask(max_tokens=5)), 5)
    epochs.cancel()
    assert len(bench.driver.submits) == MAX_FUTILE


async def test_its_own_error_ends_it_at_once(bench: Bench) -> None:
    bench.driver.fail_at, bench.driver.failure = 10, Internal("layers 2-3 gave a number that is not finite")
    with pytest.raises(Internal, match="not finite"):
        await asyncio.wait_for(collect(bench.gateway, ask(max_tokens=40)), 1)
    assert len(bench.driver.submits) == 1
    bench.driver.fail_at, bench.driver.failure = 0, Overloaded("256 wait", retry_after_s=1)
    with pytest.raises(Overloaded):  # nothing was promised: whoever asks may ask elsewhere
        await asyncio.wait_for(collect(bench.gateway, ask(max_tokens=40)), 1)


async def test_a_full_queue_of_the_next_driver_is_waited_for(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60)))
    await given(bench, 10)
    await lose(bench)
    bench.driver.fail_at, bench.driver.failure = len(bench.gateway._table.get(str(bench.gateway.ps()[0]["id"])).log.ids), Overloaded("256 wait", retry_after_s=0.1)  # fmt: skip
    await replace(bench)
    await come_true(lambda: len(bench.driver.submits) == 2, 3)
    bench.driver.fail_at = None
    assert len((await asyncio.wait_for(task, 5)).ids) == 60


async def test_a_smaller_context_that_has_room_is_taken_and_one_that_has_not_is_said(bench: Bench) -> None:
    small = asyncio.create_task(collect(bench.gateway, ask("hi", max_tokens=20)))
    large = asyncio.create_task(collect(bench.gateway, ask("hi", max_tokens=100)))
    await given(bench, 5)
    await lose(bench, context=64)
    await replace(bench)
    assert len((await asyncio.wait_for(small, 5)).ids) == 20
    with pytest.raises(ContextExceeded, match="context of 64 tokens, and this request needs 102"):
        await asyncio.wait_for(large, 5)


async def test_what_is_undeployed_while_it_waits_ends_with_that_reason(bench: Bench) -> None:
    task = asyncio.create_task(collect(bench.gateway, ask(max_tokens=60)))
    await given(bench, 10)
    await lose(bench)
    await asyncio.sleep(0.05)
    bench.cluster.state, bench.cluster.reason = "removed", "undeployed"
    with pytest.raises(NotReady, match="removed: undeployed"):
        await asyncio.wait_for(task, 1)
