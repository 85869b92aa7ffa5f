"""The gateway's stream to the driver of one epoch, shared by all its requests of that deployment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from p2pshard.errors import Conflict, Internal, P2PShardError, ProtocolError, StageLost
from p2pshard.planning.plan import Plan
from p2pshard.transport.channels import EOF, raw_stream
from p2pshard.transport.generated import generate_pb2
from p2pshard.transport.grpc_errors import from_rpc_error

__all__ = ["DriverLink"]

METHOD = "/p2pshard.v1.Data/Driver"
_OPEN_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


class DriverLink:
    """One stream of commands and events, accepted by a hello; it is lost once and then never used again.

    `on_news` and `on_lost` are called from its reading task and must not wait, so that a slow request never
    holds up another's tokens.
    """

    def __init__(
        self,
        plan: Plan,
        deployment: str,
        target: str,
        channel: grpc.aio.Channel,
        *,
        queue: int,
        on_news: Callable[[DriverLink, generate_pb2.News], None],
        on_lost: Callable[[DriverLink, P2PShardError], None],
    ) -> None:
        self.plan = plan
        self.deployment = deployment
        self.target = target
        self.lost: P2PShardError | None = None
        """Why the stream is gone."""
        self._channel = channel
        self._commands: asyncio.Queue[bytes] = asyncio.Queue(queue)
        self._on_news = on_news
        self._on_lost = on_lost
        self._call: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, gateway: str) -> None:
        """Say hello and wait until the driver accepts it.

        Raises `StageLost` when the driver does not answer, `Conflict` when it serves another epoch, else the
        driver's error.
        """
        hello = generate_pb2.DriverHello(
            epoch=self.plan.epoch.to_proto(),
            plan_digest=self.plan.digest(),
            deployment=self.deployment,
            gateway=gateway,
        )
        self._call = raw_stream(self._channel, METHOD)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._call.write(generate_pb2.DriverCommand(hello=hello).SerializeToString())
                answer = await self._call.read()
        except TimeoutError as error:
            await self.close()
            raise self.stage_lost(f"did not answer within {_OPEN_TIMEOUT_S:g} s") from error
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            failure = await self._failure(error)
            await self.close()
            raise failure from error
        except BaseException:
            await self.close()
            raise
        if answer is EOF:
            failure = await self._failure(None)
            await self.close()
            raise failure
        try:
            event = generate_pb2.DriverEvent.FromString(answer)
        except DecodeError as error:
            await self.close()
            raise ProtocolError(f"the driver at {self.target} answered no DriverEvent") from error
        if event.WhichOneof("event") != "hello" or event.hello.epoch != hello.epoch:
            await self.close()
            raise Conflict(f"the driver at {self.target} serves another epoch than {self.plan.epoch.n}")
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def send(self, command: generate_pb2.DriverCommand) -> None:
        """Queue a command; never waits. When the queue is full the driver reads no more: it is lost."""
        if self.lost is not None:
            return
        try:
            self._commands.put_nowait(command.SerializeToString())
        except asyncio.QueueFull:
            self.lose(self.stage_lost(f"reads no commands ({self._commands.maxsize} are waiting)"))

    def lose(self, error: P2PShardError) -> None:
        """Give the stream up: every request on it hears `error`."""
        if self.lost is None:
            self.lost = error
            if self._call is not None:
                self._call.cancel()
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._on_lost(self, error)

    async def close(self) -> None:
        """End the stream and close the channel, telling nobody. The driver cancels what it still runs."""
        if self.lost is None:
            self.lost = Conflict("the link to the driver was closed")
        if self._call is not None:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def stage_lost(self, what: str) -> StageLost:
        """The error that names the driver's node and its layers."""
        stage = self.plan.stages[0]
        first, last = stage.layers
        return StageLost(
            f"node {stage.node} with layers {first}-{last} (and the driver) of {self.plan.model} {what}; "
            f"start that node again, or deploy again: p2pshard deploy {self.plan.model}",
            node=stage.node,
            layers=[first, last],
        )

    async def _failure(self, error: Exception | None) -> P2PShardError:
        """Why the stream ended: the driver's own error where it sent one, else the loss of its stage."""
        if isinstance(error, grpc.aio.AioRpcError):
            ended: Any = error
            if ended.trailing_metadata():
                return from_rpc_error(ended, self.target)
            return self.stage_lost(f"is gone ({ended.details() or ended.code().name})")
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return self.stage_lost("ended its stream")
        metadata, details = await self._call.trailing_metadata(), await self._call.details()
        make: Any = grpc.aio.AioRpcError
        return await self._failure(make(code, await self._call.initial_metadata(), metadata, details))

    async def _read(self) -> None:
        failure: Exception | None = None
        try:
            while (data := await self._call.read()) is not EOF:
                for news in generate_pb2.DriverEvent.FromString(data).batch.news:
                    self._on_news(self, news)
        except DecodeError:
            self.lose(ProtocolError(f"the driver at {self.target} sent bytes that are no DriverEvent"))
            return
        except grpc.aio.AioRpcError as error:
            failure = error
        except Exception as error:  # whatever it is, who waits for this stream has to hear of it
            log.exception("the stream of the driver at %s", self.target)
            self.lose(Internal(f"reading the driver's stream failed: {type(error).__name__}: {error}"))
            return
        self.lose(await self._failure(failure))

    async def _write(self) -> None:
        # A stream that is gone is reported by the reader, which knows its status.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._commands.get())
