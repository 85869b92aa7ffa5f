"""An answer outlives the node that its client asked: `AsyncClient` carries it on at another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from p2pshard_node.gateway.gateway import Gateway
from p2pshard_node.keys import ApiKeys
from p2pshard_node.node_service import NodeService

from p2pshard import AsyncClient
from p2pshard.client import stream as streams
from p2pshard.errors import Conflict, InvalidRequest, NodeUnreachable
from p2pshard.transport.channels import bind, make_server
from p2pshard.transport.generated import control_pb2, control_pb2_grpc, generate_pb2
from tests.fake_driver import EOS, FakeCluster, FakeDriver, MemoryStore, make_plan, spells

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals."


class Door(NodeService):
    """A node that can fall silent as a stopped process does: its connections stay, and nothing comes."""

    silent = False

    async def Ping(self, request: control_pb2.Empty, context: Any) -> control_pb2.Empty:
        while self.silent:
            await asyncio.sleep(0.05)
        return await super().Ping(request, context)

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async for event in super().Generate(request, context):
            while self.silent:
                await asyncio.sleep(0.05)
            yield event


@dataclass
class Node:
    gateway: Gateway
    server: grpc.aio.Server
    door: Door
    address: str


@dataclass
class Lab:
    driver: FakeDriver
    cluster: FakeCluster
    nodes: list[Node]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    store = MemoryStore()
    driver = FakeDriver(make_plan(store.manifest.digest), spells(TEXT), delay_s=0.005)
    await driver.start()
    made = Lab(driver, FakeCluster(store, driver), [])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(driver.kill)
        for index in range(3):
            gateway = Gateway(f"node-{'abc'[index]}", store, made.cluster)
            stack.push_async_callback(gateway.close)
            server, door = (
                make_server(),
                Door(made.cluster, gateway, ApiKeys(tmp_path / f"{index}.json"), lambda: None, lambda: None),
            )
            control_pb2_grpc.add_NodeServicer_to_server(door, server)
            port = bind(server, None, "127.0.0.1")
            await server.start()
            stack.push_async_callback(server.stop, None)
            made.nodes.append(Node(gateway, server, door, f"127.0.0.1:{port}"))
            made.cluster.ports[f"node-{'abc'[index]}"] = port
        yield made


async def read(stream: Any, count: int, then: Any) -> None:
    """All of an answer, with something done to the cluster once so many tokens have come."""
    done, got = False, 0
    async for delta in stream:
        got += len(delta.tokens)
        if got >= count and not done:
            done = True
            await then()


OPTIONS: dict[str, Any] = {"max_tokens": 200, "temperature": 0.9, "logprobs": 1}


@pytest.mark.parametrize("known", [1, 3])
async def test_a_killed_gateway_costs_no_token(lab: Lab, known: int) -> None:
    """Other nodes are known by their addresses, or from the first node's own record."""
    async with AsyncClient([n.address for n in lab.nodes[:known]]) as client:
        stream = client.generate("tiny", "hello there", **OPTIONS)
        await read(stream, 20, lambda: lab.nodes[0].server.stop(None))
        answer = await stream.result()
    assert answer.text == TEXT and answer.finish_reason == "stop"
    assert answer.token_ids == (*TEXT.encode(), EOS) and len(answer.tokens) == len(TEXT) + 1
    assert answer.completion_tokens == len(TEXT) + 1 and answer.prompt_tokens == len("hello there")
    first, second = lab.driver.submits
    assert second.sampling == first.sampling and second.prompt_ids == first.prompt_ids
    assert (
        bytes(second.output_ids).decode() == TEXT[: len(second.output_ids)] and len(second.output_ids) >= 20
    )


async def test_two_gateways_one_after_the_other(lab: Lab) -> None:
    async with AsyncClient([n.address for n in lab.nodes]) as client:
        stream = client.generate("tiny", "hello", **OPTIONS)

        async def first() -> None:
            await lab.nodes[0].server.stop(None)
            asyncio.get_running_loop().call_later(0.15, lambda: asyncio.ensure_future(last()))

        async def last() -> None:
            for node in lab.nodes[1:]:
                if any(r["state"] == "running" for r in node.gateway.ps()):
                    await node.server.stop(None)

        await read(stream, 10, first)
        assert (await stream.result()).text == TEXT
    assert len(lab.driver.submits) == 3


async def test_a_node_that_stops_politely_hands_over(lab: Lab) -> None:
    async with AsyncClient([n.address for n in lab.nodes]) as client:
        stream = client.generate("tiny", "hello", **OPTIONS)
        await read(stream, 20, lab.nodes[0].gateway.close)
        assert (await stream.result()).text == TEXT


async def test_a_gateway_that_falls_silent_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.2)
    monkeypatch.setattr(streams, "ASK_S", 0.3)

    async def silence() -> None:
        lab.nodes[0].door.silent = True

    began = time.monotonic()
    async with AsyncClient([n.address for n in lab.nodes]) as client:
        stream = client.generate("tiny", "hello", **OPTIONS)
        await read(stream, 20, silence)
        assert (await stream.result()).text == TEXT
    lab.nodes[0].door.silent = False
    assert time.monotonic() - began < 5


async def test_a_slow_answer_is_no_reason_to_leave(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.05)
    lab.driver.delay_s, lab.driver.next_token = 0.3, spells("slow")
    async with AsyncClient([lab.nodes[0].address]) as client:
        assert (await client.generate("tiny", "hello", **OPTIONS)).text == "slow"
    assert len(lab.driver.submits) == 1


async def test_the_last_node_gone_is_said(lab: Lab) -> None:
    async def all_gone() -> None:
        await asyncio.gather(*(n.server.stop(None) for n in lab.nodes))

    async with AsyncClient([n.address for n in lab.nodes]) as client:
        stream = client.generate("tiny", "hello", **OPTIONS)
        with pytest.raises(NodeUnreachable, match=r"connection to the node at .* was lost"):
            await read(stream, 20, all_gone)


async def test_leaving_an_answer_is_not_a_loss(lab: Lab) -> None:
    async with AsyncClient([n.address for n in lab.nodes]) as client:
        stream = client.generate("tiny", "hello", **OPTIONS)
        async for _ in stream:
            break
        await stream.aclose()
    await asyncio.sleep(0.1)
    assert len(lab.driver.submits) == 1 and not lab.driver.running


def resume(lab: Lab, output: bytes, **fields: Any) -> generate_pb2.GenerateRequest:
    manifest = lab.cluster.store.manifest.digest
    given = generate_pb2.Resume(
        prompt_ids=b"hello", output_ids=output, manifest=fields.pop("manifest", manifest)
    )
    return generate_pb2.GenerateRequest(**{"model": "tiny", "resume": given, "max_tokens": 200, **fields})


@pytest.mark.parametrize(
    ("output", "fields", "reason"),
    [
        (b"abc", {"max_tokens": 3}, "length"),
        (b"abSTOP", {"stop": ["STOP"]}, "stop"),
        (b"abcd", {"max_tokens": 3}, "length"),
    ],
)
async def test_a_log_that_has_ended_needs_no_driver(
    lab: Lab, output: bytes, fields: dict[str, Any], reason: str
) -> None:
    events = [e async for e in lab.nodes[0].gateway.generate(resume(lab, output, **fields))]
    assert [e.WhichOneof("event") for e in events] == ["resume", "finish"]
    assert events[-1].finish.reason == reason and lab.driver.submits == []
    assert events[-1].finish.ttft_ms == 0


async def test_what_cannot_be_carried_on_is_refused(lab: Lab) -> None:
    strange = resume(lab, b"")
    strange.resume.output_ids[:] = [9999]
    for bad, error in (
        (resume(lab, b"abc", manifest="0" * 64), Conflict),
        (resume(lab, b""), None),
        (strange, InvalidRequest),
    ):
        stream = lab.nodes[0].gateway.generate(bad)
        if error is None:
            assert "".join([e.delta.text async for e in stream]) == TEXT
            continue
        with pytest.raises(error):
            await anext(stream)
