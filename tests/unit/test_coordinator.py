"""Who coordinates, and one proposal's course: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.cluster.leader import choose
from p2pshard_node.cluster.planner import meant_now, usable_now
from p2pshard_node.cluster.proposal import Proposal

from p2pshard.errors import DoesNotFit, InvalidRequest, NodeUnreachable, NotReady
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.planning.settings import Pin, Settings

MEMBERS = {"a", "b", "c"}


def test_nobody_is_appointed_before_there_was_time_to_hear_of_somebody() -> None:
    assert choose("b", "", MEMBERS, {}, settled=False) == ""
    assert choose("b", "", MEMBERS, {}, settled=True) == "a"


def test_a_returning_lower_id_follows_the_incumbent() -> None:
    claims = {"b": "b", "c": "b"}
    assert choose("a", "", MEMBERS, claims, settled=True) == "b"
    assert choose("c", "b", MEMBERS, {"a": "", "b": "b"}, settled=True) == "b"


def test_when_the_coordinator_is_gone_the_lowest_takes_over() -> None:
    # once nobody hears of it any more
    assert choose("b", "a", {"b", "c"}, {"a": "a", "c": "a"}, settled=True) == ""
    assert choose("b", "", {"b", "c"}, {"a": "a", "c": ""}, settled=True) == "b"
    assert choose("c", "", {"b", "c"}, {"a": "a", "b": ""}, settled=True) == "b"


def test_who_cannot_reach_a_coordinator_that_another_follows_appoints_nobody() -> None:
    """a-b and a-c, but not b-c: b coordinates, and stays the only one."""
    assert choose("c", "b", {"a", "c"}, {"a": "b"}, settled=True) == ""
    assert choose("a", "b", {"a", "b", "c"}, {"b": "b", "c": ""}, settled=True) == "b"
    assert choose("b", "b", {"a", "b"}, {"a": "b"}, settled=True) == "b"


def test_halves_that_meet_keep_the_one_that_more_follow() -> None:
    members = {"a", "b", "c", "d", "e"}
    claims = {"a": "a", "b": "a", "d": "c", "e": "c"}
    assert choose("c", "c", members, claims, settled=True) == "c"
    assert choose("a", "a", members, {"b": "a", "c": "c", "d": "c", "e": "c"}, settled=True) == "c"
    assert choose("a", "a", {"a", "b"}, {"b": "b"}, settled=True) == "a"  # a tie: the lower id


@given(
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["", *"abcde"]), min_size=1),
    st.lists(st.sampled_from("abcde"), max_size=40),
)
def test_all_come_to_follow_one_whatever_they_believed(followed: dict[str, str], order: list[str]) -> None:
    members = set(followed)

    def turn(node: str) -> None:
        claims = {n: f for n, f in followed.items() if n != node}
        followed[node] = choose(node, followed[node], members, claims, settled=True)

    for node in order:
        if node in members:
            turn(node)
    for _ in range(6):
        for node in sorted(members):
            turn(node)
    assert len(set(followed.values())) == 1
    assert set(followed.values()) <= members


def plan() -> Plan:
    stages = (Stage((0, 0), True, False, (Rank("a"),)), Stage((1, 1), False, True, (Rank("b"),)))
    return Plan((Replica(stages),), Epoch(1, "a"), "tolerant", "f" * 64, "m", "float32", 64, 1, 16, 4, 32, 2)


def test_nothing_is_committed_before_all_have_prepared() -> None:
    proposal = Proposal(plan())
    assert proposal.outbox() == {"a": "prepare", "b": "prepare"}
    proposal.on_prepared("a")
    assert proposal.outbox() == {"b": "prepare"}
    proposal.on_prepared("b")
    assert proposal.outbox() == {"a": "commit", "b": "commit"}
    proposal.on_committed("a")
    proposal.on_committed("a")  # an answer that comes twice
    assert proposal.outbox() == {"b": "commit"}
    proposal.on_committed("b")
    assert proposal.phase == "committed" and proposal.outbox() == {}


@pytest.mark.parametrize("prepared", [(), ("a",), ("a", "b")])
def test_one_refusal_aborts_all_that_have_not_committed(prepared: tuple[str, ...]) -> None:
    proposal = Proposal(plan())
    for node in prepared:
        proposal.on_prepared(node)
    if len(prepared) == 2:
        proposal.on_committed("a")
    proposal.on_refused("b", DoesNotFit("no room"))
    expected = {"b": "abort"} if len(prepared) == 2 else {"a": "abort", "b": "abort"}
    assert proposal.outbox() == expected and isinstance(proposal.error, DoesNotFit)
    proposal.on_prepared("b")
    assert proposal.outbox() == expected  # a late answer revives nothing


def test_an_excluded_node_that_has_left_is_no_fault_and_a_pinned_one_is_waited_for() -> None:
    settings = Settings(nodes=2, exclude=("ann", "bob"))
    assert meant_now(settings, {"a1", "ann", "c1", "cid"}) == Settings(nodes=2, exclude=("ann",))
    pinned = Settings(layers=(Pin("bob", 0, 3),))
    assert meant_now(pinned, {"b1", "bob"}) == pinned
    with pytest.raises(NodeUnreachable, match="layers 0-3 are pinned to node bob"):
        meant_now(pinned, {"a1", "ann"})


def test_a_member_without_a_measure_may_be_left_out_by_name_and_is_waited_for_with_layers() -> None:
    members = {"a1": "ann", "b1": "bob", "c1": "cid"}
    settings = Settings(layers=(Pin("ann", 0, 3),), exclude=("b1", "cid"))
    assert usable_now(settings, members, {"a1", "c1"}) == Settings(layers=settings.layers, exclude=("cid",))
    with pytest.raises(NotReady, match="layers 0-3 are given to node ann, which has not measured"):
        usable_now(settings, members, {"b1", "c1"})
    with pytest.raises(InvalidRequest, match="no member is called 'eve'; members are ann, bob, cid"):
        usable_now(Settings(exclude=("eve",)), members, {"a1"})
    with pytest.raises(InvalidRequest, match="2 members are called 'ann'; use an id: a1, a2"):
        usable_now(settings, {**members, "a2": "ann"}, {"a1"})
