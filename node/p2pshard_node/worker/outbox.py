"""What waits to be sent to one gateway: bounded, so that a slow one stalls nobody.

All that a step has for the gateway is put here before its writer runs again, and leaves as one message.
"""

from __future__ import annotations

import asyncio
from collections import deque

from p2pshard.transport.generated import generate_pb2

__all__ = ["MAX_UNSENT", "Outbox"]

MAX_UNSENT = 65536
"""Unsent tokens and other news at which a gateway is given up."""
_MESSAGE_TOKENS = 4096
"""At most this many tokens and members in one message: with 20 logprobs each, about 1 MiB."""
_MEMBER_TOKENS = 1024


class Outbox:
    """News in order; what comes while earlier news of the same request is unsent is added to it."""

    def __init__(self) -> None:
        self._unsent: deque[generate_pb2.News] = deque()
        self._open: dict[str, generate_pb2.News] = {}
        """The last unsent member of each request that has not ended."""
        self._count = 0
        self._filled = asyncio.Event()
        self._overflow = asyncio.Event()

    def started(self, request: str, attempt: int) -> None:
        """It has left the waiting queue."""
        if member := self._member(request, attempt):
            member.started = True

    def token(self, request: str, attempt: int, index: int, token: generate_pb2.Token) -> None:
        """One more token, with output index `index`."""
        if member := self._member(request, attempt):
            if not member.tokens:
                member.index = index
            member.tokens.append(token)
            if len(member.tokens) == _MEMBER_TOKENS:
                del self._open[request]

    def finished(self, request: str, attempt: int, reason: str) -> None:
        if member := self._member(request, attempt):
            member.finished = reason
            del self._open[request]

    def failed(self, request: str, attempt: int, error: generate_pb2.Error) -> None:
        if member := self._member(request, attempt):
            member.failed.CopyFrom(error)
            del self._open[request]

    def _member(self, request: str, attempt: int) -> generate_pb2.News | None:
        """Where news of a request goes; never waits. None, and everything dropped, once there is too much."""
        self._count += 1
        self._filled.set()
        if self._count > MAX_UNSENT:
            self._overflow.set()
            self._unsent.clear()
            self._open.clear()
        if self._overflow.is_set():
            return None
        member = self._open.get(request)
        if member is None or member.attempt != attempt:
            member = self._open[request] = generate_pb2.News(request=request, attempt=attempt)
            self._unsent.append(member)
        return member

    async def overflow(self) -> None:
        """Return once there was too much: nothing more will be sent."""
        await self._overflow.wait()

    async def get(self) -> bytes:
        """The next message, a `DriverEvent` of all that is unsent (up to a size)."""
        while not self._unsent:
            self._filled.clear()
            await self._filled.wait()
        batch, size = [], 0
        while self._unsent and size < _MESSAGE_TOKENS:
            member = self._unsent.popleft()
            if self._open.get(member.request) is member:
                del self._open[member.request]
            batch.append(member)
            size += 1 + len(member.tokens)
        self._count = max(0, self._count - sum(_news(member) for member in batch))
        return generate_pb2.DriverEvent(batch=generate_pb2.Batch(news=batch)).SerializeToString()


def _news(member: generate_pb2.News) -> int:
    """How many calls made a member."""
    return len(member.tokens) + member.started + (member.WhichOneof("end") is not None)
