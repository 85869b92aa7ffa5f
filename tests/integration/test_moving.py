"""Nodes step back in the middle of answers: their layers go to others first, and no answer loses a token."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pshard import Client
from p2pshard.errors import DoesNotFit, InvalidRequest
from tests import agreement_watch
from tests.local_cluster import LocalCluster
from tests.tiny import write_tiny_llama
from tests.town import ASKED, PROMPT, Asking, Town, check, four_daemons, stages_of, whole_answer
from tests.waiting import until

COUNT = 900
"""Tokens: more than are given while a stage is loaded."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with four_daemons(tmp_path_factory.mktemp("moving"), nodes=3, context=1024) as found:
        yield found


@pytest.fixture(scope="module")
def expected(town: Town) -> list[Any]:
    """The answers of an undisturbed cluster."""
    return town.undisturbed(COUNT)


def gap(asking: Asking) -> float:
    print(f"the longest pause was {max(asking.longest):.2f} s")
    return max(asking.longest)


@pytest.mark.parametrize("role", ["middle", "first", "last", "coordinator"])
def test_a_paused_node_hands_its_layers_over_and_frees_its_memory(
    role: str, town: Town, expected: list[Any]
) -> None:
    town.restore()
    victim, spare, before = town.who(role), town.spare(), town.row()
    place = town.holders().index(victim) if victim in town.holders() else None
    assert victim.process is not None
    had = {s["ranks"][0]["pid"] for s in town.stages()}
    asking = Asking([town.besides(victim)], COUNT)
    asking.given(20)
    began = time.monotonic()
    victim.cli("pause", victim.name)
    took = time.monotonic() - began
    assert max(asking.counts) < COUNT, "the layers went while answers were under way"
    check(asking.join(), expected)
    after = town.row()
    print(f"{role}: paused within {took:.2f} s")
    assert gap(asking) < 2
    assert after["state"] == "ready"
    if place is not None:
        assert after["plan"]["epoch"]["n"] > before["plan"]["epoch"]["n"]
        for index, (was, now) in enumerate(zip(stages_of(before), stages_of(after), strict=True)):
            assert now["layers"] == was["layers"]
            rank, old = now["ranks"][0], was["ranks"][0]
            if index == place:
                assert town.names()[rank["node"]] == spare.name and rank["read_bytes"] > 0
            else:
                assert rank["pid"] == old["pid"] and rank["read_bytes"] == 0
    assert not had & set(agreement_watch.workers(victim.process.pid)), "its memory is free"
    states = {n["name"]: n["state"] for n in town.cluster.status(spare)["nodes"]}
    assert states[victim.name] == "paused" and list(states.values()).count("paused") == 1
    with Client([victim.address]) as client:
        again = whole_answer(client, PROMPT, COUNT, **ASKED[0])
    assert again.token_ids == expected[0].token_ids, "it serves clients as before"


def test_what_cannot_be_handed_over_stays_and_the_shortfall_is_told(town: Town, expected: list[Any]) -> None:
    town.restore()
    spare, middle = town.spare(), town.who("middle")
    epoch = town.row()["plan"]["epoch"]
    spare.cli("pause", spare.name)
    asking = Asking([middle], COUNT)
    asking.given(20)
    with Client([middle.address]) as client, pytest.raises(DoesNotFit, match="2 can be used"):
        client.pause(middle.name)
    check(asking.join(), expected)
    assert gap(asking) < 1
    assert town.row()["plan"]["epoch"] == epoch
    states = {n["name"]: n["state"] for n in town.cluster.status(spare)["nodes"]}
    assert states == {n.name: "paused" if n is spare else "member" for n in town.cluster.nodes}
    with Client([middle.address]) as client, pytest.raises(InvalidRequest, match="nobody"):
        client.pause("nobody")


@pytest.mark.parametrize("role", ["middle", "first", "coordinator"])
def test_a_node_that_leaves_is_not_missed(role: str, town: Town, expected: list[Any]) -> None:
    """The answers came in at the node itself, which lets them end before it goes."""
    town.restore()
    victim = town.who(role)
    assert victim.process is not None
    asking = Asking([victim, town.besides(victim)], COUNT)
    asking.given(20)
    workers = agreement_watch.workers(victim.process.pid)
    victim.process.send_signal(signal.SIGTERM)
    check(asking.join(), expected)
    assert gap(asking) < 2
    assert victim.process.wait(timeout=30) == 0
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
    assert town.row()["state"] == "ready"


def test_leave_stops_a_daemon_whose_layers_nobody_can_take(town: Town) -> None:
    town.restore()
    town.spare().cli("pause", town.spare().name)
    victim = town.who("middle")
    victim.cli("leave", timeout=60)
    assert victim.process is not None and victim.process.wait(timeout=10) == 0
    assert "nobody takes its layers over" in victim.log()
    until(lambda: town.row().get("state") == "broken", 20, lambda: str(town.row()))


def test_a_node_that_is_lost_while_it_hands_over_costs_no_token(town: Town, expected: list[Any]) -> None:
    town.restore()
    victim, gateway = town.who("middle"), town.who("first")
    asking = Asking([gateway], COUNT)
    asking.given(20)
    paused = victim.popen("pause", victim.name)
    until(lambda: _state(town, gateway, victim.name) == "paused", 10, "it is known to hand over", every=0.01)
    victim.kill()
    check(asking.join(), expected)
    paused.wait(timeout=30)


def _state(town: Town, at: Any, name: str) -> str:
    return next(n["state"] for n in town.cluster.status(at)["nodes"] if n["name"] == name)


def test_a_second_signal_ends_a_node_that_leaves_at_once(town: Town) -> None:
    town.restore()
    victim = town.who("last")
    assert victim.process is not None
    asking = Asking([town.besides(victim)], COUNT)
    asking.given(5)
    victim.process.send_signal(signal.SIGTERM)
    until(lambda: victim.log().rstrip().count("leaving"), 10, "it has begun to leave", every=0.01)
    victim.process.send_signal(signal.SIGTERM)
    assert victim.process.wait(timeout=10) == 0
    asking.cancel()
    asking.join(20)


def test_a_node_that_joins_is_used_when_many_requests_run_and_told_why_when_not(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "models" / "tiny", layers=12, hidden=768, inner=768)
    with LocalCluster(tmp_path, "--memory", "2GB", nodes=2) as cluster:
        first = cluster.nodes[0]
        cluster.wait_measured()
        with Client([first.address]) as client:
            client.deploy(str(path), context=2048, concurrency=8, dtype="int8")
            expected = whole_answer(client, PROMPT, 1000, **ASKED[0]).token_ids

            def row() -> dict[str, Any]:
                return dict(cluster.status(first)["deployments"][0])

            (holder,) = (s["ranks"][0]["node"] for s in stages_of(row()))
            idle = next(n["id"] for n in cluster.status(first)["nodes"] if n["id"] != holder)
            until(lambda: row()["idle"].get(idle), 20, lambda: str(row()))
            assert "1 request at once" in row()["idle"][idle]
            known = {n["id"]: n["name"] for n in cluster.status(first)["nodes"]}
            left_out = next(n for n in cluster.nodes if n.name == known[idle])
            assert "is served without this node" in left_out.log()
            assert "holds no layers of tiny" in " ".join(first.cli("status").stdout.split())

            asking = Asking([first], 1000, asked=[(PROMPT, ASKED[0])] * 8)
            until(lambda: len(stages_of(row())) == 2, 60, lambda: str(row()))
            running = asking.answers.count(None)
            assert [answer.token_ids for answer in asking.join(120)] == [expected] * 8
            print(f"{running} still ran when it had moved")
            gap(asking)
            assert running == 8
            stages = stages_of(row())
            assert stages[0]["ranks"][0]["node"] == holder and stages[0]["ranks"][0]["read_bytes"] == 0
            epoch = row()["plan"]["epoch"]
            time.sleep(8)  # the load is gone: that is no reason to move again
            assert row()["plan"]["epoch"] == epoch
