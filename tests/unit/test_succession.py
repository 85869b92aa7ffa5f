"""The plan after a loss: what is in memory stays where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pshard.errors import DoesNotFit
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Pin, Settings
from p2pshard.planning.solver import make_plan

GB = 1 << 30
MODEL = ModelProfile(
    "m", "f" * 64, "int8", layer_bytes=(100 << 20,) * 12, kv_token_bytes=(1024,) * 12,
    embedding_bytes=50 << 20, head_bytes=50 << 20, hidden=64, vocabulary=1000, max_context=32768, heads=4,
    query_width=64, kv_width=64, intermediate=128,
)  # fmt: skip


def nodes(**budgets: int) -> list[NodeBudget]:
    return [NodeBudget(n, n, budget_bytes=b, bandwidth_gbps=10) for n, b in budgets.items()]


def links(found: list[NodeBudget], cut: frozenset[str] = frozenset()) -> list[LinkProfile]:
    names = [n.node for n in found]
    return [LinkProfile(a, b) for a in names for b in names if a < b and {a, b} != cut]


def plan(found: list[NodeBudget], settings: Settings | None = None, before: Plan | None = None, **cut: frozenset[str]) -> Plan:  # fmt: skip
    n = before.epoch.n + 1 if before else 1
    return make_plan(found, MODEL, links(found, **cut), settings or Settings(), Epoch(n, "a"), before=before)


def held(made: Plan) -> dict[str, tuple[int, int]]:
    return {s.node: s.layers for s in made.stages}


THREE = nodes(a=600 << 20, b=600 << 20, c=600 << 20)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_spare_takes_just_what_was_lost(lost: int) -> None:
    before = plan(THREE)
    gone = before.stages[lost].node
    spares = nodes(small=100 << 20, d=700 << 20, e=900 << 20)
    after = plan([n for n in THREE if n.node != gone] + spares, before=before)
    assert len(after.stages) == 3 and after.epoch.n == 2
    for place, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        assert new.layers == old.layers
        assert new.node == (old.node if place != lost else "e"), "the one with most room of those as fast"
    assert (after.context, after.blocks, after.chunk_tokens) == (
        before.context,
        before.blocks,
        before.chunk_tokens,
    )


def test_two_losses_and_a_spare_that_reaches_too_few() -> None:
    before = plan(THREE)
    first, middle, last = (s.node for s in before.stages)
    left = [n for n in THREE if n.node == middle]
    after = plan(left + nodes(d=600 << 20, e=600 << 20), before=before)
    assert held(after)[middle] == before.stages[1].layers and set(held(after)) == {middle, "d", "e"}
    left = [n for n in THREE if n.node != first] + nodes(d=900 << 20, e=700 << 20)
    after = make_plan(
        left, MODEL, links(left, frozenset({"d", last})), Settings(), Epoch(2, "a"), before=before
    )
    assert held(after)[middle] == before.stages[1].layers and after.stages[0].node == "e", (
        "tokens go back to the first"
    )


def test_without_a_spare_those_left_share_the_layers_in_their_order() -> None:
    roomy = nodes(a=2 * GB, b=2 * GB, c=2 * GB)
    before = plan(roomy, Settings(nodes=3))
    first, middle, last = (s.node for s in before.stages)
    after = plan([n for n in roomy if n.node != middle], Settings(), before=before)
    assert [s.node for s in after.stages] == [first, last] and after.context == before.context
    assert after.stages[0].layers[0] == 0 and after.stages[1].layers[1] == 11
    assert after.stages[0].layers[1] >= before.stages[0].layers[1], "it keeps all of its own"
    assert after.stages[1].layers[0] <= before.stages[2].layers[0]


def test_less_room_means_less_context_and_too_little_is_said() -> None:
    model_context = Settings(context=None)
    before = plan(nodes(a=GB, b=GB), model_context)
    left = nodes(b=1480 << 20)
    after = plan(left, model_context, before=before)
    assert after.stages[0].node == "b" and 8192 <= after.context < before.context
    with pytest.raises(DoesNotFit):
        plan(nodes(b=900 << 20), model_context, before=before)


def test_what_is_asked_for_now_comes_first() -> None:
    before = plan(THREE)
    gone = before.stages[0].node
    left = [n for n in THREE if n.node != gone]
    pinned = Settings(layers=(Pin("d", 4, 11),))
    after = plan(left + nodes(d=2 * GB), pinned, before=before)
    assert held(after)["d"] == (4, 11)
    fewer = plan(left + nodes(d=2 * GB), Settings(nodes=1), before=before)
    assert len(fewer.stages) == 1
    longer = plan(left + nodes(d=2 * GB), Settings(context=4096), before=before)
    assert longer.context == 4096


@given(
    budgets=st.lists(st.integers(300, 1500), min_size=2, max_size=6),
    lost=st.sets(st.integers(0, 5), min_size=1, max_size=3),
    spare=st.lists(st.integers(100, 1500), max_size=3),
)
def test_it_is_a_plan_within_budgets_whenever_there_is_one(
    budgets: list[int], lost: set[int], spare: list[int]
) -> None:
    found = nodes(**{f"n{i}": b << 20 for i, b in enumerate(budgets)})
    try:
        before = plan(found)
    except DoesNotFit:
        return
    left = [n for i, n in enumerate(found) if i not in lost] + nodes(
        **{f"s{i}": b << 20 for i, b in enumerate(spare)}
    )
    if not left:
        return
    try:
        anew: Plan | None = plan(left)
    except DoesNotFit:
        anew = None
    try:
        after = plan(left, before=before)
    except DoesNotFit:
        assert anew is None, "what fits when planned anew fits"
        return
    after.check()
    sizes = {n.node: n.budget_bytes for n in left}
    assert all(s.ranks[0].total_bytes <= sizes[s.node] for s in after.stages)
    if set(s.node for s in before.stages) <= set(sizes):
        assert held(after) == held(before)
