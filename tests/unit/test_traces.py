"""A trace goes from a worker's message through gossip into `status` without loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.cluster.traces import trace_to_json, trace_to_proto

from p2pshard.trace import PhaseTrace, Spread, StageTrace, Trace
from p2pshard.transport.generated import control_pb2 as pb

numbers = st.floats(0, 1e9)
counts = st.integers(0, 2**32 - 1)
spreads = st.builds(Spread, numbers, numbers)
stages = st.builds(StageTrace, spreads, spreads, spreads, spreads, numbers, numbers)
phases = st.builds(
    PhaseTrace, counts, counts, numbers, spreads, spreads, spreads, st.lists(stages, min_size=1).map(tuple)
)
traces = st.builds(Trace, counts, st.booleans(), st.none() | phases, st.none() | phases)


@given(traces)
def test_a_trace_survives_gossip_and_status(trace: Trace) -> None:
    proto = trace_to_proto(trace.to_json())
    assert proto is not None
    counted = pb.WorkerCounts.FromString(pb.WorkerCounts(trace=proto).SerializeToString())
    assert Trace.from_json(trace_to_json(counted.trace)) == trace


def test_a_worker_that_does_not_drive_has_none() -> None:
    assert trace_to_proto(None) is None
    assert not pb.WorkerCounts(trace=trace_to_proto(None)).HasField("trace")
