"""What one worker needs while it serves a stage and has the next one beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pshard.planning.handover import together
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage

BASE, KV, WORK, LAYER, END = 100, 10, 5, 20, 50


def plan(first: int, last: int, *, embedding: bool = False, head: bool = False, blocks: int = 4) -> Plan:
    weights = (last - first + 1) * LAYER + END * (embedding + head)
    rank = Rank("a", weight_bytes=weights, kv_bytes=KV, workspace_bytes=WORK, base_bytes=BASE)
    stage = Stage((first, last), embedding, head, (rank,))
    return Plan(
        (Replica((stage,)),), Epoch(1, "a"), "tolerant", "f" * 64, "m", "int8", 64, 1, 16, blocks, 32, 30
    )


@pytest.mark.parametrize(
    ("old", "new", "weights", "pools"),
    [
        (plan(10, 19), plan(10, 19), 10 * LAYER, 1),  # as it is
        (plan(10, 19), plan(10, 19, blocks=8), 10 * LAYER, 2),  # another pool over the same weights
        (plan(10, 19), plan(10, 24), 15 * LAYER, 2),
        (plan(10, 19), plan(12, 15), 10 * LAYER, 2),
        (plan(0, 9, embedding=True), plan(0, 14, embedding=True), 15 * LAYER + END, 2),
        (plan(20, 28), plan(20, 29, head=True), 10 * LAYER + END, 2),
        # an embedding that may be the head too is read again
        (plan(0, 9, embedding=True), plan(0, 9, embedding=True, head=True), 20 * LAYER + 3 * END, 2),
        (plan(10, 19), plan(15, 24), 20 * LAYER, 2),  # in part: counted twice
    ],
)
def test_weights_of_both_are_counted_once_and_pools_each(
    old: Plan, new: Plan, weights: int, pools: int
) -> None:
    assert together(old, 0, new, 0) == BASE + weights + pools * (KV + WORK)


def test_the_extent_says_what_is_made_for_what() -> None:
    one = plan(10, 19)
    assert one.extent(0) == replace(one, epoch=Epoch(2, "b"), context=32).extent(0)
    assert one.extent(0) != plan(10, 18).extent(0)
