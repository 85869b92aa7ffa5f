"""The solver: every layer once, no budget exceeded, and a plan whenever there is one."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pshard.errors import DoesNotFit, InvalidRequest
from p2pshard.planning.memory import BLOCK_SIZE, blocks_for, kv_bytes
from p2pshard.planning.ordering import Capacity, Problem, balance
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Pin, Settings
from p2pshard.planning.solver import LEAST_CONTEXT, decode_speeds, make_plan

GB = 10**9
EPOCH = Epoch(1, "n0")


def flat(layers: int, each: int, **rest: int) -> ModelProfile:
    """A model of equal layers and nothing else, unless said."""
    return ModelProfile("m", "d" * 64, "bfloat16", (each,) * layers, rest.pop("kv", (0,) * layers), **rest)


def node(number: int, budget: float, base: int = 0, **rest: object) -> NodeBudget:
    return NodeBudget(f"n{number}", f"host{number}", budget_bytes=int(budget), base_bytes=base, **rest)


def mesh(nodes: list[NodeBudget]) -> list[LinkProfile]:
    return [LinkProfile(a.node, b.node) for a, b in itertools.combinations(nodes, 2)]


def plan(
    members: list[NodeBudget], model: ModelProfile, links: list[LinkProfile] | None = None, **wish: object
) -> Plan:
    wish.setdefault("context", 16)
    return make_plan(members, model, mesh(members) if links is None else links, Settings(**wish), EPOCH)


def refused(
    members: list[NodeBudget], model: ModelProfile, links: list[LinkProfile] | None = None, **wish: object
) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        plan(members, model, links, **wish)
    return caught.value


def layers_by_node(found: Plan) -> dict[str, int]:
    return {s.node: s.layers[1] - s.layers[0] + 1 for s in found.stages}


def assert_sound(found: Plan, nodes: list[NodeBudget], model: ModelProfile, links: list[LinkProfile]) -> None:
    found.check()
    budgets = {n.node: n for n in nodes}
    assert len(set(found.nodes)) == len(found.stages)
    for stage in found.stages:
        (rank,) = stage.ranks
        assert rank.total_bytes <= rank.budget_bytes == budgets[rank.node].budget_bytes
        assert rank.base_bytes == budgets[rank.node].base_bytes
        assert rank.weight_bytes == model.weight_bytes(*stage.layers)
        assert rank.kv_bytes == kv_bytes(model, *stage.layers, found.blocks)
    assert found.blocks == blocks_for(found.context, found.concurrency)
    if len(found.stages) > 1:
        ring = [s.node for s in found.stages]
        pairs = {frozenset((link.a, link.b)) for link in links if link.fresh}
        assert all(frozenset(edge) in pairs for edge in zip(ring, ring[1:] + ring[:1], strict=True))


def test_a_cluster_without_slack_is_filled_to_the_last_layer() -> None:
    nodes = [node(0, 24 * GB), node(1, 12 * GB), node(2, 4.9 * GB)]
    for order in itertools.permutations(nodes):
        assert layers_by_node(plan(list(order), flat(40, GB))) == {"n0": 24, "n1": 12, "n2": 4}


def test_one_node_that_holds_it_all_is_enough() -> None:
    found = plan([node(i, 50 * GB) for i in range(5)], flat(40, GB))
    assert len(found.stages) == 1 and found.stages[0].layers == (0, 39)
    assert found.stages[0].embedding and found.stages[0].head


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_any_number_of_nodes_on_demand(count: int) -> None:
    nodes = [node(i, 50 * GB) for i in range(7)]
    found = plan(nodes, flat(40, GB), nodes=count)
    assert len(found.stages) == count
    sizes = layers_by_node(found).values()
    assert max(sizes) - min(sizes) <= 1 + 40 % count  # equal nodes: nearly equal parts
    assert max(sizes) == -(-40 // count)


def test_more_nodes_than_needed_leaves_the_smallest_out() -> None:
    found = plan([node(0, 5 * GB), node(1, 30 * GB), node(2, 11 * GB), node(3, 2 * GB)], flat(40, GB))
    assert layers_by_node(found) == {"n1": 29, "n2": 11} or layers_by_node(found) == {"n1": 30, "n2": 10}


@pytest.mark.parametrize(
    ("budgets", "bandwidths", "head", "expected"),
    [
        ((40, 40), (0, 0), 0, (21, 21)),
        ((40, 30), (0, 0), 0, (21, 21)),  # memory is a bound and no measure
        ((40, 20), (10, 50), 0, (22, 20)),  # the fast one takes all that fits
        ((90, 40), (60, 20), 0, (32, 10)),
        ((90, 40), (20, 60), 0, (10, 32)),
        ((40, 40), (22, 20), 0, (21, 21)),  # nearer than two measurements of one machine
        ((40, 40), (20, 0), 0, (21, 21)),  # one was not measured: nothing to compare
        ((50, 50), (0, 0), 8, (25, 17)),  # the head is work too
        ((50, 50), (30, 60), 8, (9, 33)),
    ],
)
def test_layers_are_spread_so_that_the_slowest_stage_is_the_fastest(
    budgets: tuple[int, int], bandwidths: tuple[int, int], head: int, expected: tuple[int, int]
) -> None:
    nodes = [
        node(i, budget * GB, bandwidth_gbps=float(bandwidth))
        for i, (budget, bandwidth) in enumerate(zip(budgets, bandwidths, strict=True))
    ]
    found = plan(nodes, flat(42, GB, head_bytes=head * GB), nodes=2)
    assert layers_by_node(found) == {"n0": expected[0], "n1": expected[1]}


def test_keys_and_values_that_a_step_reads_are_work_too() -> None:
    nodes = [node(0, 200 * GB), node(1, 200 * GB)]
    model = flat(42, GB, kv=(200_000,) * 42, head_bytes=8 * GB)
    assert layers_by_node(plan(nodes, model, nodes=2)) == {"n0": 25, "n1": 17}
    assert layers_by_node(plan(nodes, model, nodes=2, context=16_000)) == {"n0": 23, "n1": 19}


def test_speeds_nearer_than_the_noise_are_one_speed() -> None:
    assert decode_speeds([20.0, 40.0, 38.0, 90.0, 28.0]) == (20.0, 40.0, 40.0, 90.0, 40.0)
    assert decode_speeds([]) == ()


balances = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 9), min_size=count, max_size=8),  # bytes of each layer
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=count, max_size=count),
        st.integers(0, 12),
    )
)


@settings(max_examples=400, deadline=None)
@given(balances)
def test_no_other_cut_that_fits_has_a_faster_slowest_stage(
    case: tuple[list[int], list[tuple[int, int]], int],
) -> None:
    costs, rows, head = case
    candidates = tuple(Capacity(left, left, left, left) for left, _ in rows)
    speeds = tuple(float(speed) for _, speed in rows)
    everyone = ((True,) * len(rows),) * len(rows)
    problem = Problem(tuple(costs), candidates, everyone, tuple(costs), head, speeds)

    def slowest(ends: tuple[int, ...]) -> float:
        return max(
            (sum(costs[start:end]) + head * (end == len(costs))) / speed
            for start, end, speed in zip((0, *ends[:-1]), ends, speeds, strict=True)
        )

    every = [(*cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), len(rows) - 1)]
    fitting = [
        ends
        for ends in every
        if all(problem.fits(i, s, e) for i, (s, e) in enumerate(zip((0, *ends[:-1]), ends, strict=True)))
    ]
    found = balance(problem, range(len(rows)))
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert slowest(found) == min(map(slowest, fitting))


def test_layers_that_differ_are_counted_one_by_one() -> None:
    model = ModelProfile("m", "d", "bfloat16", (10, 1, 1, 1, 10), (0,) * 5)
    found = plan([node(0, 12), node(1, 11)], model)
    assert [s.layers for s in found.stages] in ([(0, 2), (3, 4)], [(0, 1), (2, 4)], [(0, 3), (4, 4)])
    assert refused([node(0, 12), node(1, 10)], model).details["shortfall_bytes"] == 1


def test_embedding_head_kv_workspace_and_base_all_count() -> None:
    model = flat(
        4, 100, kv=(2, 2, 2, 2), embedding_bytes=50, head_bytes=30, shared_saving_bytes=20, common_bytes=5
    )
    need = 4 * 100 + 4 * 2 * 32 + 50 + 30 - 20 + 5 + 7
    found = plan([node(0, need, base=7)], model, concurrency=2)
    rank = found.stages[0].ranks[0]
    assert (rank.weight_bytes, rank.kv_bytes, rank.base_bytes, rank.total_bytes) == (465, 256, 7, need)
    assert refused([node(0, need - 1, base=7)], model, concurrency=2).details["shortfall_bytes"] == 1


def test_no_edge_over_a_link_that_one_side_does_not_see() -> None:
    nodes = [node(i, 21 * GB) for i in range(3)]
    cut = [LinkProfile("n0", "n1"), LinkProfile("n0", "n2"), LinkProfile("n1", "n2", fresh=False)]
    found = plan(nodes, flat(40, GB), cut)
    assert "n0" in found.nodes and len(found.nodes) == 2
    error = refused(nodes, flat(60, GB), cut)  # needs all three in a ring, and n1-n2 is one of its edges
    assert any("host1 and host2" in s for s in error.details["suggestions"])
    assert len(plan(nodes, flat(60, GB)).stages) == 3


def test_the_edge_back_to_the_first_node_needs_a_link_too() -> None:
    nodes = [node(i, 11 * GB) for i in range(4)]
    line = [LinkProfile("n0", "n1"), LinkProfile("n1", "n2"), LinkProfile("n2", "n3")]
    refused(nodes, flat(40, GB), line)
    ring = [*line, LinkProfile("n3", "n0")]
    assert_sound(plan(nodes, flat(40, GB), ring), nodes, flat(40, GB), ring)


def test_pins_are_kept_exactly() -> None:
    nodes = [node(i, 50 * GB) for i in range(3)]
    found = plan(nodes, flat(40, GB), layers=(Pin("host2", 0, 4), Pin("n1", 5, 39)))
    assert [(s.node, s.layers) for s in found.stages] == [("n2", (0, 4)), ("n1", (5, 39))]
    middle = plan(nodes, flat(40, GB), layers=(Pin("host0", 10, 19),))
    assert [s.layers for s in middle.stages] == [(0, 9), (10, 19), (20, 39)] and middle.stages[1].node == "n0"


def test_exclusions_get_nothing() -> None:
    nodes = [node(0, 50 * GB), node(1, 30 * GB), node(2, 30 * GB)]
    assert set(plan(nodes, flat(40, GB), exclude=("host0",)).nodes) == {"n1", "n2"}
    error = refused(nodes, flat(40, GB), exclude=("host0", "host1"))
    assert "it fits without --exclude host0" in error.details["suggestions"]


def test_a_node_may_be_named_by_the_beginning_of_its_id() -> None:
    nodes = [
        NodeBudget("32a8b21a76f2aaaa", "one", budget_bytes=50 * GB),
        NodeBudget("32a8b21a99999999", "two", budget_bytes=50 * GB),
    ]
    assert plan(nodes, flat(40, GB), exclude=("32a8b21a76f2",)).nodes == ("32a8b21a99999999",)
    with pytest.raises(InvalidRequest, match="2 members are called"):
        plan(nodes, flat(40, GB), exclude=("32a8b21a",))
    with pytest.raises(InvalidRequest, match="no member is called '32a8'"):
        plan(nodes, flat(40, GB), exclude=("32a8",))


def test_a_pin_that_leaves_layers_without_a_node_is_told_as_that() -> None:
    error = refused([node(0, 90 * GB)], flat(40, GB), layers=(Pin("host0", 0, 9),))
    assert "no node left" in error.message and "reach each other" not in error.message
    assert "it fits without --layers" in error.details["suggestions"]


def test_where_the_number_of_nodes_is_in_the_way_no_node_is_asked_for() -> None:
    nodes = [node(i, 15 * GB) for i in range(3)]
    error = refused(nodes, flat(40, GB), nodes=1)
    assert "it fits without --nodes" in error.details["suggestions"]
    assert not any("one more node" in s for s in error.details["suggestions"])


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"exclude": ("nobody",)}, "no member is called 'nobody'"),
        ({"layers": (Pin("nobody", 0, 1),)}, "no member is called 'nobody'"),
        ({"layers": (Pin("host0", 0, 40),)}, "layers 0-39"),
        ({"layers": (Pin("host0", 0, 1),), "exclude": ("host0",)}, "both layers and an exclusion"),
        ({"layers": (Pin("host0", 0, 1), Pin("n0", 2, 3))}, "layers twice"),
        ({"layers": (Pin("host0", 0, 1), Pin("n1", 2, 3)), "nodes": 1}, "nodes is 1"),
        ({"nodes": 41}, "41 nodes for 40 layers"),
        ({"context": 2_000_000}, "2000000"),
    ],
)
def test_a_wish_that_cannot_be_right_is_refused_by_name(wish: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        plan([node(0, 50 * GB), node(1, 50 * GB)], flat(40, GB), **wish)


def test_two_members_of_one_name_need_an_id() -> None:
    nodes = [NodeBudget("a1", "same", budget_bytes=50 * GB), NodeBudget("b2", "same", budget_bytes=50 * GB)]
    with pytest.raises(InvalidRequest, match="a1, b2"):
        plan(nodes, flat(40, GB), exclude=("same",))
    assert plan(nodes, flat(40, GB), exclude=("a1",)).nodes == ("b2",)


def test_a_node_that_does_not_run_the_dtype_is_not_used() -> None:
    nodes = [node(0, 90 * GB, dtypes=("float32",)), node(1, 50 * GB, dtypes=("float32", "bfloat16"))]
    assert plan(nodes, flat(40, GB)).nodes == ("n1",)
    with pytest.raises(InvalidRequest, match=r"n0 is given layers, and computes in float32, not in bfloat16"):
        plan(nodes, flat(40, GB), layers=(Pin("n0", 0, 11),))


# -- context --------------------------------------------------------------------------------------


def test_without_a_context_the_largest_that_fits_is_taken() -> None:
    model = flat(10, GB, kv=(1000,) * 10, max_context=32768)
    roomy = plan([node(0, 11 * GB)], model, context=None)
    assert roomy.context == 32768
    tight = plan([node(0, 10 * GB + 20_000 * 10_000)], model, context=None)
    assert tight.context == 20_000 // BLOCK_SIZE * BLOCK_SIZE
    assert tight.stages[0].ranks[0].total_bytes + BLOCK_SIZE * 10_000 > 10 * GB + 20_000 * 10_000


def test_the_largest_context_may_be_no_whole_block() -> None:
    model = flat(2, 10, kv=(1, 1), max_context=1000)
    assert plan([node(0, GB)], model, context=None).context == 1000
    assert plan([node(0, GB)], model, context=None).blocks == 63


def test_below_the_least_context_it_is_refused_with_one_that_fits() -> None:
    model = flat(10, GB, kv=(1000,) * 10, max_context=32768)
    error = refused([node(0, 10 * GB + 8000 * 10_000)], model, context=None)
    assert error.details["shortfall_bytes"] == (LEAST_CONTEXT - 8000) * 10_000
    assert "a smaller context: --context 8000 fits" in error.details["suggestions"]
    short = flat(10, GB, kv=(1000,) * 10, max_context=2048)
    assert plan([node(0, 10 * GB + 8000 * 10_000)], short, context=None).context == 2048


# -- refusal --------------------------------------------------------------------------------------


def test_a_refusal_says_how_much_is_missing_and_what_would_do() -> None:
    error = refused([node(0, 20 * GB, base=GB), node(1, 10 * GB, base=GB)], flat(40, GB))
    assert error.details["shortfall_bytes"] == 12 * GB
    assert any(s.startswith("one more node with 13000 MB") for s in error.details["suggestions"])
    rows = error.details["terms"]
    assert [r["node"] for r in rows] == ["host0", "host1", "not placed"]
    assert sum(r["weight_bytes"] for r in rows) == 40 * GB
    assert rows[0]["budget_bytes"] == 20 * GB and rows[0]["layers"] == "0-18"
    assert "12.0 GB short" in error.message


def test_the_shortfall_is_exact() -> None:
    nodes = [node(0, 24 * GB), node(1, 12 * GB), node(2, 3.9 * GB)]
    short = refused(nodes, flat(40, GB)).details["shortfall_bytes"]
    assert short == GB // 10
    enough = [*nodes[:2], node(2, 3.9 * GB + short)]
    assert_sound(plan(enough, flat(40, GB)), enough, flat(40, GB), mesh(enough))


def test_fewer_full_contexts_are_suggested() -> None:
    model = flat(2, GB, kv=(1000, 1000))
    error = refused([node(0, 2 * GB + 5 * 2000 * 1024)], model, context=1024, concurrency=8)
    assert "fewer full contexts at once: --concurrency 5 fits" in error.details["suggestions"]


def test_a_smaller_dtype_is_suggested_when_it_fits() -> None:
    nodes = [node(0, 25 * GB)]
    small = ModelProfile("m", "d", "int8", (GB // 2,) * 40, (0,) * 40)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(nodes, flat(40, GB), [], Settings(context=16), EPOCH, smaller=(small,))
    assert "smaller weights: --dtype int8 fits" in caught.value.details["suggestions"]


def test_a_cluster_of_nobody_is_a_refusal() -> None:
    error = refused([], flat(40, GB))
    assert error.details["shortfall_bytes"] == 40 * GB
    assert "no members" in error.message


def test_more_nodes_asked_for_than_there_are() -> None:
    error = refused([node(0, 90 * GB), node(1, 90 * GB)], flat(40, GB), nodes=3)
    assert (
        error.details["shortfall_bytes"] == 0 and "3 nodes are asked for and 2 can be used" in error.message
    )
    assert "it fits without --nodes" in error.details["suggestions"]
    assert any(s.startswith("one more node with ") for s in error.details["suggestions"])


# -- properties -----------------------------------------------------------------------------------

small_models = st.builds(
    lambda sizes, kv, embedding, head, tied, common: ModelProfile(
        "m",
        "d",
        "bfloat16",
        tuple(sizes),
        (kv,) * len(sizes),
        embedding,
        head,
        min(embedding, head) * tied,
        common,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([0, 0, 1]),
    st.integers(0, 8),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 2),
)
small_clusters = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=4).map(
    lambda rows: [node(i, budget, base=base) for i, (budget, base) in enumerate(rows)]
)


def least_stages(
    nodes: list[NodeBudget], model: ModelProfile, links: list[LinkProfile], context: int
) -> int | None:
    """The oracle: every subset, order and cut."""
    pairs = {frozenset((link.a, link.b)) for link in links if link.fresh}
    blocks = blocks_for(context, 1)
    for count in range(1, min(len(nodes), model.layers) + 1):
        for order in itertools.permutations(nodes, count):
            ring = zip(order, order[1:] + order[:1], strict=True)
            if count > 1 and not all(frozenset((a.node, b.node)) in pairs for a, b in ring):
                continue
            for cuts in itertools.combinations(range(1, model.layers), count - 1):
                ends = (*cuts, model.layers)
                starts = (0, *cuts)
                if all(
                    n.base_bytes + model.weight_bytes(s, e - 1) + kv_bytes(model, s, e - 1, blocks)
                    <= n.budget_bytes
                    for n, s, e in zip(order, starts, ends, strict=True)
                ):
                    return count
    return None


@settings(max_examples=400, deadline=None)
@given(small_clusters, small_models, st.data())
def test_a_plan_is_found_whenever_there_is_one_and_has_the_fewest_stages(
    nodes: list[NodeBudget], model: ModelProfile, data: st.DataObject
) -> None:
    links = [link for link in mesh(nodes) if data.draw(st.integers(0, 4)) or data.draw(st.booleans())]
    expected = least_stages(nodes, model, links, 16)
    try:
        found = plan(nodes, model, links)
    except DoesNotFit as error:
        assert expected is None
        extra = error.details["shortfall_bytes"]
        if extra:
            assert any(
                least_stages(
                    [*nodes[:i], node(i, n.budget_bytes + extra, n.base_bytes), *nodes[i + 1 :]],
                    model,
                    links,
                    16,
                )
                for i, n in enumerate(nodes)
            )
            assert not any(
                least_stages(
                    [*nodes[:i], node(i, n.budget_bytes + extra - 1, n.base_bytes), *nodes[i + 1 :]],
                    model,
                    links,
                    16,
                )
                for i, n in enumerate(nodes)
            )
    else:
        assert len(found.stages) == expected
        assert_sound(found, nodes, model, links)
        assert plan(list(reversed(nodes)), model, list(reversed(links))) == found


@settings(max_examples=150, deadline=None)
@given(small_clusters, small_models, st.integers(0, 40))
def test_another_node_never_takes_a_fit_away(
    nodes: list[NodeBudget], model: ModelProfile, budget: int
) -> None:
    links = mesh(nodes)
    if least_stages(nodes, model, links, 16) is None:
        return
    more = [*nodes, node(9, budget)]
    assert len(plan(more, model).stages) <= len(plan(nodes, model).stages)


@settings(max_examples=150, deadline=None)
@given(small_clusters, small_models, st.data())
def test_pins_never_break_a_plan(nodes: list[NodeBudget], model: ModelProfile, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, model.layers - 1))
    pin = Pin("n0", first, data.draw(st.integers(first, model.layers - 1)))
    try:
        found = plan(nodes, model, layers=(pin,))
    except DoesNotFit:
        return
    assert_sound(found, nodes, model, mesh(nodes))
    assert [s.layers for s in found.stages if s.node == "n0"] == [(pin.first, pin.last)]


@pytest.mark.parametrize("budget", [2.9, 4.2, 5.0, 9.0, 60.0])
def test_thirty_two_nodes_and_128_layers_in_a_second(budget: float) -> None:
    nodes = [node(i, (budget + i % 5 / 4) * GB, base=GB // 3) for i in range(32)]
    model = flat(128, GB, kv=(4096,) * 128, embedding_bytes=GB // 2, head_bytes=GB // 2, max_context=131072)
    started = time.process_time()
    try:
        found = plan(nodes, model, context=None)
    except DoesNotFit as error:
        assert budget < 5
        assert error.details["shortfall_bytes"] > 0
    else:
        assert budget >= 5
        assert_sound(found, nodes, model, mesh(nodes))
    assert time.process_time() - started < 1.0
