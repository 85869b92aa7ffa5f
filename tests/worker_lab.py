"""Real worker processes driven over their socket pairs, without a daemon, and a gateway's stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from p2pshard_node.models.store import ModelStore
from p2pshard_node.worker.driver import DRIVER_METHOD
from p2pshard_node.worker.protocol import ControlChannel

from p2pshard.models.layout import needed_tensors
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.channels import EOF, make_channel, raw_stream
from p2pshard.transport.generated import generate_pb2

DEPLOYMENT = "dep-1"


def make_plan(
    manifest: str,
    layers: int,
    stages: int,
    *,
    cuts: Sequence[int] = (),
    context: int = 512,
    block_size: int = 16,
    blocks: int | None = None,
    chunk_tokens: int = 64,
    dtype: str = "float32",
    concurrency: int = 8,
) -> Plan:
    """`layers` in `stages` equal parts, or cut before each layer of `cuts`; stage i on node ``n<i>``."""
    firsts = [0, *(cuts or [layers * i // stages for i in range(1, stages)])]
    ends = [*firsts[1:], layers]
    parts = tuple(
        Stage((first, end - 1), first == 0, end == layers, (Rank(f"n{i}"),))
        for i, (first, end) in enumerate(zip(firsts, ends, strict=True))
    )
    count = blocks if blocks is not None else concurrency * -(-context // block_size)
    return Plan(
        (Replica(parts),),
        Epoch(1, "n0"),
        "tolerant",
        manifest,
        "tiny",
        dtype,
        context,
        concurrency,
        block_size,
        count,
        chunk_tokens,
        layers,
    )


@dataclass(eq=False)
class WorkerHandle:
    process: asyncio.subprocess.Process
    control: ControlChannel
    events: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, *, core: int | None = None) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        prefix = ["taskset", "-c", str(core)] if core is not None else []
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "p2pshard_node.worker",
            "--control-fd",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        handle = cls(process, ControlChannel(*await asyncio.open_connection(sock=ours)))
        handle.reader = asyncio.create_task(handle._read())
        return handle

    async def _read(self) -> None:
        while (event := await self.control.read()) is not None:
            self.events.append(event)
            self.changed.set()
        self.events.append({"ev": "closed"})
        self.changed.set()

    async def expect(self, *names: str, after: int = 0, seconds: float = 60) -> dict[str, Any]:
        """The first event of these names after index `after`; fails when the worker refuses or ends."""
        async with asyncio.timeout(seconds):
            while True:
                for event in self.events[after:]:
                    if event["ev"] in names:
                        return event
                    assert event["ev"] not in ("refused", "fatal", "closed"), event
                self.changed.clear()
                await self.changed.wait()

    async def stats(self) -> dict[str, Any]:
        after = len(self.events)
        self.control.send({"op": "stats"})
        return await self.expect("stats", after=after)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    async def close(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ConnectionError):
                self.control.send({"op": "stop"})
            self.control.close()
            try:
                async with asyncio.timeout(5):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.gather(self.reader, return_exceptions=True)


class Ring:
    """The workers of one plan."""

    def __init__(
        self, plan: Plan, workers: list[WorkerHandle], loader: Callable[[Plan, int], dict[str, Any]]
    ) -> None:
        self.plan, self.workers, self._loader = plan, workers, loader
        self.loaded: list[dict[str, Any]] = []

    @property
    def ports(self) -> list[int]:
        return [event["port"] for event in self.loaded]

    async def load(self, plan: Plan, **fields: Any) -> None:
        """Load the plan's stages, one after the other; they are its own from now on."""
        loaded = []
        for index, worker in enumerate(self.workers):
            after = len(worker.events)
            worker.control.send({**self._loader(plan, index), **fields})
            loaded.append(await worker.expect("loaded", after=after))
        self.plan, self.loaded = plan, loaded

    def activate(self, index: int, *, next_port: int | None = None) -> None:
        last = len(self.ports) - 1
        following = next_port or (self.ports[index + 1] if index < last else None)
        self.workers[index].control.send(
            {
                "op": "activate",
                "deployment": DEPLOYMENT,
                "epoch": [self.plan.epoch.n, self.plan.epoch.proposer],
                "digest": self.plan.digest(),
                "numerics": self.plan.measured(
                    (e["numerics"], e["fingerprint"]) for e in self.loaded
                ).numerics,
                "next": ["127.0.0.1", following] if following else None,
                "back": ["127.0.0.1", self.ports[0]] if index == last and last > 0 else None,
            }
        )

    async def ready(self, seconds: float = 60) -> None:
        after = len(self.workers[0].events)
        for index in range(len(self.workers)):
            self.activate(index)
        await self.workers[0].expect("ready", after=after, seconds=seconds)

    async def idle(self, seconds: float = 2.0) -> None:
        """No block and no sequence on any stage."""
        deadline = time.monotonic() + seconds
        while True:
            stats = [await w.stats() for w in self.workers]
            if all(s["blocks_used"] == 0 and s["sequences"] == 0 for s in stats):
                return
            assert time.monotonic() < deadline, stats
            await asyncio.sleep(0.05)

    def gateway(self) -> Gateway:
        return Gateway(self.plan, self.ports[0])


@contextlib.asynccontextmanager
async def ring(
    model: Path,
    folder: Path,
    plan_of: Callable[[str, int], Plan],
    *,
    cores: Sequence[int] = (),
    start: bool = True,
    load: dict[str, Any] | None = None,
) -> AsyncIterator[Ring]:
    """Workers for ``plan_of(manifest digest, layers)``, loaded and (with `start`) ready."""
    store = ModelStore(folder / "store", [model.parent])
    manifest = store.resolve(str(model), local_client=True).manifest
    plan = plan_of(manifest.digest, int(manifest.config["num_hidden_layers"]))
    workers: list[WorkerHandle] = []

    def loader(plan: Plan, index: int) -> dict[str, Any]:
        stage, source = plan.stages[index], folder / f"source-{index}.json"
        entries = needed_tensors(manifest, *stage.layers, stage.embedding, stage.head)
        store.write_source(manifest, entries, source)
        return {
            "op": "load",
            "deployment": DEPLOYMENT,
            "plan": plan.to_json(),
            "stage": index,
            "source": str(source),
            "host": "127.0.0.1",
            "ports": [0, 0],
            "threads": 1,
            "node": stage.node,
            "next": None,
        }

    try:
        for index in range(len(plan.stages)):
            workers.append(await WorkerHandle.spawn(core=cores[index] if cores else None))
        for worker in workers:
            await worker.expect("started")
        made = Ring(plan, workers, loader)
        await made.load(plan, **(load or {}))
        if start:
            await made.ready()
        yield made
    finally:
        await asyncio.gather(*(w.close() for w in workers))


class Gateway:
    """A gateway's stream to the driver; collects what comes for each request."""

    def __init__(self, plan: Plan, port: int) -> None:
        self.plan, self.port = plan, port
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.ends: dict[str, asyncio.Future[Any]] = {}
        self.order: list[tuple[str, float]] = []
        """(request, time) of each message's tokens of a request."""
        self.messages = 0
        """That have come."""
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Gateway:
        self.channel = make_channel(f"127.0.0.1:{self.port}", None)
        self.call = raw_stream(self.channel, DRIVER_METHOD)
        await self.hello()
        self._reader = asyncio.create_task(self._read())
        return self

    async def _write(self, command: generate_pb2.DriverCommand) -> None:
        async with self._lock:  # a call takes one write at a time
            await self.call.write(command.SerializeToString())

    async def hello(self, **change: Any) -> generate_pb2.DriverEvent:
        hello = generate_pb2.DriverHello(
            epoch=self.plan.epoch.to_proto(),
            plan_digest=self.plan.digest(),
            deployment=DEPLOYMENT,
            gateway="gw",
        )
        for key, value in change.items():
            setattr(hello, key, value)
        await self._write(generate_pb2.DriverCommand(hello=hello))
        return generate_pb2.DriverEvent.FromString(await self.call.read())

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.channel.close(grace=None)

    async def _read(self) -> None:
        try:
            while (data := await self.call.read()) is not EOF:
                self._take(generate_pb2.DriverEvent.FromString(data))
            failure: Exception = ConnectionError("the driver ended its stream")
        except grpc.aio.AioRpcError as error:
            failure = error
        for end in self.ends.values():
            if not end.done():
                end.set_exception(failure)

    def _take(self, event: generate_pb2.DriverEvent) -> None:
        self.messages += 1
        for news in event.batch.news:
            name, got = news.request, self.tokens[news.request]
            if news.tokens:
                assert news.index == len(got), "a gap or a repeat"
                got += [t.id for t in news.tokens]
                self.logprobs[name] += list(news.tokens)
                self.order.append((name, time.perf_counter()))
            match news.WhichOneof("end"):
                case "finished":
                    self.ends[name].set_result(news.finished)
                case "failed":
                    self.ends[name].set_result(news.failed)

    async def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        output_ids: Sequence[int] = (),
        eos: Sequence[int] = (),
        deadline_s: float = 0,
        attempt: int = 1,
        draft: int = 0,
        **sampling: Any,
    ) -> None:
        self.tokens[name] = list(output_ids)
        self.logprobs[name] = []
        self.ends[name] = asyncio.get_running_loop().create_future()
        submit = generate_pb2.Submit(
            request=name,
            attempt=attempt,
            prompt_ids=prompt,
            output_ids=output_ids,
            max_tokens=max_tokens,
            sampling=generate_pb2.Sampling(**({"logprobs": -1} | sampling)),
            eos_ids=eos,
            deadline_s=deadline_s,
            draft=draft,
        )
        await self._write(generate_pb2.DriverCommand(submit=submit))

    async def given(self, name: str, count: int, seconds: float = 30) -> None:
        """Until so many tokens of a request are here."""
        async with asyncio.timeout(seconds):
            while len(self.tokens[name]) < count:
                await asyncio.sleep(0.01)

    async def cancel(self, name: str) -> None:
        cancel = generate_pb2.CancelRequest(request=name, attempt=1)
        await self._write(generate_pb2.DriverCommand(cancel=cancel))

    async def end(self, name: str, seconds: float = 60) -> Any:
        async with asyncio.timeout(seconds):
            return await self.ends[name]

    async def generate(self, name: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        await self.submit(name, prompt, max_tokens, **options)
        reason = await self.end(name)
        assert reason in ("length", "stop"), reason
        return self.tokens[name]
