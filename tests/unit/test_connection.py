"""Calls to a member whose connection ends under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from p2pshard_node.cluster.connection import Connection

from p2pshard.errors import NodeUnreachable
from p2pshard.transport.channels import bind, make_channel, make_server
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc


class Slow(rpc.ClusterServicer):
    """Answers when told to."""

    def __init__(self) -> None:
        self.go, self.called = asyncio.Event(), asyncio.Event()

    async def Epochs(self, request: Any, context: Any) -> pb.EpochReport:
        self.called.set()
        await self.go.wait()
        return pb.EpochReport()

    async def Manifest(self, request: Any, context: Any) -> AsyncIterator[pb.Blob]:
        yield pb.Blob(data=b"one")
        self.called.set()
        await self.go.wait()
        yield pb.Blob(data=b"two")


@pytest.fixture
async def served() -> AsyncIterator[tuple[Slow, Connection]]:
    service, server = Slow(), make_server()
    rpc.add_ClusterServicer_to_server(service, server)
    port = bind(server, None, "127.0.0.1")
    await server.start()
    connection = Connection(make_channel(f"127.0.0.1:{port}", None, own_connection=True), "lab")
    yield service, connection
    service.go.set()
    await connection.close()
    await server.stop(None)


async def unary(connection: Connection) -> Any:
    return await connection.stub.Epochs(pb.EpochQuery())


async def stream(connection: Connection) -> list[bytes]:
    return [piece.data async for piece in connection.stub.Manifest(pb.ManifestRequest())]


async def read(connection: Connection) -> list[bytes]:
    call, got = connection.stub.Manifest(pb.ManifestRequest()), []
    while (piece := await call.read()) is not grpc.aio.EOF:
        got.append(piece.data)
    return got


@pytest.mark.parametrize("work", [unary, stream, read])
async def test_a_closed_connection_is_an_unreachable_node_not_a_cancellation(
    served: tuple[Slow, Connection], work: Any
) -> None:
    service, connection = served
    task = asyncio.create_task(work(connection))
    async with asyncio.timeout(5):
        await service.called.wait()
        await connection.close()
        with pytest.raises(NodeUnreachable, match="lab is no longer reached"):
            await task
        with pytest.raises(NodeUnreachable):
            await work(connection)


@pytest.mark.parametrize("work", [unary, stream, read])
async def test_a_callers_own_cancellation_stays_one(served: tuple[Slow, Connection], work: Any) -> None:
    service, connection = served
    task = asyncio.create_task(work(connection))
    async with asyncio.timeout(5):
        await service.called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await connection.close(drain=True)  # nothing of it is under way any more


@pytest.mark.parametrize("work", [unary, stream, read])
async def test_a_drained_connection_lets_its_calls_end(served: tuple[Slow, Connection], work: Any) -> None:
    service, connection = served
    task = asyncio.create_task(work(connection))
    async with asyncio.timeout(5):
        await service.called.wait()
        closing = asyncio.create_task(connection.close(drain=True))
        await asyncio.sleep(0.1)
        assert not closing.done()
        service.go.set()
        assert await task in (pb.EpochReport(), [b"one", b"two"])
        await closing
