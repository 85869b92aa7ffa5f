"""The Node gRPC service: what a client may ask of any node. Thin; the cluster and the gateway do the work."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import unquote

from p2pshard.errors import Internal, P2PShardError, Refused
from p2pshard.own_address import is_own_address
from p2pshard.transport.generated import control_pb2, control_pb2_grpc, generate_pb2
from p2pshard.transport.grpc_errors import abort

from .gateway.gateway import Gateway
from .gateway.view import ClusterView
from .keys import ApiKeys

__all__ = ["NodeService", "is_local"]

log = logging.getLogger(__name__)


def is_local(peer: str) -> bool:
    """Whether a gRPC peer (``ipv4:1.2.3.4:5``, ``ipv6:%5B::1%5D:5``, ``unix:``) runs on this machine."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    return is_own_address(unquote(rest).rpartition(":")[0])


@asynccontextmanager
async def _errors_cross(context: Any) -> AsyncIterator[None]:
    """Every error leaves as one of ours; a fault of ours is logged here, where its traceback is."""
    try:
        yield
    except P2PShardError as error:
        await abort(context, error)
    except Exception as error:
        log.exception("a call to this node failed")
        await abort(context, Internal(f"{type(error).__name__}: {error}"))


def _check_local(context: Any, verb: str, what: str = "stop it") -> None:
    if not is_local(context.peer()):
        raise Refused(
            f"only a client on this node's own machine may {what}, and you are "
            f"{unquote(context.peer())}; run p2pshard {verb} there"
        )


class NodeService(control_pb2_grpc.NodeServicer):
    """Serves clients. Paths, and stopping the node, are for clients on this machine only."""

    def __init__(
        self,
        view: ClusterView,
        gateway: Gateway,
        keys: ApiKeys,
        shutdown: Callable[[], None] | Callable[[], Awaitable[None]],
        leave: Callable[[], None],
    ) -> None:
        """`shutdown` asks the daemon to stop, `leave` to hand its layers over first; both must return at once."""
        self._view = view
        self._gateway = gateway
        self._keys = keys
        self._shutdown, self._leave = shutdown, leave

    async def Ping(self, request: control_pb2.Empty, context: Any) -> control_pb2.Empty:
        return control_pb2.Empty()

    async def Status(self, request: control_pb2.Empty, context: Any) -> control_pb2.StatusReply:
        async with _errors_cross(context):
            return control_pb2.StatusReply(json=json.dumps(self._view.status()))

    async def Plan(self, request: control_pb2.PlanRequest, context: Any) -> control_pb2.PlanReply:
        async with _errors_cross(context):
            plan = await self._view.plan(request.model, request.settings_json, is_local(context.peer()))
            return control_pb2.PlanReply(json=json.dumps(plan))

    async def Deploy(
        self, request: control_pb2.DeployRequest, context: Any
    ) -> AsyncIterator[control_pb2.DeployProgress]:
        async with _errors_cross(context):
            progress = self._view.deploy(request.model, request.settings_json, is_local(context.peer()))
            async for step in progress:
                yield control_pb2.DeployProgress(json=json.dumps(step))

    async def Undeploy(self, request: control_pb2.UndeployRequest, context: Any) -> control_pb2.Empty:
        async with _errors_cross(context):
            await self._view.undeploy(request.model)
            return control_pb2.Empty()

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateEvent]:
        """Deploys nothing by itself. The end of the call ends the request on every stage."""
        async with _errors_cross(context), aclosing(self._gateway.generate(request)) as events:
            async for event in events:
                yield event

    async def Cancel(self, request: control_pb2.CancelOne, context: Any) -> control_pb2.Empty:
        """Of a request that has ended, or never was, there is nothing to cancel: no error."""
        self._gateway.cancel(request.request)
        return control_pb2.Empty()

    async def Ps(self, request: control_pb2.Empty, context: Any) -> control_pb2.StatusReply:
        async with _errors_cross(context):
            return control_pb2.StatusReply(
                json=json.dumps({**await self._view.requests(), "kv": self._view.kv()})
            )

    async def Models(self, request: control_pb2.Empty, context: Any) -> control_pb2.StatusReply:
        """Models that members hold; paths, which are of this node, are shown to clients on this machine only."""
        async with _errors_cross(context):
            reply = await self._view.models()
            if not is_local(context.peer()):
                for row in reply["models"]:
                    del row["path"]
            return control_pb2.StatusReply(json=json.dumps(reply))

    async def Pause(self, request: control_pb2.PauseRequest, context: Any) -> control_pb2.PauseReply:
        async with _errors_cross(context):
            reply: control_pb2.PauseReply = await self._view.pause(request.node, resume=request.resume)
            return reply

    async def Keys(self, request: control_pb2.KeysRequest, context: Any) -> control_pb2.StatusReply:
        async with _errors_cross(context):
            _check_local(context, "keys", "make or revoke its keys")
            reply: dict[str, Any] = {}
            if request.create:
                _, reply["secret"] = await self._keys.create(
                    request.create, per_minute=request.per_minute or None, at_once=request.at_once or None
                )
            elif request.revoke:
                await self._keys.revoke(request.revoke)
            reply["keys"] = [key.to_json() for key in self._keys.all()]
            return control_pb2.StatusReply(json=json.dumps(reply))

    async def Leave(self, request: control_pb2.Empty, context: Any) -> control_pb2.LeaveReply:
        async with _errors_cross(context):
            _check_local(context, "leave")
            self._leave()
            return control_pb2.LeaveReply(pid=os.getpid())

    async def Shutdown(self, request: control_pb2.Empty, context: Any) -> control_pb2.ShutdownReply:
        async with _errors_cross(context):
            _check_local(context, "down")
            stopping = self._shutdown()
            if stopping is not None:
                await stopping
            return control_pb2.ShutdownReply(pid=os.getpid())
