"""The supervisor over real processes: a small script in place of the worker, which does what each test tells it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from p2pshard_node import supervisor as module
from p2pshard_node.supervisor import Supervisor, exit_reason

from p2pshard.errors import Conflict, DoesNotFit, Internal, NotReady, P2PShardError, UnsupportedModel
from tests.waiting import come_true

SCRIPT = """
import os, socket, struct, sys, time
import msgpack
fd = int(sys.argv[sys.argv.index("--control-fd") + 1])
how = sys.argv[1]
control = socket.socket(fileno=fd)
def say(**event):
    data = msgpack.packb(event)
    control.sendall(struct.pack(">I", len(data)) + data)
def take(count):
    data = b""
    while len(data) < count:
        piece = control.recv(count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
if how == "dies at once":
    sys.exit(7)
say(ev="started", pid=os.getpid(), base_bytes=1000)
loads = 0
while True:
    message = msgpack.unpackb(take(struct.unpack(">I", take(4))[0]))
    match message["op"]:
        case "probe":
            say(ev="probed", devices=[{"device": "cpu", "matmul_gflops": 2.5}])
        case "load":
            loads += 1
            if loads > 1 and how in ("freezes", "stays"):
                time.sleep(60) if how == "freezes" else None
                say(ev="refused", error={"code": "conflict", "message": "it holds another", "details": {}})
                continue
            say(ev="progress", phase="loading", done=1, total=2)
            epoch = [message["plan"]["epoch"]["n"], message["plan"]["epoch"]["proposer"]]
            if message["beside"] and how == "slow beside" and epoch[0] == 2:
                time.sleep(0.3)
            if how == "refuses" or (message["beside"] and how == "refuses beside"):
                say(ev="refused", epoch=epoch, error={"code": "unsupported_model", "message": "GPT-2 is not run here", "details": {}})
                continue
            if how == "hangs":
                time.sleep(60)
            if how == "eats":
                kept = bytearray(os.urandom(1) * (200 << 20))
                time.sleep(60)
            if how == "dies loading":
                os.kill(os.getpid(), 9)
            say(ev="loaded", epoch=epoch, port=4321, weight_bytes=message["stage"], kv_bytes=0, base_bytes=1000, peak_bytes=2000)
        case "activate":
            say(ev="ready")
            say(ev="activated", epoch=message.get("epoch", []))
            time.sleep(0.1)
            say(ev="parted")
        case "stats":
            say(ev="stats", peak_bytes=2000, blocks_used=3, blocks_total=8, sequences=1)
        case "stop" if how != "deaf":
            sys.exit(0)
"""


class Rig:
    def __init__(self, folder: Path, how: str, **options: Any) -> None:
        script = folder / "worker.py"
        script.write_text(SCRIPT)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[tuple[str, int, int]] = []
        values: dict[str, Any] = {"host": "127.0.0.1", "ports": (0, 0), "node": "n", "warm": False, **options}
        self.supervisor = Supervisor(
            folder,
            on_event=lambda key, event: self.events.append((key, event)),
            argv=[sys.executable, str(script), how],
            **values,
        )

    async def load(
        self, key: str = "d", *, booked: int = 1000, budget: int = 1 << 40, stage: int = 5, **plan: Any
    ) -> tuple[module.Worker, dict[str, Any]]:
        return await self.supervisor.load(
            key,
            plan={"epoch": {"n": 1, "proposer": "n"}, **plan},
            stage=stage,
            source=Path("/nowhere"),
            booked_bytes=booked,
            budget_bytes=budget,
            progress=lambda *step: self.steps.append(step),
        )

    async def beside(
        self, number: int, *, both: int = 1500, **plan: Any
    ) -> tuple[module.Worker, dict[str, Any]]:
        return await self.supervisor.load_beside(
            "d",
            plan={"epoch": {"n": number, "proposer": "n"}, **plan},
            stage=number,
            source=Path("/nowhere"),
            booked_bytes=700,
            both_bytes=both,
            budget_bytes=1 << 40,
            progress=lambda *step: self.steps.append(step),
        )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(how: str = "good", **options: Any) -> Rig:
        rigs.append(Rig(tmp_path, how, **options))
        return rigs[-1]

    yield make
    for one in rigs:
        pids = [w.pid for w in one.supervisor.workers()]
        await one.supervisor.close()
        assert not any(alive(pid) for pid in pids), "closing leaves no worker behind"


async def test_load_activate_and_stop(rig: Callable[..., Rig]) -> None:
    one = rig()
    worker, event = await one.load()
    assert event["port"] == 4321 and event["weight_bytes"] == 5
    assert one.steps == [("loading", 1, 2)]
    one.supervisor.activate("d", {"deployment": "d"})
    await come_true(lambda: one.events)
    assert one.events == [("d", {"ev": "ready"})]
    await one.supervisor.stop("d")
    assert not alive(worker.pid) and one.supervisor.worker("d") is None
    assert one.events == [("d", {"ev": "ready"})]  # an end that was asked for is no event
    with pytest.raises(NotReady):
        one.supervisor.activate("d", {})


async def test_counts_arrive_without_being_asked_for(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.supervisor.start()
    worker, _ = await one.load()
    await come_true(lambda: worker.stats)
    assert (worker.stats["blocks_used"], worker.stats["blocks_total"]) == (3, 8)


async def test_a_worker_that_is_killed_is_an_event_with_its_reason(rig: Callable[..., Rig]) -> None:
    one = rig()
    worker, _ = await one.load()
    os.kill(worker.pid, signal.SIGKILL)
    await come_true(lambda: one.events)
    ((key, event),) = one.events
    assert (key, event["ev"], event["code"]) == ("d", "exit", -9) and "out of memory" in event["reason"]
    assert one.supervisor.worker("d") is None
    await one.load()  # and the next one works


@pytest.mark.parametrize(
    ("how", "error"), [("refuses", UnsupportedModel), ("dies loading", Internal), ("dies at once", Internal)]
)
async def test_a_load_that_fails_is_a_typed_error_and_leaves_nothing(
    rig: Callable[..., Rig], how: str, error: type[P2PShardError]
) -> None:
    one = rig(how)
    with pytest.raises(error) as caught:
        await one.load()
    if how != "refuses":
        assert "killed" in caught.value.message or "code 7" in caught.value.message
    await come_true(lambda: not one.supervisor.workers())


async def test_a_load_that_falls_silent_is_ended(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOAD_SILENCE_S", 1.0)
    monkeypatch.setattr(module, "STOP_S", 0.3)
    one = rig("hangs")
    with pytest.raises(NotReady, match="reported nothing"):
        await one.load()
    assert not one.supervisor.workers()


async def test_a_worker_that_ignores_stop_is_killed(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.3)
    one = rig("deaf")
    worker, _ = await one.load()
    await one.supervisor.stop("d")
    assert not alive(worker.pid)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="peak memory of another process is read from /proc"
)
async def test_a_worker_above_its_budget_is_ended_and_named(rig: Callable[..., Rig]) -> None:
    one = rig("eats")
    one.supervisor.start()
    with pytest.raises(DoesNotFit, match="above its budget of 104,857,600"):
        await one.load(budget=100 << 20)


async def test_a_load_that_is_cancelled_ends_its_worker(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.3)
    one = rig("hangs")
    task = asyncio.create_task(one.load())
    await come_true(lambda: one.steps)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not one.supervisor.workers()


async def test_a_loaded_worker_takes_the_next_stage_of_its_model(rig: Callable[..., Rig]) -> None:
    one = rig()
    first, _ = await one.load(manifest="m", dtype="int8", booked=1000, budget=5000)
    second, event = await one.load(manifest="m", dtype="int8", stage=7, booked=2000, budget=3000)
    assert second is first and event["weight_bytes"] == 7 and second.stage == 7
    assert (second.booked_bytes, second.budget_bytes) == (2000, 3000)
    third, _ = await one.load(manifest="m", dtype="int4", stage=7)
    assert third.pid != first.pid and not alive(first.pid), (
        "other weights: another process, and the memory back"
    )
    fourth, _ = await one.load(manifest="n", dtype="int4", stage=7)
    assert fourth.pid != third.pid and one.events == []


@pytest.mark.parametrize("how", ["freezes", "stays"])
async def test_one_that_does_not_come_to_its_next_stage_is_replaced(
    rig: Callable[..., Rig], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in a kernel, say, or will not have another stage."""
    monkeypatch.setattr(module, "FREE_S", 0.3)
    one = rig(how)
    first, _ = await one.load(manifest="m", dtype="int8")
    began = time.monotonic()
    second, event = await one.load(manifest="m", dtype="int8", stage=7)
    assert second.pid != first.pid and not alive(first.pid) and event["weight_bytes"] == 7
    assert time.monotonic() - began < module.STOP_S and one.events == []


async def test_a_loaded_worker_that_is_stopped_is_ended_and_named(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.supervisor.start()
    worker, _ = await one.load()
    os.kill(worker.pid, signal.SIGSTOP)
    await come_true(lambda: one.events, 5)
    assert one.events[0][1]["ev"] == "exit" and "had said nothing for" in one.events[0][1]["reason"]


async def test_a_warm_worker_becomes_the_next_load_and_another_is_kept_only_if_it_fits(
    rig: Callable[..., Rig],
) -> None:
    one = rig(warm=True, budget=lambda: 10_000)
    one.supervisor.start()
    await come_true(lambda: one.supervisor.base_bytes)
    (warm,) = one.supervisor.workers()
    worker, _ = await one.load()
    assert worker.pid == warm.pid
    await come_true(lambda: len(one.supervisor.workers()) == 2)  # 10,000 bytes have room for another
    await one.load("e", booked=8_500)
    await asyncio.sleep(0.3)
    assert len(one.supervisor.workers()) == 2  # and now they have not


async def test_a_probe_is_measured_once_and_then_read_from_the_disk(rig: Callable[..., Rig]) -> None:
    one = rig()
    assert (await one.supervisor.probe())["devices"] == [{"device": "cpu", "matmul_gflops": 2.5}]
    assert not one.supervisor.workers()
    again = rig("dies at once")
    probed = await again.supervisor.probe()
    assert probed["base_bytes"] == 1000 and again.supervisor.base_bytes == 1000


def test_exits_in_words() -> None:
    assert "out of memory" in exit_reason(-9) and "out of memory" in exit_reason(137)
    assert exit_reason(-11) == "died of SIGSEGV" and exit_reason(3) == "exited with code 3"


async def test_a_stage_is_loaded_beside_the_one_that_serves_and_follows_it(rig: Callable[..., Rig]) -> None:
    one = rig()
    worker, _ = await one.load()
    again, event = await one.beside(2)
    assert again is worker and event["weight_bytes"] == 2
    assert worker.stage == 5 and one.supervisor.used_bytes() == 1500, "it serves what it did, and has both"
    one.supervisor.activate("d", {"deployment": "d", "epoch": [2, "n"]})
    await come_true(lambda: worker.stage == 2)
    assert one.supervisor.used_bytes() == 1500 and worker.coming is None, "others take over what it has"
    await come_true(lambda: one.supervisor.used_bytes() == 700)


async def test_what_was_loaded_beside_and_is_given_up_leaves_the_other_as_it_was(
    rig: Callable[..., Rig],
) -> None:
    one = rig()
    worker, _ = await one.load()
    await one.beside(2)
    one.supervisor.discard("d")
    assert (worker.stage, one.supervisor.used_bytes(), worker.coming) == (5, 1000, None)
    one.supervisor.discard("d")  # as often as asked
    with pytest.raises(Conflict, match="another dtype"):
        await one.beside(3, dtype="int8")
    assert one.supervisor.worker("d") is worker and one.supervisor.used_bytes() == 1000


async def test_a_refused_load_beside_ends_nothing(rig: Callable[..., Rig]) -> None:
    one = rig("refuses beside")
    worker, _ = await one.load()
    with pytest.raises(UnsupportedModel):
        await one.beside(2)
    assert one.supervisor.worker("d") is worker and alive(worker.pid)
    assert one.supervisor.used_bytes() == 1000 and one.events == []


async def test_the_answer_of_a_load_that_was_given_up_is_not_taken_for_the_next(
    rig: Callable[..., Rig],
) -> None:
    one = rig("slow beside")
    worker, _ = await one.load()
    late = asyncio.create_task(one.beside(2))
    await asyncio.sleep(0.1)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert one.supervisor.worker("d") is worker
    _, event = await one.beside(3)
    assert event["weight_bytes"] == 3 and worker.coming is not None and worker.coming.stage == 3


async def test_a_load_right_after_a_change_counts_from_the_stage_that_serves(rig: Callable[..., Rig]) -> None:
    """The worker lets go of the stage before for it, and says so later than it answers."""
    one = rig()
    worker, _ = await one.load()
    await one.beside(2)
    one.supervisor.activate("d", {"deployment": "d", "epoch": [2, "n"]})
    await come_true(lambda: worker.stage == 2)
    await one.beside(3, both=1800)
    assert one.supervisor.used_bytes() == 1800
    await asyncio.sleep(0.2)
    assert one.supervisor.used_bytes() == 1800, "what it lets go of late changes nothing"
    one.supervisor.discard("d")
    assert one.supervisor.used_bytes() == 700
