"""Where the time of steps went: the breakdown adds up, whatever the steps were."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.worker.trace import Trip, TripWindow

from p2pshard.trace import PhaseTrace, Spread, Trace
from p2pshard.transport.frames import Arrival, Hop


def trip(
    sent: float = 0.0,
    *,
    round_trip_ms: float = 10.0,
    stages: int = 2,
    tokens: int = 1,
    prefill: bool = False,
    compute_us: int = 3000,
) -> Trip:
    hops = tuple(
        Hop(i, 500, compute_us, 200 if i == stages - 1 else 0, 40 if i else 0, 2400 * tokens if i else 0)
        for i in range(stages)
    )
    back = Arrival(100 * tokens, 60) if stages > 1 else None
    return Trip(sent, sent + round_trip_ms / 1e3, tokens, prefill, hops, back)


def traced(*trips: Trip, stages: int = 2, under_way: bool = False) -> Trace:
    window = TripWindow(stages)
    for one in trips:
        window.add(one)
    return window.report(under_way=under_way)


def decode(*trips: Trip, stages: int = 2) -> PhaseTrace:
    phase = traced(*trips, stages=stages).decode
    assert phase is not None
    return phase


def test_a_round_trip_is_divided_without_rest() -> None:
    phase = decode(trip())
    first, last = phase.stages
    assert (first.queue_ms.median, first.compute_ms.median, first.sample_ms.median) == (0.5, 3.0, 0.0)
    assert (last.queue_ms.median, last.compute_ms.median, last.sample_ms.median) == (0.5, 3.0, 0.2)
    # serialising belongs to the edge that leads to a stage; to the first leads the one from the last
    assert (first.serialise_ms.median, last.serialise_ms.median) == (0.06, 0.04)
    staged = sum(
        getattr(s, k).median
        for s in phase.stages
        for k in ("queue_ms", "compute_ms", "sample_ms", "serialise_ms")
    )
    assert staged + 2 * phase.wire_ms.median == pytest.approx(phase.round_trip_ms.median)
    assert phase.hop_overhead_ms.median == pytest.approx((10 - 2 * 0.5 - 2 * 3 - 0.2) / 2)


def test_bytes_are_of_each_edge_and_token() -> None:
    phase = decode(trip(tokens=4), trip(1e-3, tokens=1))
    assert [s.bytes_per_token for s in phase.stages] == [100.0, 2400.0]
    assert (phase.steps, phase.tokens) == (2, 5)


def test_a_stage_is_busy_for_what_it_computes_while_steps_are_under_way() -> None:
    # two steps overlap by 5 ms, then nothing for 85 ms, which is nobody's idleness
    phase = decode(trip(0.0), trip(0.005), trip(0.1))
    assert phase.wall_s == pytest.approx(0.025)
    assert phase.stages[0].busy == pytest.approx(3 * 3.0 / 25)
    assert phase.stages[1].busy == pytest.approx(3 * 3.2 / 25)


def test_a_single_stage_has_no_edge() -> None:
    (stage,) = decode(trip(stages=1), stages=1).stages
    assert (stage.bytes_per_token, stage.serialise_ms) == (0.0, Spread(0.0, 0.0))


def test_prompts_are_told_apart() -> None:
    trace = traced(trip(prefill=True, tokens=64, compute_us=9000, round_trip_ms=30.0), trip(0.03))
    assert trace.prefill is not None and trace.decode is not None
    assert trace.prefill.stages[0].compute_ms.median == 9.0
    assert trace.decode.stages[0].compute_ms.median == 3.0
    assert traced(trip()).prefill is None


def test_a_pause_begins_a_new_spell() -> None:
    window = TripWindow(2)
    for sent in (0.0, 0.5, 1.4):  # gaps below a second
        window.add(trip(sent))
    assert window.report(under_way=False).spell == 1
    window.add(trip(2.5, compute_us=1000))
    trace = window.report(under_way=True)
    assert (trace.spell, trace.under_way) == (2, True)
    assert trace.decode is not None and trace.decode.steps == 1
    assert trace.decode.stages[0].compute_ms.median == 1.0


def test_only_the_last_steps_are_kept() -> None:
    phase = decode(*(trip(i / 100, compute_us=1000 if i < 300 else 2000) for i in range(600)))
    assert phase.steps == 256
    assert phase.stages[0].compute_ms == Spread(2.0, 2.0)


@pytest.mark.parametrize("hops", [(), (Hop(1, 0, 0), Hop(0, 0, 0)), (Hop(0, 0, 0),) * 3])
def test_hops_that_are_not_the_plans_are_left_out(hops: tuple[Hop, ...]) -> None:
    assert traced(replace(trip(), hops=hops)).decode is None


times = st.integers(0, 10**7)
trips = st.builds(
    lambda sent, took, tokens, prefill, a, b, back: Trip(
        sent, sent + took, tokens, prefill, (Hop(0, *a), Hop(1, *b)), back
    ),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(1, 512),
    st.booleans(),
    st.tuples(times, times, times, times, times),
    st.tuples(times, times, times, times, times),
    st.one_of(st.none(), st.builds(Arrival, times, times)),
)


@given(st.lists(trips, max_size=20))
def test_whatever_the_steps_say_the_trace_is_sane_and_survives_json(steps: list[Trip]) -> None:
    trace = traced(*steps)
    for phase in (trace.decode, trace.prefill):
        if phase is None:
            continue
        assert phase.wall_s <= sum(t.returned - t.sent for t in steps) + 1e-6
        assert phase.wire_ms.median >= 0 and phase.hop_overhead_ms.median >= phase.wire_ms.median - 1e-9
        assert all(0 <= s.busy <= 1 for s in phase.stages)
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


@pytest.mark.parametrize(
    ("values", "median", "p95"),
    [([], 0, 0), ([3], 3, 3), ([1, 2], 1.5, 2), ([5, 1, 3], 3, 5), (list(range(1, 101)), 50.5, 95)],
)
def test_spread(values: list[float], median: float, p95: float) -> None:
    assert Spread.of(values) == Spread(median, p95)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_spread_is_within_its_values(values: list[float]) -> None:
    spread = Spread.of(reversed(values))
    assert min(values) <= spread.median <= spread.p95 <= max(values)
    assert sum(v <= spread.p95 for v in values) >= 0.95 * len(values)
