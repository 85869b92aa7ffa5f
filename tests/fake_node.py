"""A Node service in this process: scripted answers over real gRPC, for tests of client and command line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc.aio

from p2pshard.errors import P2PShardError
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.channels import bind, make_server
from p2pshard.transport.generated import control_pb2, control_pb2_grpc, generate_pb2
from p2pshard.transport.grpc_errors import abort, error_to_proto

PLAN = Plan(
    replicas=(
        Replica(
            tuple(
                Stage(
                    (first, last),
                    first == 0,
                    last == 29,
                    (Rank(node, "cpu", weight_bytes=80_000_000 + first),),
                )
                for first, last, node in ((0, 9, "id-a"), (10, 19, "id-b"), (20, 29, "id-c"))
            )
        ),
    ),
    epoch=Epoch(1, "id-a"),
    numerics="tolerant",
    manifest="ab" * 32,
    model="tiny",
    dtype="float32",
    context=2048,
    concurrency=1,
    block_size=16,
    blocks=128,
    chunk_tokens=256,
    layers=30,
)


def _node(name: str) -> dict[str, Any]:
    return {
        "id": f"id-{name}",
        "name": name,
        "addresses": [f"10.0.0.1{ord(name) % 10}:7332"],
        "memory_free": 2_000_000_000,
        "memory_budget": 600_000_000,
        "device": "cpu",
        "incarnation": 1,
        "bytes_received": 0,
    }


STATUS: dict[str, Any] = {
    "nodes": [_node(n) for n in "abc"],
    "not_joined": [{"address": "10.0.0.9:7332", "reason": "speaks protocol 2, this node 1: use one version"}],
    "deployments": [{"model": "tiny", "state": "ready", "plan": PLAN.to_json()}],
}
for _stage in STATUS["deployments"][0]["plan"]["replicas"][0]["stages"]:
    _stage["ranks"][0].update(peak_bytes=300_000_000, pid=4242)


class FakeNode(control_pb2_grpc.NodeServicer):
    """Answers as its fields say; remembers what it was asked. Runs a loop on a thread of its own."""

    def __init__(self) -> None:
        self.error: P2PShardError | None = None
        """Every call ends with it."""
        self.plan: dict[str, Any] = {
            "fits": True,
            "plan": PLAN.to_json(),
            "shortfall_bytes": 0,
            "suggestions": [],
            "terms": [],
        }
        self.progress: list[dict[str, Any]] = [
            {
                "state": "loading",
                "model": "tiny",
                "progress": [{"node": "a", "phase": "fetching", "done_bytes": 1, "total_bytes": 2}],
            },
            {"state": "ready", "model": "tiny", "plan": PLAN.to_json()},
        ]
        self.status: Callable[[], dict[str, Any]] = lambda: STATUS
        self.words = ["The ", "capital ", "is ", "Paris."]
        self.between_s = 0.0
        """Between two tokens."""
        self.break_after: int | None = None
        """Tokens after which the stream fails with `break_with`."""
        self.break_with: P2PShardError | None = None
        self.finishes = True
        """Answers end with a finish message."""
        self.asked: list[Any] = []
        self.was_asked = threading.Event()
        self.cancelled = threading.Event()
        """A generation was cancelled by its client."""
        self.shut_down = threading.Event()
        self.pause_error: P2PShardError | None = None
        """Why layers stay where they are."""
        self.port = 0
        self.pid = 0
        """Of the daemon that it says it is; 0: none."""
        self._stop: Callable[[], None] = lambda: None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop()
        self._thread.join(10)

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        server = make_server()
        control_pb2_grpc.add_NodeServicer_to_server(self, server)
        self.port = bind(server, None, "127.0.0.1", [self.port])
        await server.start()

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stopped.set)

        self._stop = stop
        self._ready.set()
        await stopped.wait()
        await server.stop(grace=None)

    async def _answer(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.asked.append(request)
        self.was_asked.set()
        if self.error:
            await abort(context, self.error)

    async def Status(self, request: Any, context: Any) -> control_pb2.StatusReply:
        await self._answer(request, context)
        return control_pb2.StatusReply(json=json.dumps(self.status()))

    async def Ps(self, request: Any, context: Any) -> control_pb2.StatusReply:
        await self._answer(request, context)
        one = {
            "id": "r1", "model": "tiny", "state": "running", "prompt_tokens": 5, "completion_tokens": 7,
            "node": "id-b",
        }  # fmt: skip
        kv = {"node": "id-a", "blocks_used": 1, "blocks_total": 128}
        silent = {"node": "id-c", "reason": "no answer in 1.5 s"}
        return control_pb2.StatusReply(
            json=json.dumps({"requests": [one], "kv": [kv], "unreachable": [silent]})
        )

    async def Models(self, request: Any, context: Any) -> control_pb2.StatusReply:
        await self._answer(request, context)
        return control_pb2.StatusReply(
            json=json.dumps({"models": [{"name": "tiny", "size_bytes": 1234, "nodes": ["a"]}]})
        )

    async def Plan(self, request: Any, context: Any) -> control_pb2.PlanReply:
        await self._answer(request, context)
        return control_pb2.PlanReply(json=json.dumps(self.plan))

    async def Deploy(self, request: Any, context: Any) -> AsyncIterator[control_pb2.DeployProgress]:
        await self._answer(request, context)
        for state in self.progress:
            yield control_pb2.DeployProgress(json=json.dumps(state))

    async def Undeploy(self, request: Any, context: Any) -> control_pb2.Empty:
        await self._answer(request, context)
        return control_pb2.Empty()

    async def Pause(self, request: Any, context: Any) -> control_pb2.PauseReply:
        await self._answer(request, context)
        reply = control_pb2.PauseReply(node=f"id-{request.node}", name=request.node)
        if self.pause_error is not None:
            reply.error.CopyFrom(error_to_proto(self.pause_error))
        return reply

    async def Keys(self, request: Any, context: Any) -> control_pb2.StatusReply:
        await self._answer(request, context)
        key = {"name": "phone", "created": 1700000000, "per_minute": 30, "at_once": None}
        secret = {"secret": "p2psk-abc"} if request.create else {}
        return control_pb2.StatusReply(json=json.dumps({"keys": [key], **secret}))

    async def Leave(self, request: Any, context: Any) -> control_pb2.LeaveReply:
        await self._answer(request, context)
        asyncio.get_running_loop().call_later(0.2, self._stop)
        return control_pb2.LeaveReply(pid=self.pid)

    async def Shutdown(self, request: Any, context: Any) -> control_pb2.ShutdownReply:
        await self._answer(request, context)
        self.shut_down.set()
        asyncio.get_running_loop().call_later(0.2, self._stop)
        return control_pb2.ShutdownReply(pid=self.pid)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateEvent]:
        await self._answer(request, context)
        finished = False
        try:
            yield generate_pb2.GenerateEvent(
                resume=generate_pb2.ResumeRecord(
                    request="r1",
                    seed=request.sampling.seed,
                    prompt_ids=[1, 2, 3],
                    plan_json=json.dumps(PLAN.to_json()),
                )
            )
            for index, word in enumerate(self.words):
                if index == self.break_after:
                    assert self.break_with
                    await abort(context, self.break_with)
                await asyncio.sleep(self.between_s)
                yield generate_pb2.GenerateEvent(
                    delta=generate_pb2.TextDelta(
                        text=word, index=index, tokens=[generate_pb2.Token(id=100 + index)]
                    )
                )
            finished = True
            if not self.finishes:
                return
            yield generate_pb2.GenerateEvent(
                finish=generate_pb2.Finish(
                    reason="stop",
                    prompt_tokens=3,
                    completion_tokens=len(self.words),
                    ttft_ms=12.5,
                    tokens_per_second=34.5,
                )
            )
        finally:
            # gRPC cancels the handler, or closes this generator when the cancel comes between two messages
            if not finished:
                self.cancelled.set()
