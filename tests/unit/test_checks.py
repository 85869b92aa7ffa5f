"""What a node says of itself is bounded, whoever says it."""

from __future__ import annotations

from typing import Any

import pytest
from p2pshard_node.cluster.checks import checked_info, word
from p2pshard_node.engine.fused.prepare import COMPILING

from p2pshard.errors import InvalidRequest
from p2pshard.transport.generated import control_pb2 as pb


def info(**changes: Any) -> pb.NodeInfo:
    good: dict[str, Any] = {"id": "a1", "nonce": "b2", "name": "desk", "incarnation": 3}
    return pb.NodeInfo(**{**good, **changes})


def test_what_a_node_says_passes() -> None:
    said = info(
        addresses=[pb.Address(host="192.168.1.2", port=7333)],
        devices=[pb.DeviceProfile(device="cpu", dtypes=["float32", "int4"])],
        workers=[pb.WorkerCounts(deployment="x" * 64)],
        loads=[pb.StageLoad(deployment="x" * 64, progress=pb.Progress(phase=COMPILING))],
    )
    assert checked_info(said) is said


@pytest.mark.parametrize(
    "bad",
    [
        {"id": ""},
        {"id": "../x"},
        {"nonce": ""},
        {"name": "x" * 129},
        {"name": "a\nb"},
        {"incarnation": 2**62},
        {"addresses": [pb.Address(host="a/b", port=1)]},
        {"addresses": [pb.Address(host="a", port=65536)]},
        {"addresses": [pb.Address(host="a", port=1)] * 17},
        {"devices": [pb.DeviceProfile(name="x" * 129)]},
        {"devices": [pb.DeviceProfile(dtypes=["x"] * 33)]},
        {"devices": [pb.DeviceProfile(dtypes=["x" * 129])]},
        {"workers": [pb.WorkerCounts(deployment="x" * 129)]},
        {"workers": [pb.WorkerCounts(deployment="x" * 100)] * 1025},
        {"loads": [pb.StageLoad(deployment="x" * 129)]},
        {"loads": [pb.StageLoad(deployment="x", progress=pb.Progress(phase="x" * 129))]},
    ],
    ids=str,
)
def test_what_cannot_be_right_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot be right: {next(iter(bad))}") as refused:
        checked_info(info(**bad))
    assert refused.value.details["fields"] == [*bad]


def test_what_is_too_large_in_all_is_refused() -> None:
    workers = [pb.WorkerCounts(deployment="é" * 128)] * 1024  # each is in order
    with pytest.raises(InvalidRequest, match="cannot be right: 268304 bytes"):
        checked_info(info(workers=workers))


def test_words_of_others_are_made_to_fit() -> None:
    assert checked_info(info(name=word("GPU\n" + "x" * 500))).name == "GPU " + "x" * 124
