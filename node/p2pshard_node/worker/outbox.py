"""What waits to be sent to one gateway: bounded, so that a slow one stalls nobody."""

from __future__ import annotations

import asyncio
from collections import deque

from p2pshard.transport.generated import generate_pb2

__all__ = ["Outbox"]

MAX_EVENTS = 8192
"""Unsent events (many tokens of one request are one event) at which a gateway is given up."""


class Outbox:
    """Events in order; tokens of a request whose last event is still unsent are added to that event."""

    def __init__(self) -> None:
        self._events: deque[generate_pb2.DriverEvent] = deque()
        self._open: dict[str, generate_pb2.DriverEvent] = {}
        """Unsent token events by request."""
        self._filled = asyncio.Event()
        self.overflowed = False

    def put(self, event: generate_pb2.DriverEvent) -> None:
        """Queue an event; never waits. Beyond `MAX_EVENTS` everything is dropped and `overflowed` set."""
        if len(self._events) >= MAX_EVENTS:
            self.overflowed = True
            self._events.clear()
            self._open.clear()
        if not self.overflowed:
            self._events.append(event)
        self._filled.set()

    def token(self, request: str, attempt: int, index: int, token: generate_pb2.Token) -> None:
        """Queue one token."""
        waiting = self._open.get(request)
        if waiting is not None and waiting.tokens.attempt == attempt:
            waiting.tokens.tokens.append(token)
            return
        event = generate_pb2.DriverEvent(
            tokens=generate_pb2.Tokens(request=request, attempt=attempt, index=index, tokens=[token])
        )
        self.put(event)
        if not self.overflowed:
            self._open[request] = event

    async def get(self) -> bytes | None:
        """The next event as bytes, or None once it overflowed."""
        while not self._events and not self.overflowed:
            self._filled.clear()
            await self._filled.wait()
        if self.overflowed:
            return None
        event = self._events.popleft()
        if event.HasField("tokens") and self._open.get(event.tokens.request) is event:
            del self._open[event.tokens.request]
        return event.SerializeToString()
