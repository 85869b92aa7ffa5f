"""Reports of stages: the order in which a coordinator hears them, and what it does not hear any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from p2pshard_node.cluster import reports
from p2pshard_node.cluster.reports import Reports

from p2pshard.errors import NotReady
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import plan_pb2
from tests.waiting import come_true


class Coordinator:
    """Takes reports while it is ``there``."""

    def __init__(self) -> None:
        self.there = False
        self.tries = 0
        self.heard: list[tuple[str, str, int]] = []

    async def send(self, event: pb.StageEvent) -> None:
        self.tries += 1
        await asyncio.sleep(0)
        if not self.there:
            raise NotReady("nobody", state="following")
        self.heard.append((event.deployment, event.kind, event.epoch.n))


def event(kind: str, n: int = 1, deployment: str = "d") -> pb.StageEvent:
    return pb.StageEvent(deployment=deployment, kind=kind, epoch=plan_pb2.Epoch(n=n, proposer="a"))


@pytest.fixture
async def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
async def told(coordinator: Coordinator) -> AsyncIterator[Reports]:
    made = Reports(coordinator.send)
    yield made
    await made.stop()


async def test_a_stage_that_is_ready_does_not_say_afterwards_what_had_kept_it(
    told: Reports, coordinator: Coordinator
) -> None:
    told.put(event("not_ready"))
    await come_true(lambda: coordinator.tries)
    coordinator.there = True
    told.put(event("ready"))
    await come_true(lambda: coordinator.heard)
    await asyncio.sleep(0.5)  # longer than a retry's pause
    assert coordinator.heard == [("d", "ready", 1)]


async def test_a_loss_is_told_before_what_came_after_it(told: Reports, coordinator: Coordinator) -> None:
    for kind in ("not_ready", "lost", "not_ready", "ready"):
        told.put(event(kind))
    told.put(event("lost", deployment="e"))
    await come_true(lambda: coordinator.tries)
    coordinator.there = True
    await come_true(lambda: len(coordinator.heard) == 3)
    assert [kind for d, kind, _ in coordinator.heard if d == "d"] == ["lost", "ready"]


async def test_an_epoch_that_is_over_is_not_reported_any_more(
    told: Reports, coordinator: Coordinator
) -> None:
    told.put(event("lost", 1))
    await come_true(lambda: coordinator.tries)
    told.put(event("ready", 2))
    coordinator.there = True
    await come_true(lambda: coordinator.heard)
    assert coordinator.heard == [("d", "ready", 2)]


async def test_what_nobody_takes_is_given_up(
    told: Reports, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "KEPT_S", 0.0)
    told.put(event("ready"))
    await come_true(lambda: not told._outboxes)
    coordinator.there = True
    told.put(event("lost"))
    await come_true(lambda: coordinator.heard)
    assert coordinator.heard == [("d", "lost", 1)]


async def test_nothing_is_told_after_the_stop(told: Reports, coordinator: Coordinator) -> None:
    told.put(event("not_ready"))
    await told.stop()
    told.put(event("lost"))
    coordinator.there = True
    await asyncio.sleep(0.3)
    assert not coordinator.heard and not told._outboxes
