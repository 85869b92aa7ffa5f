"""An answer on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from p2pshard.errors import InvalidRequest, NodeUnreachable, NotReady, P2PShardError, ProtocolError
from p2pshard.json_text import parse_json
from p2pshard.results import Generation, TextDelta, Token, plan_from
from p2pshard.transport.channels import sent_by_peer
from p2pshard.transport.generated import control_pb2, generate_pb2
from p2pshard.transport.grpc_errors import from_rpc_error

__all__ = ["AsyncStream", "Begun", "Opened", "json_object"]


_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
"""How gRPC calls the end of a connection."""
QUIET_S = 2.0
"""Without a word of a node for so long, it is asked whether it is there."""
ASK_S = 1.5


@dataclass(frozen=True)
class Begun:
    """An answer that was begun at a node which is gone, as far as it came."""

    record: generate_pb2.ResumeRecord
    token_ids: list[int]
    address: str
    """Of that node."""


@dataclass(frozen=True)
class Opened:
    """A call that a node has taken."""

    address: str
    call: grpc.aio.UnaryStreamCall[Any, Any]
    first: generate_pb2.GenerateEvent
    stub: Any


_Opener = Callable[[Begun | None], Awaitable[Opened]]
"""Without an argument for a new answer, with one to carry it on at another node."""


class AsyncStream:
    """An answer on its way. Iterate for its pieces, or await it for the whole `Generation`.

    Leaving the loop early, closing the stream or cancelling the task cancels the request on every node.
    What had come by then stays readable through `result`, with ``finish_reason`` ``cancelled``.
    """

    def __init__(self, opener: _Opener) -> None:
        self._opener = opener
        self._at: Opened | None = None
        self._closed = False
        self._resume = generate_pb2.ResumeRecord()
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._finish: generate_pb2.Finish | None = None
        self._error: P2PShardError | None = None
        self._reading = False

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the node tokenised it; empty before the first event."""
        return tuple(self._resume.prompt_ids)

    async def start(self) -> None:
        """Send the request and wait until a node has taken it; reading does so too. Raises as `result`."""
        if self._at is not None or self._finish is not None:
            return
        try:
            self._at = await self._opener(None)
        except P2PShardError as error:
            self._error = error
            raise

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        if self._error:
            raise self._error
        if self._finish is not None:
            return
        if self._reading:
            raise InvalidRequest("this answer is already being read; a stream can be iterated once")
        self._reading = True
        try:
            await self.start()
            assert self._at is not None
            event = self._at.first
            while True:
                kind = event.WhichOneof("event")
                if kind == "resume":
                    self._resume = event.resume
                elif kind == "delta":
                    delta = TextDelta.from_proto(event.delta)
                    self._text.append(delta.text)
                    self._tokens.extend(delta.tokens)
                    yield delta
                elif kind == "finish":
                    self._finish = event.finish
                    return
                event = await self._next()
        except asyncio.CancelledError:
            if self._finish is None:
                raise
            return  # `aclose` was called elsewhere while this waited for the next piece
        except grpc.aio.AioRpcError as error:
            assert self._at is not None
            self._error = _located(error, self._at.address)
            raise self._error from error
        except P2PShardError as error:
            self._error = error
            raise
        finally:
            # also reached by `break` (the generator is closed) and by a cancelled task
            self._end()

    async def _next(self) -> generate_pb2.GenerateEvent:
        """The next event, from another node where the one that the answer came from is gone."""
        assert self._at is not None
        try:
            event = await self._read(self._at)
        except grpc.aio.AioRpcError as error:
            if self._closed or not self._resume.request or not _is_gone(error):
                raise
            begun = Begun(self._resume, [t.id for t in self._tokens], self._at.address)
            try:
                self._at = await self._opener(begun)
            except NodeUnreachable:
                raise error from None  # nobody else is there: what was lost says more
            if self._closed:
                self._at.call.cancel()
            return self._at.first
        if event is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
            raise ProtocolError(f"the node at {self._at.address} ended the answer without a finish reason")
        assert isinstance(event, generate_pb2.GenerateEvent)
        return event

    @staticmethod
    async def _read(at: Opened) -> Any:
        """The next message. A node that is silent is asked now and then whether it is there; raises as a broken connection
        when it does not answer."""
        read: asyncio.Future[Any] = asyncio.ensure_future(at.call.read())
        try:
            while True:
                done, _ = await asyncio.wait([read], timeout=QUIET_S)
                if done:
                    return read.result()
                try:
                    await at.stub.Ping(control_pb2.Empty(), timeout=ASK_S)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED and not read.done():
                        at.call.cancel()
                        raise
        finally:
            read.cancel()

    def _end(self) -> None:
        self._closed = True
        if self._at is not None:
            self._at.call.cancel()  # nothing to do when it is done already
        if self._finish is None:
            self._finish = generate_pb2.Finish(
                reason="cancelled",
                prompt_tokens=len(self._resume.prompt_ids),
                completion_tokens=len(self._tokens),
            )

    async def result(self) -> Generation:
        """Read what is left and return the whole.

        Raises:
            P2PShardError: as iterating does: `StageLost`, `NotReady`, `ContextExceeded`, `DeadlineExceeded`,
                `NodeUnreachable` and so on.
        """
        async for _ in self:
            pass
        return self._generation()

    def _generation(self) -> Generation:
        finish = self._finish or generate_pb2.Finish(reason="cancelled")
        return Generation(
            text="".join(self._text),
            token_ids=tuple(t.id for t in self._tokens),
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            finish_reason=finish.reason,
            ttft_ms=finish.ttft_ms,
            tokens_per_second=finish.tokens_per_second,
            plan=plan_from(json_object(self._resume.plan_json, "plan")) if self._resume.plan_json else None,
            request=self._resume.request,
            seed=self._resume.seed,
            tokens=tuple(self._tokens),
        )

    def __await__(self) -> Generator[Any, None, Generation]:
        return self.result().__await__()

    async def aclose(self) -> None:
        """Cancel the request unless it has finished."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Whether the node is gone, or is about to go, rather than that it refuses the request."""
    if not sent_by_peer(error):
        return error.code() in _GONE
    typed = from_rpc_error(error, "")
    return isinstance(typed, NotReady) and typed.details.get("state") == "stopping"


def _located(error: grpc.aio.AioRpcError, address: str) -> P2PShardError:
    """A node whose connection broke is named; errors that a node sent say enough themselves."""
    typed = from_rpc_error(error, address)
    if isinstance(typed, NodeUnreachable) and not sent_by_peer(error):
        return NodeUnreachable(
            f"the connection to the node at {address} was lost: {typed.message}", tried=[address]
        )
    return typed


def json_object(text: str, what: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ProtocolError(f"the node's {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"the node's {what} is not a JSON object")
    return value
