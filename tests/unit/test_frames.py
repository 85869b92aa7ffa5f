"""Frames survive the round trip, and nothing but whole, allowed frames comes out of an assembler."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pshard.errors import ProtocolError, StageLost
from p2pshard.planning.plan import Epoch
from p2pshard.sampling import SamplingParams
from p2pshard.transport.frames import (
    VERSION,
    Admitted,
    Assembler,
    Deltas,
    Frame,
    Hello,
    Hop,
    Limits,
    RowHeader,
    SampledToken,
    encode,
)

LIMITS = Limits(chunk_tokens=64, hidden_size=8, vocab_size=100, blocks=32, context=256, stages=3)
EPOCH = Epoch(3, "node-a")
PREFIX = 24
"""Bytes of a frame's first message before its header."""


def assemble(messages: list[bytes], limits: Limits = LIMITS, epoch: Epoch | None = EPOCH) -> Frame | None:
    assembler, frame = Assembler(limits, epoch=epoch), None
    for message in messages:
        assert frame is None, "nothing may follow a whole frame"
        frame = assembler.feed(message)
    return frame


def step_frame(tokens: int = 5, hidden: int = 8) -> Frame:
    return Frame(
        "step",
        EPOCH,
        step=9,
        rows=(RowHeader(7, 0, tokens - 1, "none"), RowHeader(2**63 + 1, 12, 1, "sample")),
        token_ids_T=np.arange(tokens, dtype=np.int32) % 100,
        hidden_TD=np.linspace(-1, 1, tokens * hidden, dtype=np.float32).reshape(tokens, hidden),
        deltas=Deltas(
            free=(1, 2),
            truncate=((4, 1),),
            copy=((3, 9),),
            share=((7, ((20, 2),)), (8, ((20, 1),))),
            allocate=((7, ((0, 3), (8, 1))),),
        ),
        admitted=(Admitted(7, 4, SamplingParams(temperature=0.5, seed=2**64 - 1, top_k=4)),),
        failed=((7, StageLost("node b is gone", node="b", layers=[2, 3])),),
        hops=(Hop(0, 10, 2000, 30, 4, 5678),),
    )


def same(a: Frame, b: Frame) -> bool:
    """Equal but for arrays and errors, which are compared by content."""
    plain = ("kind", "epoch", "step", "rows", "deltas", "admitted", "tokens", "hops", "hello", "status")
    arrays = all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, y))
        for x, y in ((a.token_ids_T, b.token_ids_T), (a.hidden_TD, b.hidden_TD))
    )
    errors = [(s, e.to_wire()) for s, e in a.failed] == [(s, e.to_wire()) for s, e in b.failed]
    return arrays and errors and all(getattr(a, k) == getattr(b, k) for k in plain)


def test_every_field_survives() -> None:
    frame = step_frame()
    got = assemble(list(encode(frame)))
    assert got is not None and same(frame, got)
    assert got.failed[0][1].details == {"node": "b", "layers": [2, 3]}
    assert got.hidden_TD is not None and got.hidden_TD.flags.writeable


@given(
    lengths=st.lists(st.integers(1, 9), min_size=0, max_size=7, unique=False),
    chunk=st.integers(40, 400),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_round_trip_in_any_chunks(lengths: list[int], chunk: int, data: Any) -> None:
    total = sum(lengths)
    floats = st.floats(width=32, allow_nan=False)
    frame = Frame(
        "step",
        EPOCH,
        step=data.draw(st.integers(0, 2**63 - 1)),
        rows=tuple(RowHeader(i, 3 * i, n, "sample") for i, n in enumerate(lengths)),
        token_ids_T=np.array(
            data.draw(st.lists(st.integers(0, 99), min_size=total, max_size=total)), np.int32
        ),
        hidden_TD=np.full((total, 8), data.draw(floats), np.float32),
        deltas=Deltas(free=tuple(data.draw(st.sets(st.integers(0, 2**64 - 1), max_size=9)))),
    )
    messages = list(encode(frame, chunk_bytes=chunk))
    assert all(len(m) <= chunk for m in messages)
    got = assemble(messages)
    assert got is not None and same(frame, got)


def test_other_kinds_survive() -> None:
    frames = [
        Frame("hello", EPOCH, hello=Hello("d/x", "ab", "cd", "ef", "i", 1, "forward")),
        Frame(
            "tokens",
            EPOCH,
            4,
            tokens=(
                SampledToken(5, 99, -0.5, ((99, -0.5), (3, -2.0))),
                SampledToken(6, 1),
                SampledToken(6, 2),
            ),
            hops=(Hop(2, 1, 1),),
        ),
        Frame("ping", EPOCH, 4),
        Frame("pong", EPOCH, 4, status=(1, 8, 7)),
        Frame("error", EPOCH, error=StageLost("gone", node="x", layers=[0, 1])),
    ]
    for frame in frames:
        got = assemble(list(encode(frame)))
        assert got is not None and same(frame, got)
    assert isinstance(got.error, StageLost) and got.error.details["node"] == "x"


def test_tokens_of_a_sequence_stand_together() -> None:
    frame = Frame("tokens", EPOCH, 4, tokens=(SampledToken(5, 9), SampledToken(6, 1), SampledToken(5, 2)))
    with pytest.raises(ProtocolError, match="sequences of tokens"):
        assemble(list(encode(frame)))


def test_frames_above_four_mebibytes_are_cut() -> None:
    limits = Limits(chunk_tokens=20000, hidden_size=64, vocab_size=100, blocks=2000, context=32000, stages=2)
    frame = Frame(
        "step",
        EPOCH,
        rows=(RowHeader(1, 0, 20000, "sample"),),
        token_ids_T=np.zeros(20000, np.int32),
        hidden_TD=np.random.default_rng(0).random((20000, 64), np.float32),
    )
    messages = list(encode(frame))
    assert len(messages) > 4 and max(map(len, messages)) <= 1 << 20
    got = assemble(messages, limits)
    assert got is not None and same(frame, got)


def test_an_arrival_counts_its_bytes_and_both_ends_time() -> None:
    frame, begun = step_frame(tokens=64), time.perf_counter()
    messages = list(encode(frame, chunk_bytes=200))
    assert len(messages) > 10
    assembler, got = Assembler(LIMITS, epoch=EPOCH), None
    for message in messages:
        got = assembler.feed(message)
        time.sleep(0.001)  # between two messages of a frame: the wire's time, not ours
    taken_us = (time.perf_counter() - begun) * 1e6
    assert got is not None and got.arrival is not None
    assert got.arrival.nbytes == sum(map(len, messages))
    assert 0 < got.arrival.serialise_us < taken_us - 1000 * (len(messages) - 1)
    again = assembler.feed(next(iter(encode(step_frame()))))
    assert again is not None and again.arrival is not None, "the counts begin anew with each frame"
    assert again.arrival.nbytes == len(next(iter(encode(step_frame()))))


def test_the_senders_time_reaches_the_receiver() -> None:
    (message,) = encode(step_frame())
    body = message[PREFIX:]
    spent = (70_000).to_bytes(4, "big")
    slow = message[:16] + spent + zlib.crc32(spent, zlib.crc32(body)).to_bytes(4, "big") + body
    got = assemble([slow])
    assert got is not None and got.arrival is not None
    assert 70_000 <= got.arrival.serialise_us < 170_000


# -- refusals -------------------------------------------------------------------------------------
HEADER = ("kind", "epoch", "proposer", "step", "rows", "tensors", "deltas", "admitted", "failed", "hops")


def forge(change: Any, payload: bytes | None = None) -> list[bytes]:
    """A frame with a changed header (by name of field) and a right checksum: only the checks can refuse it."""
    original = b"".join(encode(step_frame()))
    header_bytes = struct.unpack_from("!I", original, 4)[0]
    header = msgpack.unpackb(original[PREFIX : PREFIX + header_bytes], raw=False, strict_map_key=False)
    body = original[PREFIX + header_bytes :] if payload is None else payload
    named = dict(zip(HEADER, header, strict=True))
    changed = change(named)
    packed = msgpack.packb(list(named.values()) if changed is None else changed)
    crc = zlib.crc32(bytes(4), zlib.crc32(body, zlib.crc32(packed)))
    prefix = struct.pack("!2sBBIQII", b"p2", VERSION, 0, len(packed), len(packed) + len(body), 0, crc)
    return [prefix + packed + body]


def put(*path: Any, value: Any) -> Any:
    def change(header: Any) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = value

    return change


def test_the_forge_itself_is_sound() -> None:
    assert assemble(forge(lambda header: None)) is not None


@pytest.mark.parametrize(
    "change",
    [
        put("surprise", value=1),
        lambda h: h.pop("hops") and None,
        lambda h: [1, 2],
        lambda h: dict(h),
        lambda h: list(h.values())[:4],
        put("kind", value="pickle"),
        put("kind", value=["step"]),
        put("kind", value="tokens"),
        put("epoch", value=4),
        put("epoch", value=[3]),
        put("proposer", value="node-b"),
        put("proposer", value="../../etc"),
        put("step", value=-1),
        put("step", value=2**63),
        put("step", value=1.0),
        put("step", value=True),
        put("rows", 0, 1, value=2**63),
        put("rows", 0, 2, value=0),
        put("rows", 0, 2, value=-4),
        put("rows", 0, 2, value=2**62),
        put("rows", 0, 1, value=255),
        put("rows", 0, 3, value="everything"),
        put("rows", 1, 0, value=7),
        put("rows", value=[[i, 0, 1, "none"] for i in range(65)]),
        put("tensors", 0, "name", value="../token_ids"),
        put("tensors", 0, "name", value="hidden"),
        put("tensors", 0, "dtype", value="int64"),
        put("tensors", 0, "dtype", value="object"),
        put("tensors", 1, "shape", value=[8, 5]),
        put("tensors", 1, "shape", value=[2**63 - 1, 2**63 - 1]),
        put("tensors", 1, "shape", value=[5, -8]),
        put("tensors", 1, "codec", value="zip"),
        put("tensors", 1, "codec", value=["raw"]),
        put("tensors", 1, "name", value=["hidden"]),
        put("tensors", 1, "name", value="token_ids"),
        put("tensors", value=[]),
        put("tensors", 1, "offset", value=4),
        put("deltas", 4, value=[[7, [[30, 3]]]]),
        put("deltas", 4, value=[[7, [[0, 3]]], [8, [[2, 1]]]]),
        put("deltas", 4, value=[[7, [[19, 2]]]]),
        put("deltas", 4, value=[[7, [[0, 1]]], [7, [[1, 1]]]]),
        put("deltas", 3, value=[[7, [[31, 2]]]]),
        put("deltas", 3, value=[[7, [[-1, 2]]]]),
        put("deltas", 3, value=[[7, [[20, 0]]]]),
        put("deltas", 3, value=[[7, [[20, 2**40]]]]),
        put("deltas", 3, value=[[7, [[20, 2], [21, 2]]]]),
        put("deltas", 3, value=[[7, [[20, 2]]], [7, [[24, 2]]]]),
        put("deltas", 3, value=[[s, [[20, 1]]] for s in range(33)]),
        put("deltas", 3, value=[[s, [[b, 1] for b in range(11, 31, 2)]] for s in range(4)]),
        put("deltas", 3, value=7),
        lambda h: h["deltas"].pop() and None,
        put("deltas", 0, value=[1, 1]),
        put("deltas", 2, value=[[0, 32]]),
        put("admitted", 0, 1, value=257),
        put("admitted", 0, 2, 0, value=float("nan")),
        put("admitted", 0, 2, 0, value=-1.0),
        put("admitted", 0, 2, 7, value="seed"),
        put("failed", 0, 0, value=1234),
        put("failed", 0, 1, "details", value={"node": "../x"}),
        put("failed", 0, 1, "message", value="m" * 5000),
        put("hops", 0, 0, value=3),
        put("hops", value=[[0, 1, 1, 1, 1, 1]] * 4),
        put("hops", value=[[0, 1, 1]]),
        put("hops", 0, 5, value=-1),
        put("hops", 0, 4, value=1.5),
        put("hops", value=b"bytes"),
    ],
)
def test_a_forged_header_is_refused(change: Any) -> None:
    with pytest.raises(ProtocolError):
        assemble(forge(change))


def test_lengths_are_refused_before_memory_is_taken() -> None:
    tracemalloc.start()
    for header, body in ((2**32 - 1, 2**63), (10, 2**63 - 1), (100, 40), (0, 0), (100, 2**40)):
        with pytest.raises(ProtocolError):
            assemble([struct.pack("!2sBBIQII", b"p2", VERSION, 0, header, body, 0, 0) + b"x" * 10])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_another_version_is_named() -> None:
    (message,) = encode(step_frame())
    with pytest.raises(ProtocolError, match="frame version 9"):
        assemble([message[:2] + b"\x09" + message[3:]])


def test_out_of_order_parts_are_refused() -> None:
    messages = list(encode(step_frame(), chunk_bytes=150))
    assert len(messages) > 3
    for order in ([0, 2], [1], [0, 1, 1], [0, 0], [0, 1, 0]):
        with pytest.raises(ProtocolError):
            assemble([messages[i] for i in order])
    assert assemble(messages[:-1]) is None


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    frame = step_frame()
    assert frame.token_ids_T is not None
    frame.token_ids_T[2] = 100
    with pytest.raises(ProtocolError, match="vocabulary"):
        assemble(list(encode(frame)))


def test_a_kind_out_of_place_is_refused() -> None:
    assembler = Assembler(LIMITS, epoch=EPOCH, kinds=frozenset({"hello"}))
    with pytest.raises(ProtocolError, match="no place"):
        assembler.feed(next(iter(encode(step_frame()))))


def mutate(message: bytes, rng: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at, choice = rng.randrange(len(data)), rng.randrange(6)
        if choice == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        elif choice == 2:
            del data[at:]
        elif choice == 3:
            data[at:at] = data[: rng.randint(1, 40)]
        elif choice == 4:
            data[at : at + 9] = b"\xcf" + (2**63).to_bytes(8, "big")
        else:
            data += rng.randbytes(rng.randint(1, 20))
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("repair_checksum", [False, True])
def test_ten_thousand_mutations_are_refused_or_harmless(repair_checksum: bool) -> None:
    rng = random.Random(1)
    (original,) = encode(step_frame())
    accepted = 0
    tracemalloc.start()
    for _ in range(10_000):
        message = mutate(original, rng)
        if message == original:
            continue
        if repair_checksum and len(message) > PREFIX:
            header = struct.unpack_from("!I", message, 4)[0]
            body, spent = message[PREFIX:], message[16:20]
            crc = zlib.crc32(spent, zlib.crc32(body))
            message = (
                message[:8] + struct.pack("!Q4sI", len(body), spent, crc) + body
                if header < len(body)
                else message
            )
        try:
            frame = assemble([message])
        except ProtocolError:
            continue
        if frame is not None:  # a change of a value within what the plan allows, under a right checksum
            accepted += 1
            assert repair_checksum
            assert sum(r.length for r in frame.rows) <= LIMITS.chunk_tokens
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert accepted < 5_000
