"""10,000 mutated messages against a control port while a valid stream runs: all refused, nothing lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import psutil
import pytest

from p2pshard import Client
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import generate_pb2, plan_pb2
from tests.local_cluster import LocalCluster
from tests.tiny import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EPOCH = plan_pb2.Epoch(n=2**40, proposer="stranger")
RANK = plan_pb2.Rank(node="../../etc", device="cpu", share=1.0, weight_bytes=2**63, budget_bytes=1)
PLAN = plan_pb2.Plan(
    replicas=[plan_pb2.Replica(stages=[plan_pb2.Stage(first_layer=0, last_layer=5, embedding=True, head=True, ranks=[RANK])])],
    epoch=EPOCH, numerics="tolerant", manifest="0" * 64, model="../x", dtype="float32", context=2**31, concurrency=1,
    block_size=16, blocks=2**31, chunk_tokens=256, layers=6,
)  # fmt: skip
STRANGER = pb.NodeInfo(
    id="stranger", name="s", incarnation=1, nonce="n", protocol=1, version="0", cluster="other"
)
VALID = {
    "Cluster/Handshake": pb.HandshakeRequest(sender=STRANGER),
    "Cluster/Ping": pb.PingRequest(sender=STRANGER, coordinator="stranger", known=[STRANGER]),
    "Cluster/Leave": pb.Goodbye(id="stranger", nonce="n"),
    "Cluster/State": pb.StateRequest(deployments=["../../x"]),
    "Cluster/Prepare": pb.PrepareRequest(
        deployment="d", epoch=EPOCH, digest="0" * 64, plan=PLAN, lease_s=1e300
    ),
    "Cluster/Commit": pb.CommitRequest(deployment="d", epoch=EPOCH, digest="0" * 64),
    "Cluster/Abort": pb.AbortRequest(deployment="d", epoch=EPOCH),
    "Cluster/Epochs": pb.EpochQuery(deployment="d"),
    "Cluster/Report": pb.StageEvent(deployment="d", epoch=EPOCH, stage=2**31, node="stranger", kind="lost"),
    "Cluster/Want": pb.WantDeployment(
        model="../x", manifest="0" * 64, settings_json='{"context": 1e999}', holder="stranger"
    ),
    "Cluster/Unwant": pb.UndeployRequest(model="../x"),
    "Cluster/Manifest": pb.ManifestRequest(digest="../../../etc/passwd"),
    "Cluster/HasTensors": pb.TensorQuery(sha256=["../../etc/passwd", "0" * 64]),
    "Cluster/Tensor": pb.TensorRequest(sha256="../../../../etc/passwd", offset=2**63),
    "Node/Plan": pb.PlanRequest(model="/etc/passwd", settings_json="[" * 1000),
    "Node/Generate": generate_pb2.GenerateRequest(model="../x", prompt="p" * 100, max_tokens=2**31),
    "Node/Cancel": pb.CancelOne(request="../x"),
}
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
STREAMING = {"Cluster/Prepare", "Cluster/Manifest", "Cluster/Tensor", "Node/Generate"}


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randrange(0, 4)):
        kind = rng.randrange(5)
        at = rng.randrange(len(out) + 1)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 12))
        elif kind == 2:
            del out[at : at + rng.randrange(1, 12)]
        elif kind == 3:
            out[at:at] = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f"  # a varint of 2^63-1
        else:
            del out[at:]
    return bytes(out)


async def attack(port: int, count: int, seed: int) -> int:
    rng = random.Random(seed)
    refused = 0
    gate = asyncio.Semaphore(16)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one(method: str, data: bytes) -> None:
            nonlocal refused
            async with gate:
                try:
                    if method in STREAMING:
                        async for _ in channel.unary_stream(f"/p2pshard.v1.{method}")(data, timeout=5):
                            pass
                    else:
                        await channel.unary_unary(f"/p2pshard.v1.{method}")(data, timeout=5)
                except grpc.aio.AioRpcError as error:
                    refused += 1
                    # gRPC itself answers UNKNOWN to bytes that are no message; a fault in a handler must not hide there.
                    unreadable = "DecodeError" in (error.details() or "")
                    assert unreadable or error.code() not in FAULTS, (method, error)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                method = rng.choice(sorted(VALID))
                tasks.create_task(one(method, mutate(rng, VALID[method].SerializeToString())))
    return refused


async def test_ten_thousand_mutated_messages(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny", context=4096)
    with LocalCluster(tmp_path, "--memory", "700MB", nodes=2) as cluster:
        target = cluster.nodes[1]
        with Client([cluster.nodes[0].address]) as client:
            await asyncio.to_thread(client.deploy, str(model), context=4096, nodes=2, dtype="float32")
            expected = await asyncio.to_thread(generate, client)
            process = psutil.Process(target.process.pid)  # type: ignore[union-attr]
            before = process.memory_info().rss
            valid = asyncio.create_task(repeat(client, 8))
            refused = await attack(target.port, 10_000, seed=1)
            for tokens in await valid:
                assert tokens == expected
            assert await asyncio.to_thread(generate, client) == expected
            grown = process.memory_info().rss - before
        print(f"{refused} of 10000 refused; the daemon grew by {grown / 1e6:.1f} MB")
        assert refused > 5000
        assert grown < 80e6
        assert all(node.process and node.process.poll() is None for node in cluster.nodes)


def generate(client: Client) -> tuple[int, ...]:
    return client.generate("tiny", "A valid stream", max_tokens=64, temperature=0, ignore_eos=True).token_ids


async def repeat(client: Client, times: int) -> list[tuple[int, ...]]:
    return [await asyncio.to_thread(generate, client) for _ in range(times)]
