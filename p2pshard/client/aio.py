"""`AsyncClient`: a cluster, through any of its nodes, for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from p2pshard.addresses import host_port
from p2pshard.client.options import (
    GenerateOptions,
    Message,
    PlanOptions,
    apply_options,
    checked_text,
    settings_json,
)
from p2pshard.client.references import resolve_reference
from p2pshard.client.stream import AsyncStream, Begun, Opened, json_object
from p2pshard.config import local_address, parse_address
from p2pshard.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnreachable,
    NotReady,
    P2PShardError,
    ProtocolError,
)
from p2pshard.results import ClusterStatus, Deployment, Models, PlanResult, Requests
from p2pshard.transport.channels import make_channel, sent_by_peer
from p2pshard.transport.generated import control_pb2, control_pb2_grpc, generate_pb2
from p2pshard.transport.grpc_errors import error_from_proto, from_rpc_error

__all__ = ["CONNECT_S", "AsyncClient", "find_nodes"]

T = TypeVar("T")

CONNECT_S = 3.0
_BROWSE_S = 3.0
_CALL_S = 30.0
_MOST_OTHERS = 16
#: resolving a model on disk may mean reading all of it once, to know its content hashes
_RESOLVE_S = 600.0


class AsyncClient:
    """A cluster, through any of its nodes. Use it as an async context manager, or call `aclose`.

    Args:
        nodes: control addresses ``HOST:PORT``, tried in order. None: the daemon on this machine, else one
            that zeroconf finds.
        cluster: which cluster zeroconf may find. None: ``P2PSHARD_CLUSTER``, else ``default``.
        connect_timeout_s: how long each address may take to answer.
    """

    def __init__(
        self,
        nodes: Sequence[str] | str | None = None,
        *,
        cluster: str | None = None,
        connect_timeout_s: float = CONNECT_S,
    ) -> None:
        given = [nodes] if isinstance(nodes, str) else list(nodes or ())
        try:
            self._given = tuple(dict.fromkeys(parse_address(n) for n in given))
        except ValueError as error:
            raise InvalidRequest(f"node {error}", field="nodes") from error
        self._cluster = cluster or os.environ.get("P2PSHARD_CLUSTER") or "default"
        self._connect_timeout_s = connect_timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current: str | None = None
        self._connecting = asyncio.Lock()
        self._others: tuple[str, ...] = ()
        """Nodes that a node which is gone named."""
        self._gone = ""
        """The last node that was lost in the middle of an answer."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; streams on them are cancelled."""
        channels, self._channels, self._current = list(self._channels.values()), {}, None
        await asyncio.gather(*(channel.close(grace=None) for channel in channels))

    # -- connection -----------------------------------------------------------------------------
    async def _dial(self, address: str) -> None:
        """Connect to one address. Its channel stays for the next time: other calls may be on it."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = make_channel(address, None)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await _connected(channel)
        except (TimeoutError, ConnectionError) as error:
            raise NodeUnreachable(
                f"no daemon answers at {address} within {self._connect_timeout_s:g} s"
            ) from error

    async def _dial_any(self, addresses: Sequence[str]) -> str:
        """The first to answer of several addresses dialled at once: a dead one costs nobody time."""
        dials = {asyncio.create_task(self._dial(a)): a for a in addresses}
        pending = set(dials)
        winner: asyncio.Task[None] | None = None
        try:
            while pending and winner is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                winner = next((d for d in done if d.exception() is None), None)
        finally:
            for dial in pending:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
        if winner is None:
            raise NodeUnreachable(
                f"no daemon answers at {', '.join(addresses)} within {self._connect_timeout_s:g} s"
            )
        return dials[winner]

    async def _candidates(self) -> AsyncIterator[tuple[str, ...]]:
        """Groups of addresses in the order of trying; zeroconf only when nothing nearer answered."""
        for address in self._given:
            if address != self._gone:
                yield (address,)
        if self._others:
            yield self._others
        if self._gone in self._given:
            yield (self._gone,)
        if not self._given:
            yield (local_address(),)
            for addresses in await find_nodes(self._cluster):
                yield addresses

    async def _leave(self, address: str, others: Sequence[str]) -> None:
        """The node at `address` is gone; `others` are said to be nodes of its cluster. It comes last from now on."""
        self._others = tuple(a for a in dict.fromkeys((*self._others, *others)) if a != address)[
            :_MOST_OTHERS
        ]
        if self._current == address:
            self._current = None
        self._gone = address
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(grace=None)

    async def _attempts(self) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
        """Connected channels: the one in use first, then each other candidate that answers.

        Raises:
            NodeUnreachable: after the last one, naming all that was tried.
        """
        tried: list[str] = []
        if self._current:
            tried.append(self._current)
            yield self._current, self._channels[self._current]
        async for group in self._candidates():
            async with self._connecting:
                if self._current is None or self._current in tried:  # else another call found one meanwhile
                    fresh = [a for a in group if a not in tried]
                    if not fresh:
                        continue
                    tried.extend(fresh)
                    try:
                        self._current = await self._dial_any(fresh)
                    except NodeUnreachable:
                        continue
                address = self._current
            if address not in tried:
                tried.append(address)
            yield address, self._channels[address]
        looked = (
            ""
            if self._given
            else f", and zeroconf found no other of cluster {self._cluster!r} in {_BROWSE_S:g} s"
        )
        raise NodeUnreachable(
            f"no daemon answers (tried {', '.join(tried)}{looked}); "
            "start one with `p2pshard up`, or name one with --node HOST:PORT",
            tried=tried,
        )

    async def _once(self, operation: Callable[[str, Any], Awaitable[T]]) -> T:
        """Run a repeatable operation on the first node that answers it. An error that a node sent is its answer."""
        last: P2PShardError | None = None
        try:
            async for address, channel in self._attempts():
                try:
                    return await operation(address, control_pb2_grpc.NodeStub(channel))  # type: ignore[no-untyped-call]
                except grpc.aio.AioRpcError as error:
                    typed = from_rpc_error(error, address)
                    if sent_by_peer(error) or not isinstance(typed, NodeUnreachable):
                        raise typed from error
                    last = typed
        except NodeUnreachable as error:
            if last is not None and error.__cause__ is None:
                raise error from last  # why the last of them that took the call did not answer it
            raise
        raise AssertionError("unreachable: _attempts raises at its end")

    async def connect(self) -> str:
        """Connect if need be; the address of the node in use. Raises `NodeUnreachable`."""

        async def address_of(address: str, _: Any) -> str:
            return address

        return await self._once(address_of)

    async def _json_call(self, what: str, call: Callable[[str, Any], Any]) -> dict[str, Any]:
        async def operation(address: str, stub: Any) -> Any:
            try:
                return await call(address, stub)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not sent_by_peer(error):
                    raise DeadlineExceeded(
                        f"the node at {address} did not answer in time; is it stopped or overloaded?"
                    ) from error
                raise

        return json_object((await self._once(operation)).json, what)

    # -- the cluster ----------------------------------------------------------------------------
    async def status(self) -> ClusterStatus:
        """Members, peers that did not join and why, deployments.

        Raises:
            NodeUnreachable: no node answers.
        """
        return ClusterStatus.from_json(
            await self._json_call("status", lambda _, stub: stub.Status(control_pb2.Empty(), timeout=_CALL_S))
        )

    async def ps(self) -> Requests:
        """Requests that run or wait at any node, and the use of KV blocks. Raises `NodeUnreachable`."""
        return Requests.from_json(
            await self._json_call(
                "list of requests", lambda _, stub: stub.Ps(control_pb2.Empty(), timeout=_CALL_S)
            )
        )

    async def models(self) -> Models:
        """Models that lie on nodes of the cluster. Raises `NodeUnreachable`."""
        return Models.from_json(
            await self._json_call(
                "list of models", lambda _, stub: stub.Models(control_pb2.Empty(), timeout=_CALL_S)
            )
        )

    async def pause(self, node: str) -> str:
        """Have a node, by name or id, hand its layers to the others and free its memory; it stays a member. Returns its name.

        Raises:
            DoesNotFit: the others cannot hold them; nothing has changed.
            InvalidRequest: no member, or several, are called so.
        """
        return await self._pause(node, resume=False)

    async def resume(self, node: str) -> str:
        """Have a paused node take part again. Returns its name. Raises `InvalidRequest`."""
        return await self._pause(node, resume=True)

    async def _pause(self, node: str, *, resume: bool) -> str:
        request = control_pb2.PauseRequest(node=node, resume=resume)
        reply = await self._once(lambda _, stub: stub.Pause(request, timeout=_RESOLVE_S))
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        return str(reply.name)

    async def keys(self) -> list[dict[str, Any]]:
        """Keys of the HTTP API of the node that answers: ``{name, created, per_minute, at_once}``. From its own machine only."""
        return list((await self._keys(control_pb2.KeysRequest()))["keys"])

    async def create_key(
        self, name: str, *, per_minute: int | None = None, at_once: int | None = None
    ) -> str:
        """A new key for the HTTP API of the node that answers; it cannot be shown again. From its own machine only.

        Args:
            per_minute, at_once: requests that may begin in a minute, and be under way; None: no limit.

        Raises:
            Conflict: the name is in use.
        """
        request = control_pb2.KeysRequest(create=name, per_minute=per_minute or 0, at_once=at_once or 0)
        return str((await self._keys(request))["secret"])

    async def revoke_key(self, name: str) -> None:
        """End a key. Raises `InvalidRequest` for a name that is none."""
        await self._keys(control_pb2.KeysRequest(revoke=name))

    async def _keys(self, request: control_pb2.KeysRequest) -> dict[str, Any]:
        return await self._json_call("list of keys", lambda _, stub: stub.Keys(request, timeout=_CALL_S))

    async def leave(self) -> int:
        """Have the daemon that answers hand its layers to the others and stop; it takes this only from its own machine, and
        goes in any case. Returns its process id. Raises as `shutdown`."""
        reply = await self._once(lambda _, stub: stub.Leave(control_pb2.Empty(), timeout=_CALL_S))
        return int(reply.pid)

    async def shutdown(self) -> int:
        """Stop the daemon that answers; it takes this only from its own machine. Returns its process id.

        Raises:
            Refused: the daemon is on another machine.
            NodeUnreachable: no daemon answers.
        """
        reply = await self._once(lambda _, stub: stub.Shutdown(control_pb2.Empty(), timeout=_CALL_S))
        return int(reply.pid)

    # -- deployments ----------------------------------------------------------------------------
    async def plan(self, model: str, **options: Unpack[PlanOptions]) -> PlanResult:
        """What `deploy` would do; nothing is loaded. A model that does not fit is a result, not an error.

        Args:
            model: a name, or a directory or .gguf file of this machine when the node is on it.
            options: see `PlanOptions`.

        Raises:
            ModelNotFound, ModelCorrupt, UnsupportedModel: the model cannot be read.
            InvalidRequest: a setting that cannot be right, or a local path and the node is elsewhere.
            NodeUnreachable: no node answers.
        """
        settings = settings_json(**options)

        def call(address: str, stub: Any) -> Any:
            request = control_pb2.PlanRequest(model=resolve_reference(model, address), settings_json=settings)
            return stub.Plan(request, timeout=_RESOLVE_S)

        return PlanResult.from_json(await self._json_call("plan", call))

    async def deploy(
        self,
        model: str,
        *,
        on_progress: Callable[[Deployment], None] | None = None,
        **options: Unpack[PlanOptions],
    ) -> Deployment:
        """Plan, fetch and load a model, and return once it serves (at once when it already does).

        Args:
            model: as for `plan`.
            on_progress: called with every state on the way (from `Client`: on the client's own thread).
            options: see `PlanOptions`.

        Raises:
            DoesNotFit: with ``shortfall_bytes``, ``terms`` and ``suggestions`` in ``details``.
            NotReady: it ended in another state than ready; ``details`` has ``state`` and ``reason``.
            And what `plan` raises.
        """
        settings = settings_json(**options)

        async def operation(address: str, stub: Any) -> Deployment:
            request = control_pb2.DeployRequest(
                model=resolve_reference(model, address), settings_json=settings
            )
            call = stub.Deploy(request)
            last: Deployment | None = None
            try:
                async for message in call:
                    last = Deployment.from_json(json_object(message.json, "progress"))
                    if on_progress:
                        on_progress(last)
                    if last.state == "ready":
                        return last
            finally:
                call.cancel()
            state, reason = (last.state, last.reason) if last else ("unknown", "the node sent no progress")
            raise NotReady(f"{model} is not ready but {state}: {reason}", state=state, reason=reason)

        return await self._once(operation)

    async def undeploy(self, model: str) -> None:
        """Remove a deployment from the cluster.

        Raises:
            ModelNotFound: no deployment has that name.
            NodeUnreachable: no node answers.
        """

        def call(address: str, stub: Any) -> Any:
            return stub.Undeploy(
                control_pb2.UndeployRequest(model=resolve_reference(model, address)), timeout=_CALL_S
            )

        await self._once(call)

    # -- generation -----------------------------------------------------------------------------
    def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Continue ``prompt`` (text as it is, without a chat template, or token ids) on a deployed model.

        The request starts when the stream is first read. ``options``: see `GenerateOptions`.

        Raises:
            InvalidRequest: a value out of range, at once.
            From the stream: ModelNotFound, NotReady, ContextExceeded, StageLost, NodeUnreachable and so on.
        """
        request = generate_pb2.GenerateRequest()
        if isinstance(prompt, str):
            request.prompt = checked_text(prompt, "prompt")
        else:
            request.prompt_ids.SetInParent()
            try:
                request.prompt_ids.ids.extend(prompt)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"the prompt's token ids are not integers of 32 bit: {error}", field="prompt"
                ) from error
        return self._stream(model, request, options)

    def chat(
        self, model: str, messages: str | Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Answer ``messages`` (or one user message, when it is a string) through the model's chat template.

        ``options`` and errors are those of `generate`.
        """
        listed: list[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        )
        if not listed:
            raise InvalidRequest("there are no chat messages", field="messages")
        request = generate_pb2.GenerateRequest()
        for message in listed:
            if set(message) != {"role", "content"} or not all(isinstance(v, str) for v in message.values()):
                raise InvalidRequest(
                    f"a chat message has exactly 'role' and 'content', both text; got {dict(message)!r}",
                    field="messages",
                )
            role, content = (checked_text(message[key], "messages") for key in ("role", "content"))
            request.chat.messages.add(role=role, content=content)
        return self._stream(model, request, options)

    def _stream(
        self, model: str, request: generate_pb2.GenerateRequest, options: GenerateOptions
    ) -> AsyncStream:
        apply_options(request, **options)

        async def opener(begun: Begun | None) -> Opened:
            if begun is not None:
                await self._leave(begun.address, begun.record.gateways)
                _carry_on(request, begun)

            async def operation(address: str, stub: Any) -> Opened:
                request.model = resolve_reference(model, address)
                call = stub.Generate(request)
                try:
                    first = await call.read()
                    if first is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
                        # a call that failed raises from read(); this one ended well and empty
                        raise ProtocolError(f"the node at {address} ended the answer before it began")
                except BaseException:
                    call.cancel()
                    raise
                return Opened(address, call, first, stub)

            return await self._once(operation)

        return AsyncStream(opener)


def _carry_on(request: generate_pb2.GenerateRequest, begun: Begun) -> None:
    """Make of a request the one that goes on with its answer."""
    record = begun.record
    request.resume.CopyFrom(
        generate_pb2.Resume(
            prompt_ids=record.prompt_ids, output_ids=begun.token_ids, manifest=record.manifest
        )
    )
    request.sampling.CopyFrom(record.sampling)
    request.has_seed, request.max_tokens = True, record.max_tokens


async def _connected(channel: grpc.aio.Channel) -> None:
    """Return once the channel is ready; raise `ConnectionError` when an attempt that began meanwhile fails.

    `channel_ready` would go on trying, and a refused connection would cost the whole timeout.
    """
    failed = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
    state = channel.get_state(try_to_connect=True)
    # a channel that failed earlier first gets its next attempt
    attempted = state not in failed
    while state is not grpc.ChannelConnectivity.READY:
        if attempted and state in failed:
            raise ConnectionError("the connection was refused")
        await channel.wait_for_state_change(state)
        attempted = True
        state = channel.get_state(try_to_connect=True)


async def find_nodes(cluster: str, timeout_s: float = _BROWSE_S) -> list[tuple[str, ...]]:
    """Control addresses of daemons of ``cluster`` that zeroconf finds in ``timeout_s``, grouped by daemon."""
    # zeroconf takes a while to load, and most clients name their node or have a daemon beside them
    from p2pshard import discovery

    found = await discovery.browse(timeout_s, cluster=cluster, enough=1)
    return [tuple(host_port(host, port) for host, port in a.addresses) for a in found]
