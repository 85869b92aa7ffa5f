"""Whether idle nodes are worth moving for, and when that is asked."""

from __future__ import annotations

import pytest
from p2pshard_node.cluster import growing
from p2pshard_node.cluster.growing import Growing

from p2pshard.planning.growth import LEAST_GAIN, Growth, Pace, grow
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Pin, Settings
from p2pshard.planning.solver import make_plan

MB = 1 << 20
MODEL = ModelProfile(
    "m", "f" * 64, "int8", layer_bytes=(100 * MB,) * 12, kv_token_bytes=(1024,) * 12,
    embedding_bytes=50 * MB, head_bytes=50 * MB, hidden=64, vocabulary=1000, max_context=32768, heads=4,
    query_width=64, kv_width=64, intermediate=128,
)  # fmt: skip


def node(name: str, megabytes: int = 4000, gbps: float = 10) -> NodeBudget:
    return NodeBudget(name, name, budget_bytes=megabytes * MB, bandwidth_gbps=gbps)


def links(nodes: list[NodeBudget], *cut: set[str]) -> list[LinkProfile]:
    names = [n.node for n in nodes]
    return [LinkProfile(a, b, rtt_ms=0.2) for a in names for b in names if a < b and {a, b} not in cut]


def planned(nodes: list[NodeBudget], settings: Settings) -> Plan:
    return make_plan(nodes, MODEL, links(nodes), settings, Epoch(1, "a"))


def grown(
    before: list[NodeBudget],
    newcomers: list[NodeBudget],
    streams: int,
    settings: Settings | None = None,
    *cut: set[str],
    pace: Pace | None = None,
) -> tuple[Plan, Growth]:
    settings = settings or Settings(context=2048)
    plan, nodes = planned(before, settings), [*before, *newcomers]
    return plan, grow(plan, nodes, MODEL, links(nodes, *cut), settings, Epoch(2, "a"), streams, pace)


SMALL = [node(n, 560) for n in "abc"]


def test_three_become_four_for_eight_requests_and_stay_three_for_one() -> None:
    before, growth = grown(SMALL, [node("d", 560)], 8)
    assert len(before.stages) == 3 and growth.plan is not None
    assert sorted(growth.plan.nodes) == list("abcd")
    assert [n for n in growth.plan.nodes if n != "d"] == list(before.nodes), "in the order they had"
    assert growth.plan.nodes[0] == before.nodes[0], "the driver stays where it is"
    assert growth.plan.epoch == Epoch(2, "a") and "8 requests" in growth.why and growth.idle == {}
    assert (growth.plan.context, growth.plan.blocks) == (before.context, before.blocks)
    growth.plan.check()
    for stage in growth.plan.stages:
        assert stage.ranks[0].total_bytes <= stage.ranks[0].budget_bytes
    _, alone = grown(SMALL, [node("d", 560)], 1)
    assert (
        alone.plan is None and "1 request at once" in alone.idle["d"] and str(LEAST_GAIN) in alone.idle["d"]
    )


def test_one_node_is_enough_for_one_request_and_two_for_many() -> None:
    assert grown([node("a")], [node("b")], 1)[1].plan is None
    growth = grown([node("a")], [node("b")], 8)[1]
    assert growth.plan is not None and growth.plan.nodes == ("a", "b")


def test_what_steps_take_now_decides_where_the_way_around_costs_as_much() -> None:
    """By its memory alone a fast node has nothing to gain from another; one that shares its processors has."""
    fast = [node("a", gbps=2000)]
    assert grown(fast, [node("b", gbps=2000)], 8)[1].plan is None
    slow = grown(fast, [node("b", gbps=2000)], 8, pace=Pace(step_s=0.1, rows=8))[1]
    assert slow.plan is not None
    quick = grown([node("a")], [node("b")], 8, pace=Pace(step_s=0.001, rows=8))[1]
    assert quick.plan is None


def test_a_slow_newcomer_is_not_worth_it_and_several_may_be() -> None:
    assert grown([node("a")], [node("b", gbps=0.8)], 8)[1].plan is None
    growth = grown([node("a")], [node("b"), node("c")], 12)[1]
    assert growth.plan is not None and len(growth.plan.nodes) == 3


def test_more_context_where_none_was_asked_for() -> None:
    free = Settings(concurrency=8)
    before, growth = grown([node("a", 2100)], [node("b", 2100)], 1, free)
    assert before.context < MODEL.max_context and growth.plan is not None
    assert growth.plan.context >= 1.25 * before.context and "context" in growth.why
    asked = Settings(context=before.context, concurrency=8)
    assert grown([node("a", 2100)], [node("b", 2100)], 1, asked)[1].plan is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(context=2048, nodes=3), "--nodes 3"),
        (Settings(context=2048, layers=(Pin("a", 0, 3), Pin("b", 4, 7), Pin("c", 8, 11))), "by hand"),
        (Settings(context=2048, exclude=("d",)), "excluded"),
    ],
)
def test_what_was_asked_for_is_kept_and_told(settings: Settings, why: str) -> None:
    settings_before = settings if "d" not in settings.exclude else Settings(context=2048)
    plan, nodes = planned(SMALL, settings_before), [*SMALL, node("d", 560)]
    growth = grow(plan, nodes, MODEL, links(nodes), settings, Epoch(2, "a"), 8)
    assert growth.plan is None and why in growth.idle["d"]


def test_a_newcomer_without_room_or_links_is_told_so() -> None:
    for growth in (
        grown(SMALL, [node("d", 60)], 8)[1],
        grown(SMALL, [node("d", 560)], 8, None, {"a", "d"}, {"b", "d"}, {"c", "d"})[1],
    ):
        assert growth.plan is None and "too little memory" in growth.idle["d"]


def test_nothing_idle_nothing_to_say() -> None:
    assert grown(SMALL, [], 8)[1] == Growth(None, "", {})


# -- when it is asked
class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, streams: dict[str, int]) -> tuple[Growing, Plan]:
    return Growing(lambda d: streams[d], clock=clock), planned(SMALL, Settings(context=2048))


def test_the_load_is_what_lasted(clock: Clock) -> None:
    streams = {"m": 8}
    one, _ = watch(clock, streams)
    assert one.load("m") == 1
    for count in (8, 8, 8, 2, 8, 8, 8, 8, 8, 8, 8, 8):
        clock.now += 1
        streams["m"] = count
        load = one.load("m")
        assert load in ((1, 8) if clock.now < 1005 else (2, 8))
    assert load == 8


def test_it_is_asked_again_only_when_something_changed(clock: Clock) -> None:
    streams = {"m": 0}
    one, plan = watch(clock, streams)
    everyone = {"a", "b", "c", "d"}
    one.see(everyone)
    assert not one.due("m", plan, everyone), "d has just come"
    clock.now += growing.STEADY_S
    one.see(everyone)
    assert one.due("m", plan, everyone)
    one.judged("m", plan, everyone, 1)
    clock.now += growing.ASK_S
    assert not one.due("m", plan, everyone)
    assert not one.due("m", plan, {"a", "b", "c"}), "nobody is idle"
    streams["m"] = 8
    for _ in range(8):
        due = one.due("m", plan, everyone)
        clock.now += 1
    assert due
    assert one.judged("m", plan, everyone, 8), "others than before"
    clock.now += growing.ASK_S
    assert not one.due("m", plan, everyone)
    clock.now += growing.AGAIN_S
    assert one.due("m", plan, everyone), "what a step takes may have changed"
    assert not one.judged("m", plan, everyone, 8), "nothing to tell"
    clock.now += growing.AGAIN_S
    one.rest("m")
    assert not one.due("m", plan, everyone)
    clock.now += growing.REST_S
    assert one.due("m", plan, everyone)
    one.forget("m")


def test_a_node_that_comes_and_goes_waits_longer_each_time(clock: Clock) -> None:
    one, _ = watch(clock, {"m": 0})
    waits = []
    for _ in range(4):
        one.see({"d"})
        came = clock.now
        while not one.steady("d"):
            clock.now += 0.5
            one.see({"d"})
        waits.append(clock.now - came)
        one.see(set())
        clock.now += 1
    assert waits == [growing.STEADY_S * 2**n for n in range(4)]
    clock.now += growing.FLAP_S
    one.see({"d"})
    clock.now += growing.STEADY_S
    assert one.steady("d"), "that is forgotten"
