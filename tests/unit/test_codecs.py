"""Codecs give back what they took within their bounds, and refuse what no encoder writes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.codecs import CODECS, GROUP, codec
from p2pshard.transport.frames import Assembler, Frame, Limits, RowHeader, encode

HIDDEN = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 6), st.integers(1, 3 * GROUP + 5)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def packed(name: str, array: Any) -> bytearray:
    data = bytearray(b"".join(codec(name).encode(array)))
    assert len(data) == codec(name).nbytes("float32", array.shape)
    return data


def round_trip(name: str, array: Any) -> Any:
    front = bytearray(8)  # as token ids come before
    return codec(name).decode(front + packed(name, array), 8, "float32", array.shape)


@given(hidden_TD=HIDDEN)
@settings(deadline=None)
def test_raw_loses_nothing(hidden_TD: Any) -> None:
    got = round_trip("raw", hidden_TD)
    assert got.tobytes() == hidden_TD.tobytes() and got.flags.writeable


@given(hidden_TD=HIDDEN)
@settings(deadline=None)
def test_bf16_rounds_as_torch_does(hidden_TD: Any) -> None:
    got = round_trip("bf16", hidden_TD)
    expected = torch.from_numpy(hidden_TD).to(torch.bfloat16).float().numpy()
    assert got.tobytes() == expected.tobytes() and got.flags.writeable


def test_bf16_keeps_what_is_no_number() -> None:
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32)
    got = round_trip("bf16", bits.view(np.float32)[None])[0]
    assert np.isnan(got[:3]).all() and got[3] == np.inf and got[4] == -np.inf


@given(hidden_TD=HIDDEN)
@settings(deadline=None, max_examples=300)
def test_q8_is_off_by_half_a_scale_of_its_group(hidden_TD: Any) -> None:
    got = round_trip("q8", hidden_TD)
    assert got.shape == hidden_TD.shape and got.dtype == np.float32 and got.flags.writeable
    for first in range(0, hidden_TD.shape[1], GROUP):
        ours, theirs = hidden_TD[:, first : first + GROUP].astype(np.float64), got[:, first : first + GROUP]
        largest_T1 = np.abs(ours).max(axis=1, keepdims=True, initial=0)
        bound = 0.501 * 1.008 * largest_T1 / 127 + 2.0**-132  # the last: half of the smallest scale
        assert (np.abs(theirs - ours) <= bound).all()


def test_q8_is_a_quarter_of_raw_and_a_row_does_not_depend_on_others() -> None:
    hidden_TD = np.random.default_rng(1).standard_normal((9, 1536)).astype(np.float32)
    hidden_TD[4, 7] = 3000  # a column as real models have them
    assert len(packed("q8", hidden_TD)) < 0.27 * len(packed("raw", hidden_TD))
    whole = round_trip("q8", hidden_TD)
    assert np.array_equal(whole[4:5], round_trip("q8", hidden_TD[4:5]))
    error = np.linalg.norm(whole - hidden_TD, axis=1) / np.linalg.norm(hidden_TD, axis=1)
    assert error.max() < 0.01


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xBF80, 0x8001])
def test_q8_refuses_scales_that_no_encoder_writes(bits: int) -> None:
    data = packed("q8", np.ones((2, 40), np.float32))
    data[2:4] = bits.to_bytes(2, "little")
    with pytest.raises(ProtocolError, match="scale"):
        codec("q8").decode(data, 0, "float32", (2, 40))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("array", [np.ones((3, 70), np.float32)[:, ::2], np.zeros((0, 35), np.float32)])
def test_strided_and_empty_arrays_pass(name: str, array: Any) -> None:
    assert np.array_equal(round_trip(name, array), round_trip(name, array.copy()))


# -- in frames ------------------------------------------------------------------------------------
LIMITS = Limits(2048, 512, 100, 64, 4096, 2, wires=("raw", "bf16", "q8"))


def four_mebibytes() -> Frame:
    return Frame(
        "step",
        Epoch(1, "n0"),
        1,
        rows=(RowHeader(1, 0, 2048),),
        token_ids_T=np.zeros(2048, np.int32),
        hidden_TD=np.random.default_rng(2).standard_normal((2048, 512), np.float32),
    )


@pytest.mark.parametrize("name", CODECS)
def test_a_frame_comes_as_the_plan_allows_or_not_at_all(name: str) -> None:
    frame = four_mebibytes()
    messages = list(encode(frame, wire=name))
    assembler = Assembler(LIMITS)
    got = [f for m in messages if (f := assembler.feed(m)) is not None]
    assert frame.hidden_TD is not None
    assert np.array_equal(got[0].hidden_TD, round_trip(name, frame.hidden_TD))
    raw_only = Assembler(Limits(2048, 512, 100, 64, 4096, 2))
    if name != "raw":
        with pytest.raises(ProtocolError, match="plan allows raw"):
            raw_only.feed(messages[0])


def test_a_frame_is_copied_once_on_each_side() -> None:
    """Beside what gRPC holds (the messages), 4 MiB of hidden states cost one message at the sender, one array here."""
    frame, assembler = four_mebibytes(), Assembler(LIMITS)
    messages = list(encode(frame))
    tracemalloc.start()
    for _ in encode(frame):
        pass
    sent = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    got = [f for m in messages if (f := assembler.feed(m)) is not None]
    taken = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert got[0].hidden_TD is not None and got[0].hidden_TD.nbytes == 4 << 20
    assert sent < (2 << 20) + (64 << 10), "the message under way and the one before it"
    assert taken < (4 << 20) + (128 << 10)
