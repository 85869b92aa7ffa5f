"""What a plan is by its digest, and what its loaded stages make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage

SAME, OTHER = ("invariant", "ab"), ("invariant", "cd")


def plan(wire: str = "raw", numerics: str = "invariant") -> Plan:
    ranks = [(Rank(node, "cpu", 1.0, (), 1, 1, 1, 1, 9),) for node in ("a", "b")]
    stages = (Stage((0, 0), True, False, ranks[0], wire), Stage((1, 1), False, True, ranks[1]))
    return Plan((Replica(stages),), Epoch(1, "a"), numerics, "m", "tiny", "int8", 64, 1, 16, 4, 8, 2)


@pytest.mark.parametrize(
    ("stages", "wire", "numerics"),
    [
        ([SAME, SAME], "raw", "invariant"),
        ([SAME, OTHER], "raw", "tolerant"),
        ([SAME, ("tolerant", "ab")], "raw", "tolerant"),
        ([("tolerant", "ab")] * 2, "raw", "tolerant"),
        ([("invariant", "")] * 2, "raw", "tolerant"),
        ([SAME, SAME], "q8", "tolerant"),
        ([], "raw", "tolerant"),
    ],
)
def test_numerics_are_what_all_stages_measured(
    stages: list[tuple[str, str]], wire: str, numerics: str
) -> None:
    expected = plan(wire, numerics="tolerant")
    measured = expected.measured(stages)
    assert measured.numerics == numerics
    assert measured.digest() == expected.digest() == plan(wire).digest()
    measured.check()


def test_a_digest_tells_every_decision_apart() -> None:
    one = plan()
    others = [
        replace(one, epoch=Epoch(2, "a")),
        replace(one, dtype="float32"),
        replace(one, blocks=5),
        plan("q8"),
        replace(one, manifest="n"),
    ]
    assert len({p.digest() for p in (one, *others)}) == 6
    assert Plan.from_json(one.to_json()).digest() == Plan.from_proto(one.to_proto()).digest() == one.digest()
