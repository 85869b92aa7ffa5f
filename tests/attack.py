"""Mutated frames and commands against a worker's data port."""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import grpc.aio
import numpy as np
from p2pshard_node.worker.driver import DRIVER_METHOD
from p2pshard_node.worker.edges import EDGE_METHOD

from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.channels import EOF, make_channel, raw_stream
from p2pshard.transport.frames import Frame, Hello, RowHeader, SampledToken, encode
from p2pshard.transport.generated import generate_pb2
from tests.worker_lab import DEPLOYMENT

_A_CONNECTION = 400
"""Messages of one connection: gRPC lets one whose streams are reset by the hundred open no further ones."""


def mutate(message: bytes, rng: random.Random) -> bytes:
    """Bits, lengths, cuts and insertions; every second one under a right checksum."""
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(5):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
            case 2:
                del data[at:]
            case 3:
                data[at : at + 9] = b"\xcf" + (2**63).to_bytes(8, "big")
            case _:
                data[at:at] = rng.choice([b"\xa9../../etc", b"\xcf" + b"\xff" * 8, rng.randbytes(9)])
    if rng.random() < 0.5 and len(data) > 24:
        body, spent = bytes(data[24:]), bytes(data[16:20])
        data[8:24] = struct.pack("!Q4sI", len(body), spent, zlib.crc32(spent, zlib.crc32(body)))
    return bytes(data)


def _frames(plan: Plan) -> list[bytes]:
    """Frames as they should be, of this epoch and of others."""
    hello = Hello(DEPLOYMENT, plan.digest(), plan.manifest, "f", "i", 0, "forward")
    frames = []
    for epoch in (plan.epoch, Epoch(plan.epoch.n + 1, "n0"), Epoch(plan.epoch.n, "other")):
        frames += [
            Frame("hello", epoch, hello=hello),
            Frame(
                "step", epoch, 5, rows=(RowHeader(3, 0, 4, "sample"),),
                token_ids_T=np.arange(4, dtype=np.int32), hidden_TD=np.zeros((4, 64), np.float32),
            ),
            Frame("tokens", epoch, 5, tokens=(SampledToken(3, 7),)),
        ]  # fmt: skip
    return [m for frame in frames for m in encode(frame)]


def _commands(plan: Plan) -> list[bytes]:
    epoch = plan.epoch.to_proto()
    hello = generate_pb2.DriverHello(epoch=epoch, plan_digest="../" + plan.digest(), deployment=DEPLOYMENT)
    submit = generate_pb2.Submit(request="../x", prompt_ids=[2**31], max_tokens=2**31)
    return [
        generate_pb2.DriverCommand(hello=hello).SerializeToString(),
        generate_pb2.DriverCommand(submit=submit).SerializeToString(),
    ]


async def _call(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes]) -> None:
    """One stream of messages; read until the worker ends it."""
    call: Any = raw_stream(channel, method)
    try:
        async with asyncio.timeout(10):
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not EOF:
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # refused, as it should be
    finally:
        call.cancel()


def _dial(ports: Sequence[int]) -> list[grpc.aio.Channel]:
    return [make_channel(f"127.0.0.1:{port}", None, own_connection=True) for port in ports]


async def _close(channels: Sequence[grpc.aio.Channel]) -> None:
    await asyncio.gather(*(channel.close(grace=None) for channel in channels))


async def attack(plan: Plan, ports: Sequence[int], count: int, *, seed: int) -> int:
    """Send `count` mutated messages to the workers, a few to a stream; how many were sent."""
    rng = random.Random(seed)
    frames, commands = _frames(plan), _commands(plan)
    channels = _dial(ports)
    sent = dialled = 0
    try:
        while sent < count:
            batch = []
            for _ in range(8):
                many = min(rng.randint(1, 4), count - sent)
                method, originals = (EDGE_METHOD, frames) if rng.random() < 0.9 else (DRIVER_METHOD, commands)
                messages = [mutate(rng.choice(originals), rng) for _ in range(many)]
                batch.append(_call(rng.choice(channels), method, messages))
                sent += many
            await asyncio.gather(*batch)
            if sent - dialled >= _A_CONNECTION:
                await _close(channels)
                channels, dialled = _dial(ports), sent
    finally:
        await _close(channels)
    return sent
