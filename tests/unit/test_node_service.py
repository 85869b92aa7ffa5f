"""The Node service on a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from p2pshard_node.gateway.gateway import Gateway
from p2pshard_node.keys import ApiKeys
from p2pshard_node.node_service import NodeService, is_local

from p2pshard.errors import (
    ContextExceeded,
    DoesNotFit,
    ModelNotFound,
    NodeUnreachable,
    P2PShardError,
    ProtocolError,
    Refused,
    StageLost,
)
from p2pshard.transport.channels import bind, make_channel, make_server
from p2pshard.transport.generated import control_pb2, control_pb2_grpc, generate_pb2
from p2pshard.transport.grpc_errors import fitted, from_rpc_error
from tests.fake_driver import FakeCluster, FakeDriver, MemoryStore, make_plan


@dataclass
class Served:
    stub: control_pb2_grpc.NodeStub
    driver: FakeDriver
    cluster: FakeCluster
    gateway: Gateway
    stopped: asyncio.Event
    left: asyncio.Event
    port: int


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    store = MemoryStore()
    driver = FakeDriver(make_plan(store.manifest.digest))
    await driver.start()
    cluster = FakeCluster(store, driver)
    gateway = Gateway("node-c", store, cluster)
    cluster.carried = gateway.ps
    stopped, left = asyncio.Event(), asyncio.Event()
    server = make_server()
    keys = ApiKeys(tmp_path / "keys.json")
    control_pb2_grpc.add_NodeServicer_to_server(
        NodeService(cluster, gateway, keys, stopped.set, left.set), server
    )
    port = bind(server, None, "127.0.0.1")
    await server.start()
    async with make_channel(f"127.0.0.1:{port}", None) as channel:
        yield Served(control_pb2_grpc.NodeStub(channel), driver, cluster, gateway, stopped, left, port)
    await server.stop(0)
    await gateway.close()
    await driver.kill()


async def error_of_call(call: object) -> P2PShardError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:  # type: ignore[attr-defined]
                pass
        else:
            await call  # type: ignore[misc]
    return from_rpc_error(caught.value, "n:1")


def ask(**fields: object) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**{"model": "tiny", "prompt": "hi", "max_tokens": 5, **fields})  # type: ignore[arg-type]


async def test_generate_streams_record_deltas_and_finish(served: Served) -> None:
    events = [e async for e in served.stub.Generate(ask())]
    assert events[0].HasField("resume") and events[-1].finish.reason == "length"
    assert "".join(e.delta.text for e in events) == "cdefg"


async def test_errors_come_back_as_what_they_were(served: Served) -> None:
    error = await error_of_call(served.stub.Generate(ask(model="none")))
    assert isinstance(error, ModelNotFound) and "p2pshard deploy none" in error.message
    error = await error_of_call(served.stub.Generate(ask(prompt="x" * 500)))
    assert isinstance(error, ContextExceeded) and error.details == {"prompt_tokens": 500, "context": 128}
    served.driver.fail_at = 2
    error = await error_of_call(served.stub.Generate(ask()))
    assert isinstance(error, StageLost) and error.details == {"node": "node-b", "layers": [2, 3]}
    assert isinstance(
        await error_of_call(served.stub.Undeploy(control_pb2.UndeployRequest(model="x"))), ModelNotFound
    )
    assert isinstance(
        await error_of_call(served.stub.Deploy(control_pb2.DeployRequest(model="x"))), ModelNotFound
    )


async def test_a_fault_of_ours_is_internal_and_says_what(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, object]:
        raise KeyError("nodes")

    monkeypatch.setattr(served.cluster, "status", broken)
    error = await error_of_call(served.stub.Status(control_pb2.Empty()))
    assert error.code == "internal" and "KeyError" in error.message


async def test_a_client_that_goes_away_cancels_its_request(served: Served) -> None:
    served.driver.delay_s = 0.01
    call = served.stub.Generate(ask(max_tokens=100))
    async for event in call:
        if event.HasField("delta"):
            break
    ps = json.loads((await served.stub.Ps(control_pb2.Empty())).json)
    assert [(r["model"], r["state"], r["prompt_tokens"]) for r in ps["requests"]] == [("tiny", "running", 2)]
    assert ps["kv"] == [{"node": "node-a", "blocks_used": 0, "blocks_total": 64}]
    call.cancel()
    async with asyncio.timeout(1):
        while served.driver.running or served.gateway.ps():
            await asyncio.sleep(0.01)


async def test_cancel_by_id(served: Served) -> None:
    served.driver.delay_s = 0.01
    reason = ""
    async for event in served.stub.Generate(ask(max_tokens=100)):
        if event.HasField("resume"):
            await served.stub.Cancel(control_pb2.CancelOne(request=event.resume.request))
        reason = event.finish.reason
    assert reason == "cancelled"
    await served.stub.Cancel(control_pb2.CancelOne(request="gone"))


async def test_plan_deploy_status_models(served: Served) -> None:
    plan = json.loads((await served.stub.Plan(control_pb2.PlanRequest(model="tiny"))).json)
    assert plan["fits"] is True and plan["local"] is True
    steps = [json.loads(p.json) async for p in served.stub.Deploy(control_pb2.DeployRequest(model="tiny"))]
    assert [s["state"] for s in steps] == ["loading", "ready"]
    assert "nodes" in json.loads((await served.stub.Status(control_pb2.Empty())).json)
    (model,) = json.loads((await served.stub.Models(control_pb2.Empty())).json)["models"]
    assert (model["name"], model["path"], model["nodes"]) == ("tiny", "/models/tiny.gguf", ["node-c"])


async def test_shutdown_from_this_machine_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pshard_node.node_service.is_local", lambda peer: False)
    assert isinstance(await error_of_call(served.stub.Shutdown(control_pb2.Empty())), Refused)
    (model,) = json.loads((await served.stub.Models(control_pb2.Empty())).json)["models"]
    assert "path" not in model and not served.stopped.is_set()
    monkeypatch.undo()
    await served.stub.Shutdown(control_pb2.Empty())
    assert served.stopped.is_set()


async def test_leaving_and_keys_are_of_this_machine_only_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pshard_node.node_service.is_local", lambda peer: False)
    for call in (
        served.stub.Leave(control_pb2.Empty()),
        served.stub.Keys(control_pb2.KeysRequest()),
        served.stub.Keys(control_pb2.KeysRequest(create="a")),
    ):
        assert isinstance(await error_of_call(call), Refused)
    assert not served.left.is_set()
    monkeypatch.undo()
    made = json.loads((await served.stub.Keys(control_pb2.KeysRequest(create="a", per_minute=5))).json)
    assert made["secret"].startswith("p2psk-") and made["keys"][0]["per_minute"] == 5
    listed = json.loads((await served.stub.Keys(control_pb2.KeysRequest())).json)
    assert [k["name"] for k in listed["keys"]] == ["a"] and "secret" not in listed
    assert "sha256" not in listed["keys"][0]
    assert json.loads((await served.stub.Keys(control_pb2.KeysRequest(revoke="a"))).json)["keys"] == []
    await served.stub.Leave(control_pb2.Empty())
    assert served.left.is_set() and not served.stopped.is_set()


async def test_pausing_is_the_clusters_to_do(served: Served) -> None:
    reply = await served.stub.Pause(control_pb2.PauseRequest(node="b"))
    assert (reply.node, reply.name) == ("node-b", "b") and not reply.HasField("error")
    await served.stub.Pause(control_pb2.PauseRequest(node="b", resume=True))
    assert served.cluster.paused == [("b", False), ("b", True)]


def test_who_is_local() -> None:
    own = next(a.address for n in psutil.net_if_addrs().values() for a in n if a.family.name == "AF_INET")
    for peer in (
        "ipv4:127.0.0.1:5",
        "ipv6:[::1]:5",
        "ipv6:%5B::1%5D:5",
        "ipv6:[::ffff:127.0.0.1]:5",
        f"ipv4:{own}:5",
    ):
        assert is_local(peer), peer
    for peer in ("ipv4:192.0.2.1:5", "ipv6:[2001:db8::1]:5", "ipv4:localhost:5", "", "unknown"):
        assert not is_local(peer), peer


def test_large_details_are_left_out_by_name() -> None:
    error = DoesNotFit(
        "short of 5 bytes", shortfall_bytes=5, terms=[{"n": "x" * 90}] * 90, suggestions=["use int8"]
    )
    assert fitted(error).details == {"shortfall_bytes": 5, "suggestions": ["use int8"], "left_out": ["terms"]}
    small = DoesNotFit("short", shortfall_bytes=5)
    assert fitted(small) is small


async def test_statuses_of_grpcs_own(served: Served) -> None:
    async with make_channel("127.0.0.1:1", None) as channel:
        error = await error_of_call(control_pb2_grpc.NodeStub(channel).Status(control_pb2.Empty()))
        assert isinstance(error, NodeUnreachable)
    async with make_channel(f"127.0.0.1:{served.port}", None) as channel:
        error = await error_of_call(control_pb2_grpc.ClusterStub(channel).State(control_pb2.StateRequest()))
        assert isinstance(error, ProtocolError) and "another version" in error.message
