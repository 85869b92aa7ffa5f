"""A driver in front of no engine: the real stream protocol, tokens from a function of the prompt. And a
cluster around it.

Everything else in the tests that use it is real: gateway, tokenizer, templates, gRPC and HTTP servers on
real ports.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc.aio

from p2pshard.errors import Conflict, ModelNotFound, NotReady, P2PShardError, StageLost
from p2pshard.models.manifest import Manifest
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.channels import add_raw_methods, bind, make_server
from p2pshard.transport.generated import control_pb2, generate_pb2
from p2pshard.transport.grpc_errors import abort, error_to_proto

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 258

NextToken = Callable[[Sequence[int], int], int]
"""(prompt ids, output index) → id."""


def byte_tokenizer() -> bytes:
    """tokenizer.json of 256 byte tokens (id = byte) and the special ones after them."""
    from p2pshard_node.gateway.tokenizer import _byte_alphabet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = dict(_byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return str(tokenizer.to_str()).encode()


class MemoryStore:
    """One manifest and its tokenizer."""

    def __init__(self, template: str = TEMPLATE, tokenizer: bytes | None = None, **tokens: Any) -> None:
        self.blob = tokenizer if tokenizer is not None else byte_tokenizer()
        sha256 = hashlib.sha256(self.blob).hexdigest()
        self.manifest = Manifest(
            format="gguf",
            config={"vocab_size": 259},
            tensors=(),
            tokenizer=sha256,
            chat_template=template,
            tokens={"eos_ids": [EOS], "bos_id": 256, "add_bos": False, "eos_token": "<|im_end|>", **tokens},
            blobs={sha256: len(self.blob)},
        )

    def get(self, digest: str) -> Manifest | None:
        return self.manifest if digest == self.manifest.digest else None

    def holds(self, sha256: str) -> bool:
        return sha256 == self.manifest.tokenizer

    def read(self, sha256: str, offset: int = 0) -> Iterator[bytes]:
        yield self.blob[offset:]

    def names(self) -> list[dict[str, Any]]:
        return [
            {"name": "tiny", "size_bytes": 5, "digest": self.manifest.digest, "path": "/models/tiny.gguf"}
        ]


def make_plan(manifest: str, *, context: int = 128, n: int = 1) -> Plan:
    stages = (
        Stage((0, 1), embedding=True, head=False, ranks=(Rank("node-a"),)),
        Stage((2, 3), embedding=False, head=True, ranks=(Rank("node-b"),)),
    )
    return Plan(
        (Replica(stages),),
        Epoch(n, "node-a"),
        "tolerant",
        manifest,
        "tiny",
        "float32",
        context=context,
        concurrency=2,
        block_size=16,
        blocks=64,
        chunk_tokens=64,
        layers=4,
    )


def letters(prompt: Sequence[int], index: int) -> int:
    """a, b, c … from the length of the prompt on: every answer differs a little."""
    return ord("a") + (len(prompt) + index) % 26


def spells(text: str, then: int = EOS) -> NextToken:
    """The bytes of `text`, then `then` for ever."""
    data = text.encode()
    return lambda _prompt, index: data[index] if index < len(data) else then


class FakeDriver:
    """Serves ``/p2pshard.v1.Data/Driver`` as the worker of the first stage does."""

    def __init__(self, plan: Plan, next_token: NextToken = letters, *, delay_s: float = 0.0) -> None:
        self.plan = plan
        self.next_token = next_token
        self.delay_s = delay_s
        self.batch = 1
        """Tokens in one message."""
        self.fail_at: int | None = None
        """Output index at which the request fails with `failure`."""
        self.failure: P2PShardError = StageLost(
            "stage 1 (layers 2-3) on node-b is gone", node="node-b", layers=[2, 3]
        )
        self.skip_at: int | None = None
        self.mute_end = False
        """Give all tokens and never say that it was the last."""
        self.silent = False
        """Accept streams and never say hello."""
        self.streams = 0
        self.submits: list[generate_pb2.Submit] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = make_server()
        add_raw_methods(self._server, "p2pshard.v1.Data", {"Driver": self._serve})
        self.port = bind(self._server, None, "127.0.0.1", (self.port,))
        await self._server.start()

    async def kill(self) -> None:
        """Cut every stream at once, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def _serve(self, commands: AsyncIterator[bytes], context: Any) -> None:
        """Runs one stream; requests of it end with it."""
        self.streams += 1
        tasks: dict[str, asyncio.Task[None]] = {}
        # One task writes: cancelling a request in the middle of a write would leave the stream in pieces.
        events: asyncio.Queue[bytes] = asyncio.Queue(1000)

        async def write(**event: Any) -> None:
            await events.put(generate_pb2.DriverEvent(**event).SerializeToString())

        async def tell(request: Any, **news: Any) -> None:
            message = generate_pb2.News(request=request.request, attempt=request.attempt, **news)
            await write(batch=generate_pb2.Batch(news=[message]))

        async def write_all() -> None:
            while True:
                await context.write(await events.get())

        writer = asyncio.create_task(write_all())
        try:
            async for data in commands:
                command = generate_pb2.DriverCommand.FromString(data)
                kind = command.WhichOneof("command")
                if kind == "hello":
                    if self.silent:
                        continue
                    if (command.hello.epoch.n, command.hello.plan_digest) != (
                        self.plan.epoch.n,
                        self.plan.digest(),
                    ):
                        await abort(context, Conflict(f"this driver serves epoch {self.plan.epoch.n}"))
                    await write(hello=command.hello)
                elif kind == "submit":
                    self.submits.append(command.submit)
                    tasks[command.submit.request] = asyncio.create_task(self._run(command.submit, tell))
                elif command.cancel.request in tasks:
                    self.cancelled.append(command.cancel.request)
                    tasks[command.cancel.request].cancel()
                    await tell(command.cancel, finished="cancelled")
        finally:
            for task in (writer, *tasks.values()):
                task.cancel()
            await asyncio.gather(writer, *tasks.values(), return_exceptions=True)

    async def _run(self, submit: generate_pb2.Submit, tell: Callable[..., Any]) -> None:
        self.running.add(submit.request)
        try:
            await tell(submit, started=True)
            index, reason = len(submit.output_ids), ""
            while not reason:
                await asyncio.sleep(self.delay_s)
                tokens = []
                while len(tokens) < self.batch and not reason:
                    at = index + len(tokens)
                    if at == self.fail_at:
                        await tell(submit, failed=self._failed())
                        return
                    token = self.next_token(submit.prompt_ids, at)
                    tokens.append(self._token(token, submit.sampling.logprobs))
                    if token in submit.eos_ids:
                        reason = "stop"
                    elif at + 1 == submit.max_tokens:
                        reason = "length"
                where = index + 1 if index == self.skip_at else index
                await tell(submit, index=where, tokens=tokens)
                index += len(tokens)
            if self.mute_end:
                await asyncio.sleep(60)
            await tell(submit, finished=reason)
        finally:
            self.running.discard(submit.request)

    @staticmethod
    def _token(token: int, logprobs: int) -> generate_pb2.Token:
        if logprobs < 0:
            return generate_pb2.Token(id=token)
        top = [generate_pb2.TokenLogprob(id=(token + i) % 256, logprob=-0.5 - i) for i in range(logprobs)]
        return generate_pb2.Token(id=token, logprob=-0.5, top=top)

    def _failed(self) -> generate_pb2.Error:
        return error_to_proto(self.failure)


class FakeCluster:
    """One deployment with a driver, as seen by one node."""

    def __init__(self, store: MemoryStore, driver: FakeDriver) -> None:
        self.store = store
        self.driver = driver
        self.state = "ready"
        self.reason = ""
        self.error: P2PShardError | None = None
        self.ports: dict[str, int] = {}
        """Control ports of nodes, where they have one."""
        self.gone: set[str] = set()
        self.carried: Callable[[], list[dict[str, Any]]] = list
        """Requests of all nodes."""
        self.ready = asyncio.Event()
        self.paused: list[tuple[str, bool]] = []
        """(node, resume) of each wish."""

    def members(self) -> list[control_pb2.NodeInfo]:
        return [
            control_pb2.NodeInfo(
                id=n,
                name=n,
                addresses=[control_pb2.Address(host="127.0.0.1", port=p) for p in [self.ports.get(n)] if p],
            )
            for n in ("node-a", "node-b", "node-c")
            if n not in self.gone
        ]

    def not_joined(self) -> list[dict[str, Any]]:
        return []

    def deployments(self) -> list[control_pb2.Deployment]:
        return [
            control_pb2.Deployment(
                id="d1",
                model="tiny",
                manifest=self.store.manifest.digest,
                wanted=True,
                state=self.state,
                reason=self.reason,
                error=error_to_proto(self.error) if self.error is not None else None,
                plan=self.driver.plan.to_proto(),
            )
        ]

    def find(self, model: str) -> control_pb2.Deployment | None:
        return next((d for d in self.deployments() if model in (d.model, d.id)), None)

    async def wait_ready(self, deployment_id: str, timeout_s: float) -> control_pb2.Deployment:
        try:
            await asyncio.wait_for(self.ready.wait(), timeout_s)
        except TimeoutError:
            raise NotReady(f"tiny is {self.state}", state=self.state, reason=self.reason) from None
        self.state = "ready"
        return self.deployments()[0]

    def driver_target(self, deployment: control_pb2.Deployment) -> str:
        return f"127.0.0.1:{self.driver.port}"

    async def ensure_text(self, manifest: str) -> None:
        return None

    async def plan(self, model_ref: str, settings_json: str, local_client: bool) -> dict[str, Any]:
        return {"fits": True, "plan": self.driver.plan.to_json(), "local": local_client}

    async def deploy(
        self, model_ref: str, settings_json: str, local_client: bool
    ) -> AsyncIterator[dict[str, Any]]:
        if model_ref != "tiny":
            raise ModelNotFound(f"no model {model_ref}")
        yield {"state": "loading", "model": model_ref}
        yield {"state": "ready", "model": model_ref}

    async def pause(self, node: str, *, resume: bool) -> control_pb2.PauseReply:
        self.paused.append((node, resume))
        return control_pb2.PauseReply(node=f"node-{node}", name=node)

    async def undeploy(self, model: str) -> None:
        if model != "tiny":
            raise ModelNotFound(f"no model {model}")

    def status(self) -> dict[str, Any]:
        return {"nodes": [], "not_joined": [], "deployments": []}

    async def requests(self) -> dict[str, Any]:
        return {"requests": self.carried(), "unreachable": []}

    async def models(self) -> dict[str, Any]:
        row = {
            "name": "tiny",
            "size_bytes": 1,
            "digest": None,
            "nodes": ["node-c"],
            "path": "/models/tiny.gguf",
        }
        return {"models": [row], "unreachable": []}

    def kv(self) -> list[dict[str, Any]]:
        return [{"node": "node-a", "blocks_used": 0, "blocks_total": 64}]
