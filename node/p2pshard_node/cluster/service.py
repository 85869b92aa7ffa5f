"""The Cluster gRPC service: what other nodes ask of this one.

Nothing in a message is trusted: ids and addresses are checked before use, and everything but a handshake and a
ping is for members only. A refusal is a typed error; no message ends the process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from p2pshard.errors import Internal, InvalidRequest, ModelNotFound, NotReady, P2PShardError, Refused
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc
from p2pshard.transport.grpc_errors import abort, error_to_proto

from .checks import checked_info
from .membership import MAX_GOSSIP
from .peers import NODE_KEY, NONCE_KEY, RELAYED_KEY, Peers

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["ClusterService"]

PIECE = 256 << 10
MAX_MEASURE = 16 << 20
MAX_QUERY = 1024
_HASH = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger("p2pshard.service")


def source_host(peer: str) -> str:
    """The host in gRPC's name of a caller (``ipv4:1.2.3.4:5``, ``ipv6:%5Bfe80::1%5D:5``); empty when there is none."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0].strip("[]")
    return host.removeprefix("::ffff:") if "." in host else host


def _relayed(context: Any) -> bool:
    return RELAYED_KEY in dict(context.invocation_metadata() or ())


def _checked_hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise InvalidRequest(f"{value[:80]!r} is not a sha256 in hex")
    return value


async def _fail(context: Any, error: Exception) -> None:
    if isinstance(error, P2PShardError):
        await abort(context, error)
    _log.error("a call failed", exc_info=error)
    await abort(context, Internal(f"{type(error).__name__}: {error}"))


def _unary(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Errors of a call become typed gRPC errors."""

    @functools.wraps(handler)
    async def wrapped(self: ClusterService, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except (P2PShardError, OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            return await _fail(context, error)

    return wrapped


def _stream(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(handler)
    async def wrapped(self: ClusterService, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for item in handler(self, request, context):
                yield item
        except (P2PShardError, OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            await _fail(context, error)

    return wrapped


class ClusterService(rpc.ClusterServicer):
    """See control.proto."""

    def __init__(self, cluster: Cluster, peers: Peers, store: Any) -> None:
        self._cluster, self._peers, self._store = cluster, peers, store

    def _caller(self, context: Any) -> str:
        """Id of the member that is calling. Raises `Refused` for anybody else."""
        keys = dict(context.invocation_metadata() or ())
        node, nonce = str(keys.get(NODE_KEY, "")), str(keys.get(NONCE_KEY, ""))
        if not nonce or not self._peers.state.is_member(node, nonce):
            raise Refused("only members of the cluster may ask that; shake hands first")
        return node

    # -- membership
    @_unary
    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        info = checked_info(request.sender)
        reply = await self._peers.called(info, source_host(context.peer()))
        return pb.HandshakeReply(
            accepted=reply.accepted,
            receiver=self._peers.state.me,
            reason=reply.reason,
            code=reply.code,
            highest_incarnation=reply.highest,
        )

    @_unary
    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingReply:
        checked_info(request.sender)
        for info in request.known[:MAX_GOSSIP]:
            checked_info(info)
        return self._peers.pinged(request)

    @_unary
    async def Leave(self, request: pb.Goodbye, context: Any) -> pb.Empty:
        if self._caller(context) != request.id:
            raise Refused("a node says goodbye for itself alone")
        self._peers.left(request.id, request.nonce)
        return pb.Empty()

    async def Measure(self, request_iterator: AsyncIterator[pb.Blob], context: Any) -> pb.Empty:
        """Swallow what is sent; the sender takes the time."""
        try:
            self._caller(context)
            total = 0
            async for piece in request_iterator:
                total += len(piece.data)
                if total > MAX_MEASURE:
                    raise InvalidRequest(f"a measurement is at most {MAX_MEASURE} bytes")
        except P2PShardError as error:
            await _fail(context, error)
        return pb.Empty()

    # -- deployments
    @_unary
    async def State(self, request: pb.StateRequest, context: Any) -> pb.StateReply:
        self._caller(context)
        wanted = set(request.deployments)
        rows = [r for r in self._cluster.table.all() if not wanted or r.id in wanted]
        return pb.StateReply(deployments=rows)

    @_stream
    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> AsyncIterator[pb.PrepareProgress]:
        caller = self._caller(context)
        if caller != request.epoch.proposer:
            raise Refused("an epoch is prepared by its proposer alone")
        async for progress in self._cluster.member.prepare(request):
            yield progress

    @_unary
    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitReply:
        self._caller(context)
        return await self._cluster.member.commit(request)

    @_unary
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.Empty:
        self._caller(context)
        await self._cluster.member.abort(request)
        return pb.Empty()

    @_unary
    async def Epochs(self, request: pb.EpochQuery, context: Any) -> pb.EpochReport:
        self._caller(context)
        return await self._cluster.member.epochs(request.deployment)

    @_unary
    async def Report(self, request: pb.StageEvent, context: Any) -> pb.Empty:
        if self._caller(context) != request.node:
            raise Refused("a node reports its own stages alone")
        self._cluster.coordinator.reported(request)
        return pb.Empty()

    @_unary
    async def Want(self, request: pb.WantDeployment, context: Any) -> pb.WantReply:
        self._caller(context)
        return await self._cluster.take_want(request, relayed=_relayed(context))

    @_unary
    async def Unwant(self, request: pb.UndeployRequest, context: Any) -> pb.Empty:
        self._caller(context)
        await self._cluster.take_unwant(request, relayed=_relayed(context))
        return pb.Empty()

    @_unary
    async def HandOver(self, request: pb.HandOverRequest, context: Any) -> pb.HandOverReply:
        if self._caller(context) != request.node:
            raise Refused("a node hands over its own layers alone")
        try:
            await self._cluster.coordinator.hand_over(request.node)
        except NotReady:
            raise  # ask whoever coordinates now
        except P2PShardError as error:
            return pb.HandOverReply(error=error_to_proto(error))
        return pb.HandOverReply()

    @_unary
    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseReply:
        self._caller(context)
        return await self._cluster.pause("", resume=request.resume)

    # -- what this node has and does
    @_unary
    async def Models(self, request: pb.Empty, context: Any) -> pb.ModelList:
        self._caller(context)
        return await self._cluster.survey.own_models()

    @_unary
    async def Resolve(self, request: pb.ModelName, context: Any) -> pb.ModelDigest:
        self._caller(context)
        return await self._cluster.survey.own_meaning(request.name)

    @_unary
    async def Requests(self, request: pb.Empty, context: Any) -> pb.RequestList:
        self._caller(context)
        return self._cluster.survey.own_requests()

    # -- content
    @_stream
    async def Manifest(self, request: pb.ManifestRequest, context: Any) -> AsyncIterator[pb.Blob]:
        self._caller(context)
        manifest = await asyncio.to_thread(self._store.get, _checked_hash(request.digest))
        if manifest is None:
            raise ModelNotFound(f"manifest {request.digest[:12]} is not here")
        data = manifest.to_bytes()
        for start in range(0, len(data), PIECE):
            yield pb.Blob(data=data[start : start + PIECE])

    @_unary
    async def HasTensors(self, request: pb.TensorQuery, context: Any) -> pb.TensorQueryReply:
        self._caller(context)
        if len(request.sha256) > MAX_QUERY:
            raise InvalidRequest(f"at most {MAX_QUERY} tensors are asked for at once")
        hashes = [_checked_hash(h) for h in request.sha256]
        held = await asyncio.to_thread(lambda: [bool(self._store.holds(h)) for h in hashes])
        return pb.TensorQueryReply(held=held)

    @_stream
    async def Tensor(self, request: pb.TensorRequest, context: Any) -> AsyncIterator[pb.Blob]:
        self._caller(context)
        sha = _checked_hash(request.sha256)
        if not await asyncio.to_thread(self._store.holds, sha):
            raise ModelNotFound(f"tensor {sha[:12]} is not here")
        blob = await asyncio.to_thread(self._store.locate, sha)
        if request.offset > blob.nbytes:
            raise InvalidRequest(f"offset {request.offset} is beyond the {blob.nbytes} bytes of the tensor")
        pieces = iter(self._store.read(sha, request.offset))
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield pb.Blob(data=piece)
