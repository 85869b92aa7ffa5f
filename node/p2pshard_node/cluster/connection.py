"""A connection to a member. Its end fails the calls under way as an unreachable node; it never cancels their callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc.aio

from p2pshard.errors import NodeUnreachable
from p2pshard.transport.generated import control_pb2_grpc as rpc

__all__ = ["Connection"]


class Connection:
    """The channel to a member's control port, and the calls on it.

    gRPC ends the calls of a channel that is closed by cancelling whoever awaits them, which nobody can tell from a
    cancellation of their own.
    """

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self._channel, self.name = channel, name
        self._calls: set[_Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        self.stub = rpc.ClusterStub(self)
        """Calls raise `NodeUnreachable` when the connection is closed under them, else as gRPC does."""

    async def close(self, *, drain: bool = False) -> None:
        """End it; with `drain`, once the calls under way have ended by themselves."""
        if drain:
            await self._idle.wait()
        self.closed = True
        await self._channel.close()

    def unary_unary(self, *names: Any, **options: Any) -> Callable[..., _Call]:
        return self._opener(self._channel.unary_unary, *names, **options)

    def unary_stream(self, *names: Any, **options: Any) -> Callable[..., _Call]:
        return self._opener(self._channel.unary_stream, *names, **options)

    def stream_unary(self, *names: Any, **options: Any) -> Callable[..., _Call]:
        return self._opener(self._channel.stream_unary, *names, **options)

    def _opener(self, kind: Callable[..., Any], *names: Any, **options: Any) -> Callable[..., _Call]:
        method = kind(*names, **options)

        def begin(*arguments: Any, **named: Any) -> _Call:
            if self.closed:
                raise self.gone()
            return _Call(self, method(*arguments, **named))

        return begin

    def gone(self) -> NodeUnreachable:
        return NodeUnreachable(f"node {self.name} is no longer reached; the call to it was ended")

    def begun(self, call: _Call) -> None:
        self._calls.add(call)
        self._idle.clear()

    def ended(self, call: _Call) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()


class _Call:
    """As gRPC's call: to be awaited, iterated or read."""

    def __init__(self, connection: Connection, call: Any) -> None:
        self._connection, self._call = connection, call
        connection.begun(self)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        try:
            return await self._guarded(self._call)
        finally:
            self._connection.ended(self)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (message := await self.read()) is not grpc.aio.EOF:
                yield message
        finally:
            self.cancel()

    async def read(self) -> Any:
        """The next message of a stream, `grpc.aio.EOF` at its end."""
        try:
            message = await self._guarded(self._call.read())
        except BaseException:
            self._connection.ended(self)
            raise
        if message is grpc.aio.EOF:
            self._connection.ended(self)
        return message

    def cancel(self) -> None:
        self._call.cancel()
        self._connection.ended(self)

    async def _guarded(self, work: Any) -> Any:
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._connection.closed and not (task is not None and task.cancelling()):
                raise self._connection.gone() from None
            raise
        except (
            asyncio.InvalidStateError
        ):  # gRPC's word for a read on a call that a closed channel has cancelled
            if self._connection.closed:
                raise self._connection.gone() from None
            raise
