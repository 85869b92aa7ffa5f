"""What an epoch takes over of the one before it: keys and values of the sequences that ran when that ended.

Whoever has a stage of the new plan gets, for each of its layers, the blocks of those sequences: from its own memory
where it had the layer, else from the worker that had it, over `KV_METHOD`. Their requests come again to the new driver,
with all tokens so far, and find their blocks by content, as any prompt finds an earlier one's. What is not taken over in
time is computed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgpack
import numpy as np

from p2pshard.addresses import host_port
from p2pshard.credentials import Credentials
from p2pshard.errors import NotReady, P2PShardError, ProtocolError
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.channels import EOF, error_of, make_channel, raw_stream
from p2pshard_node.engine.stage import StageModel
from p2pshard_node.worker.protocol import unpack
from p2pshard_node.worker.table import BlockTable

__all__ = ["KV_METHOD", "Before", "Carried", "Content", "Left", "gather", "serve"]

KV_METHOD = "/p2pshard.v1.Data/Kv"
GATHER_S = 5.0
"""An epoch starts without what has not come by then."""
_PIECE = 1 << 20
_MAX_REQUEST = 1 << 20

Content = tuple[tuple[bytes, int], ...]
"""Keys of complete blocks, by `scheduling.prefix`, and where each lies; of each sequence in order of position."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Before:
    """The epoch that a new one follows, and where its stages' data ports are."""

    plan: Plan
    targets: tuple[str, ...]

    @classmethod
    def from_message(cls, value: Mapping[str, Any] | None) -> Before | None:
        """Of a ``load`` message's ``before``: ``{plan, targets: [[host, port], ...]}``."""
        if value is None:
            return None
        plan = Plan.from_json(value["plan"])
        plan.check()
        targets = tuple(host_port(str(host), int(port)) for host, port in value["targets"])
        if len(targets) != len(plan.stages):
            raise ProtocolError(f"{len(targets)} addresses for {len(plan.stages)} stages")
        return cls(plan, targets)

    def fits(self, plan: Plan) -> bool:
        """Whether blocks of that epoch are blocks of the plan too."""
        same = ("manifest", "dtype", "blocks", "block_size")
        return all(getattr(self.plan, name) == getattr(plan, name) for name in same)


@dataclass(frozen=True)
class Left:
    """One stage of an epoch that is over, whose thread has come to rest."""

    plan: Plan
    index: int
    model: StageModel
    table: BlockTable
    content: Content
    """On the first stage, which had the driver."""


@dataclass(frozen=True)
class Carried:
    """What a stage has taken over."""

    table: BlockTable
    content: Content = ()
    """On the first stage."""


# -- giving -----------------------------------------------------------------------------------------
async def serve(context: Any, left: Callable[[Epoch], Any]) -> None:
    """Answer one request for what an epoch leaves: ``{epoch, layers, blocks}``, without layers for its content.

    ``await left(epoch)`` waits for the end of the epoch; raises `NotReady` where it is not known.
    """
    try:
        async with asyncio.timeout(GATHER_S):
            request = _request(await context.read())
    except TimeoutError:
        raise ProtocolError(f"no request within {GATHER_S:.0f} s") from None
    found: Left = await left(request.epoch)
    if not request.layers:
        await context.write(_pack({"content": [[key, block] for key, block in found.content]}))
        return
    stage = found.plan.stages[found.index]
    if not all(stage.layers[0] <= layer <= stage.layers[1] for layer in request.layers):
        raise ProtocolError(f"layers {request.layers} are not all of {stage.layers[0]}-{stage.layers[1]}")
    if any(not 0 <= block < found.plan.blocks for block in request.blocks):
        raise ProtocolError(f"a block outside the pool of {found.plan.blocks}")
    ids = found.table.rows(request.blocks)
    await context.write(_pack({"ids": ids.tobytes()}))
    for piece in _pieces(found.model, request.layers, request.blocks):
        await context.write(_pack(piece))


def _pieces(model: StageModel, layers: Sequence[int], blocks: Sequence[int]) -> Iterator[dict[str, Any]]:
    for layer in layers:
        each = max(1, _PIECE // model.kv_block_bytes(layer))
        for first in range(0, len(blocks), each):
            data = model.read_kv(layer, blocks[first : first + each])
            yield {"layer": layer, "first": first, "data": data}


@dataclass(frozen=True)
class _Request:
    epoch: Epoch
    layers: tuple[int, ...]
    blocks: tuple[int, ...]


def _request(data: Any) -> _Request:
    if data is EOF or len(data) > _MAX_REQUEST:
        raise ProtocolError("a request for what an epoch leaves is one message")
    value = _unpack(data)
    try:
        number, proposer = value["epoch"]
        layers, blocks = value["layers"], value["blocks"]
        integers = all(type(n) is int for n in (number, *layers, *blocks))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no request for what an epoch leaves: {error!r}") from None
    if not integers or not isinstance(proposer, str) or len(set(layers)) != len(layers):
        raise ProtocolError("no request for what an epoch leaves")
    return _Request(Epoch(number, proposer), tuple(layers), tuple(blocks))


def _pack(value: Mapping[str, Any]) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _unpack(data: bytes) -> dict[str, Any]:
    return unpack(data, "a message")


# -- taking -----------------------------------------------------------------------------------------
async def gather(
    before: Before,
    own: Left | None,
    plan: Plan,
    index: int,
    model: StageModel,
    credentials: Credentials | None,
) -> Carried | None:
    """Have here what stage ``index`` of ``plan`` needs of the epoch before; ``own``: the stage that this worker had in it.

    None where that did not come about: then nothing of it may be used on any stage.
    """
    try:
        async with asyncio.timeout(GATHER_S):
            return await _gather(before, own, plan, index, model, credentials)
    except TimeoutError:
        log.warning("what epoch %s leaves did not come within %.0f s", before.plan.epoch.n, GATHER_S)
    except grpc.aio.AioRpcError as error:
        log.warning("what epoch %s leaves did not come: %s", before.plan.epoch.n, error_of(error).message)
    except (P2PShardError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("what epoch %s leaves is of no use: %r", before.plan.epoch.n, error)
    return None


async def _gather(
    before: Before,
    own: Left | None,
    plan: Plan,
    index: int,
    model: StageModel,
    credentials: Credentials | None,
) -> Carried:
    unchanged = own if own is not None and own.model is model else None
    if unchanged is not None and index > 0:
        return Carried(unchanged.table.successor())
    content = own.content if own is not None and own.index == 0 else await _content(before, credentials)
    if any(not 0 <= block < plan.blocks for _, block in content):
        raise ProtocolError(f"a block outside the pool of {plan.blocks}")
    if unchanged is not None:
        return Carried(unchanged.table.successor(), content)
    blocks = tuple(block for _, block in content)
    table = BlockTable(plan.blocks, plan.block_size)
    first, last = plan.stages[index].layers
    wanted = set(range(first, last + 1))
    if own is not None and blocks:
        had = own.plan.stages[own.index].layers
        shared = sorted(wanted & set(range(had[0], had[1] + 1)))
        model.take_kv(own.model, shared, blocks)
        table.fill(blocks, own.table.rows(blocks))
        wanted -= set(shared)
    if blocks:
        for stage, target in zip(before.plan.stages, before.targets, strict=True):
            layers = sorted(wanted & set(range(stage.layers[0], stage.layers[1] + 1)))
            if layers:
                ids = await _fetch(target, before.plan, layers, blocks, model, credentials)
                table.fill(blocks, ids)
    return Carried(table, content if index == 0 else ())


async def _content(before: Before, credentials: Credentials | None) -> Content:
    async with _call(before.targets[0], before.plan, (), (), credentials) as call:
        found = _unpack(await _next(call))["content"]
    if not all(isinstance(key, bytes) and type(block) is int for key, block in found):
        raise ProtocolError("a content that is none")
    return tuple((key, block) for key, block in found)


async def _fetch(
    target: str,
    plan: Plan,
    layers: Sequence[int],
    blocks: Sequence[int],
    model: StageModel,
    credentials: Credentials | None,
) -> np.ndarray:
    """Write the blocks of these layers into the pool; int32 [blocks, block_size]: the tokens that stand in them."""
    missing = {(layer, number) for layer in layers for number in range(len(blocks))}
    async with _call(target, plan, layers, blocks, credentials) as call:
        ids = np.frombuffer(_unpack(await _next(call))["ids"], np.int32).reshape(len(blocks), -1)
        while missing:
            piece = _unpack(await _next(call))
            layer, first, data = piece["layer"], piece["first"], piece["data"]
            count = len(data) // model.kv_block_bytes(layer)
            numbers = {(layer, number) for number in range(first, first + count)}
            if not count or not numbers <= missing:
                raise ProtocolError(f"blocks from {first} on of layer {layer}, which were not asked for")
            model.write_kv(layer, blocks[first : first + count], data)
            missing -= numbers
    return ids


@asynccontextmanager
async def _call(
    target: str, plan: Plan, layers: Sequence[int], blocks: Sequence[int], credentials: Credentials | None
) -> AsyncIterator[Any]:
    """One request, and the stream of its answer."""
    channel = make_channel(target, credentials, own_connection=True)
    stream = raw_stream(channel, KV_METHOD)
    try:
        await stream.write(_pack({"epoch": plan.epoch.pair, "layers": list(layers), "blocks": list(blocks)}))
        yield stream
    finally:
        stream.cancel()
        await channel.close(grace=None)


async def _next(call: Any) -> bytes:
    data = await call.read()
    if data is EOF:
        raise NotReady("its answer ended early", state="loading")
    assert isinstance(data, bytes)
    return data
