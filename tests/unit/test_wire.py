"""The form of hidden states on each edge follows from what its link carries, and a plan says what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2pshard.cli.output import wire_lines
from p2pshard.errors import InvalidRequest, ProtocolError
from p2pshard.planning.plan import WIRES, Epoch, Plan, Rank, Replica, Stage
from p2pshard.planning.profiles import LinkProfile
from p2pshard.planning.settings import Settings
from p2pshard.planning.wire import choose_wire, token_bytes, wire_rows, with_wires
from p2pshard.transport.codecs import CODECS
from p2pshard.transport.frames import Limits

QWEN = 1536
"""Hidden size of Qwen2.5-1.5B."""


def plan_of(*wires: str, numerics: str = "tolerant") -> Plan:
    last = len(wires)
    stages = tuple(
        Stage((i, i), i == 0, i == last, (Rank(f"n{i}"),), wire) for i, wire in enumerate((*wires, "raw"))
    )
    return Plan(
        (Replica(stages),), Epoch(1, "n0"), numerics, "m", "tiny", "float32", 64, 1, 16, 4, 8, last + 1
    )


def link(a: str, b: str, mbps: float) -> LinkProfile:
    return LinkProfile(a, b, 1.0, mbps)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("hidden", [32, 576, 1536])
def test_the_planner_counts_bytes_as_the_codec_writes_them(wire: str, hidden: int) -> None:
    assert CODECS[wire].nbytes("float32", (10, hidden)) == 10 * token_bytes(wire, hidden)


@pytest.mark.parametrize(
    ("mbps", "expected"), [(0, "raw"), (1000, "raw"), (100, "raw"), (49, "bf16"), (20, "q8"), (1, "q8")]
)
def test_a_slow_link_gets_what_it_carries(mbps: float, expected: str) -> None:
    assert choose_wire("auto", link("a", "b", mbps), QWEN) == expected
    assert choose_wire("auto", None, QWEN) == "raw"
    assert all(choose_wire(wire, link("a", "b", mbps), QWEN) == wire for wire in WIRES)


def test_each_edge_has_its_own_form_and_the_head_none() -> None:
    links = [link("n1", "n0", 20), link("n1", "n2", 1000)]
    made = with_wires(plan_of("raw", "raw"), "auto", links, QWEN)
    assert [s.wire for s in made.stages] == ["q8", "raw", "raw"]
    made.check()
    assert Limits.of(made, hidden_size=8, vocab_size=9).wires == ("q8", "raw")
    asked = with_wires(plan_of("raw", "raw"), "bf16", links, QWEN)
    assert [s.wire for s in asked.stages] == ["bf16", "bf16", "raw"]


def test_an_invariant_plan_stays_raw_unless_another_form_is_asked_for_by_name() -> None:
    plan, slow = plan_of("raw", numerics="invariant"), [link("n0", "n1", 1)]
    assert with_wires(plan, "auto", slow, QWEN) == plan == with_wires(plan, "raw", slow, QWEN)
    asked = with_wires(plan, "q8", slow, QWEN)
    assert asked.numerics == "tolerant" and asked.stages[0].wire == "q8"
    with pytest.raises(ProtocolError, match="may not"):
        plan_of("q8", numerics="invariant").check()


def test_a_plan_with_forms_survives_and_a_raw_one_has_the_digest_of_before() -> None:
    for plan in (plan_of("q8", "raw"), plan_of("raw", "raw")):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert Plan.from_proto(plan.to_proto()) == plan
    assert plan_of("q8", "raw").digest() != plan_of("raw", "raw").digest()
    assert "wire" not in json.dumps(plan_of("raw", "raw").to_json())


def test_forms_that_this_build_does_not_have_are_refused() -> None:
    plan = plan_of("raw")
    stage = replace(plan.stages[0], wire="zip")
    with pytest.raises(ProtocolError, match="'zip'"):
        replace(plan, replicas=(Replica((stage, plan.stages[1])),)).check()
    with pytest.raises(ProtocolError, match="may not"):
        head = replace(plan.stages[1], wire="q8")
        replace(plan, replicas=(Replica((plan.stages[0], head)),)).check()
    with pytest.raises(InvalidRequest, match="wire is 'zip'"):
        Settings.from_json('{"wire": "zip"}')
    assert Settings.from_json('{"wire": null}').wire == "auto"


def test_a_plan_says_what_each_form_helps_and_costs() -> None:
    links = [link("n0", "n1", 20), LinkProfile("n1", "n2")]
    first, second = wire_rows(plan_of("q8", "raw"), links, QWEN)
    assert (first["from"], first["to"], first["wire"]) == ("n0", "n1", "q8")
    assert first["raw_prefill_ms"] == pytest.approx(2000 * QWEN * 32 / 20e3, rel=1e-3)
    assert first["prefill_ms"] == pytest.approx(first["raw_prefill_ms"] * 1.0625 / 4, rel=1e-3)
    assert first["error_percent"] > second["error_percent"] == 0
    assert second["prefill_ms"] is None, "not measured"
    (line,) = wire_lines([first, second], {"n0": "desk", "n1": "laptop"})
    assert line == (
        "desk -> laptop: hidden states as q8, about 1 % off each; "
        "2,000 prompt tokens take its 20 Mbit/s 1.3 s, not 4.9 s"
    )
