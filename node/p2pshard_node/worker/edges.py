"""The streams between stages: a client towards the next stage, a server side for the one before.

An edge is opened once per epoch by a hello that both ends must agree on. Frames go forward; the answer to
the hello, errors and pongs come back on the same stream. When an open edge breaks it stays broken: steps
may be lost, so the epoch is over and the next one opens new edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from p2pshard.credentials import Credentials
from p2pshard.errors import Conflict, NotReady, P2PShardError, ProtocolError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.channels import EOF, error_of, make_channel, raw_stream
from p2pshard.transport.frames import Assembler, Frame, Hello, Limits, encode

__all__ = ["EDGE_METHOD", "EdgeClient", "EdgeTerms", "IncomingEdge", "check_hello", "read_hello"]

EDGE_METHOD = "/p2pshard.v1.Data/Edge"
HELLO_TIMEOUT_S = 5.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_SIDE_QUEUE = 32
"""Frames that may wait to go backwards; pongs beyond it are dropped, for a newer one says the same."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeTerms:
    """What both ends of an epoch's edges must agree on, and how frames are bounded."""

    epoch: Epoch
    hello: Hello
    """Our own; the instance and stage differ at the other end."""
    limits: Limits
    invariant: bool
    """The plan demands equal fingerprints."""
    wire: str = "raw"
    """Codec of the hidden states that we send."""


def check_hello(terms: EdgeTerms, frame: Frame, *, stage: int, edge: str) -> None:
    """Raise `Conflict` with the reason unless the other end is `stage` of the same plan."""
    ours, theirs = terms.hello, frame.hello
    assert theirs is not None
    if frame.epoch != terms.epoch:
        raise Conflict(
            f"the other worker is in epoch ({frame.epoch.n}, {frame.epoch.proposer}), "
            f"this one in ({terms.epoch.n}, {terms.epoch.proposer})"
        )
    for what, mine, other in (
        ("deployment", ours.deployment, theirs.deployment),
        ("plan digest", ours.plan, theirs.plan),
        ("manifest digest", ours.manifest, theirs.manifest),
        ("stage", stage, theirs.stage),
        ("edge", edge, theirs.edge),
    ):
        if mine != other:
            raise Conflict(f"{what} differs: {str(mine)[:80]} here, {str(other)[:80]} there")
    if terms.invariant and ours.fingerprint != theirs.fingerprint:
        raise Conflict(
            f"numerics differ under an invariant plan: fingerprint {ours.fingerprint[:16]} here, "
            f"{theirs.fingerprint[:16]} there; deploy again, so that the plan is made for both"
        )


async def read_hello(context: Any, limits: Limits) -> Frame:
    """The hello that opens a stream. Raises `ProtocolError`, also when none comes in time."""
    assembler = Assembler(limits, kinds=frozenset({"hello"}))
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            while (message := await context.read()) is not EOF:
                if (frame := assembler.feed(message)) is not None:
                    return frame
    except TimeoutError:
        raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    raise ProtocolError("the stream ended without a hello")


class EdgeClient:
    """Our stream to the next stage, or from the last stage back to the driver. Callbacks never wait.

    `on_up()` once the other end has acknowledged; `on_frame(frame)` for errors and pongs that come back;
    `on_lost(reason)` once, when an edge that was up breaks.
    """

    def __init__(
        self,
        target: str,
        terms: EdgeTerms,
        credentials: Credentials | None,
        *,
        peer_stage: int,
        depth: int,
        on_up: Callable[[], None],
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.target = target
        self.up = False
        self.problem = f"{target}: not dialled yet"
        """Why the edge is not up."""
        self._terms, self._credentials, self._peer = terms, credentials, peer_stage
        # Two beside the window: an error that ends the epoch, and a ping.
        self._queue: asyncio.Queue[Frame] = asyncio.Queue(depth + 2)
        self._on_up, self._on_frame, self._on_lost = on_up, on_frame, on_lost

    def send(self, frame: Frame) -> bool:
        """Queue a frame; never waits. False when the queue is full (the other end takes nothing)."""
        try:
            self._queue.put_nowait(frame)
        except asyncio.QueueFull:
            return False
        return True

    def ping(self, frame: Frame) -> None:
        """Queue a ping unless something waits already: pings never take a step's place."""
        if self._queue.empty():
            self._queue.put_nowait(frame)

    async def run(self) -> None:
        """Dial until the edge is up; then move frames until it breaks."""
        channel = make_channel(self.target, self._credentials, own_connection=True)
        try:
            attempt = 0
            while True:
                try:
                    call, assembler = await self._open(channel)
                    break
                except P2PShardError as error:
                    self.problem = f"{self.target}: {error.message}"
                except grpc.aio.AioRpcError as error:
                    self.problem = error_of(error, self.target).message
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1
            self.up, self.problem = True, ""
            self._on_up()
            reason = await self._move(call, assembler)
            self.up, self.problem = False, reason
            self._on_lost(reason)
        finally:
            await channel.close(grace=None)

    async def _open(self, channel: grpc.aio.Channel) -> tuple[Any, Assembler]:
        call = raw_stream(channel, EDGE_METHOD)
        assembler = Assembler(self._terms.limits, kinds=frozenset({"hello_ack", "error"}))
        opened = False
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                for message in encode(Frame("hello", self._terms.epoch, hello=self._terms.hello)):
                    await call.write(message)
                while (answer := await call.read()) is not EOF:
                    frame = assembler.feed(answer)
                    if frame is None:
                        continue
                    if frame.kind == "error":
                        assert frame.error is not None
                        raise frame.error
                    check_hello(self._terms, frame, stage=self._peer, edge=self._terms.hello.edge)
                    assembler.epoch, assembler.kinds = self._terms.epoch, frozenset({"error", "pong"})
                    opened = True
                    return call, assembler
            raise NotReady("ended the stream without an answer")
        except TimeoutError:
            raise NotReady(f"no answer to our hello within {HELLO_TIMEOUT_S:g} s") from None
        except asyncio.InvalidStateError as error:
            raise NotReady(f"the stream is closed: {error}") from error
        finally:
            if not opened:
                call.cancel()

    async def _move(self, call: Any, assembler: Assembler) -> str:
        """Both directions until one ends; why."""
        tasks = {asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call, assembler))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _write(self, call: Any) -> str:
        while True:
            frame = await self._queue.get()
            try:
                for message in encode(frame, wire=self._terms.wire):
                    await call.write(message)
            except grpc.aio.AioRpcError as error:
                return error_of(error).message
            except asyncio.InvalidStateError:
                return "ended the stream"

    async def _read(self, call: Any, assembler: Assembler) -> str:
        try:
            while (message := await call.read()) is not EOF:
                if (frame := assembler.feed(message)) is not None:
                    self._on_frame(frame)
        except grpc.aio.AioRpcError as error:
            return error_of(error).message
        except ProtocolError as error:
            return f"sent what breaks the protocol: {error.message}"
        return "ended the stream"


class IncomingEdge:
    """The server side of one accepted edge."""

    def __init__(
        self, context: Any, terms: EdgeTerms, *, peer_stage: int, edge: str, kinds: frozenset[str]
    ) -> None:
        self.peer_stage = peer_stage
        self._context, self._terms, self._kinds = context, terms, kinds
        self._answer = Frame("hello_ack", terms.epoch, hello=replace(terms.hello, edge=edge))
        self._queue: asyncio.Queue[Frame] = asyncio.Queue(_SIDE_QUEUE)
        self._writing = asyncio.Lock()  # a call takes one write at a time

    def send_back(self, frame: Frame) -> None:
        """Queue an error or pong for the sender; dropped when it does not read."""
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(frame)

    async def run(self, on_frame: Callable[[Frame], None]) -> str:
        """Acknowledge, then hand each frame to `on_frame` until the stream ends; why it did.

        A `ProtocolError` of the bytes or of `on_frame` ends this stream alone.
        """
        await self._send(self._answer)
        writer = asyncio.create_task(self._write())
        assembler = Assembler(self._terms.limits, epoch=self._terms.epoch, kinds=self._kinds)
        try:
            while (message := await self._context.read()) is not EOF:
                if (frame := assembler.feed(message)) is not None:
                    on_frame(frame)
        except ProtocolError as error:
            log.warning("stream of stage %s ended: %s", self.peer_stage, error)
            await self._send(Frame("error", self._terms.epoch, error=error))
            return f"sent what breaks the protocol: {error.message}"
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        return "is gone (its stream ended)"

    async def _write(self) -> None:
        while True:
            await self._send(await self._queue.get())

    async def _send(self, frame: Frame) -> None:
        async with self._writing:
            for message in encode(frame):
                await self._context.write(message)
