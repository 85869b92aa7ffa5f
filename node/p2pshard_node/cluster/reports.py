"""What this node's stages have to tell the coordinator: in order, until somebody takes it, and never what is out of date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from p2pshard.errors import P2PShardError
from p2pshard.transport.generated import control_pb2 as pb

from ..tasks import failure_of

__all__ = ["Reports"]

KEPT_S = 60.0
"""So long a report is tried; a new coordinator asks by itself."""
RETRY_FIRST_S = 0.2
RETRY_MOST_S = 2.0

_log = logging.getLogger("p2pshard.reports")


@dataclass
class Outbox:
    """Of one deployment."""

    waiting: list[tuple[pb.StageEvent, float]] = field(default_factory=list)
    """Oldest first, with when each is given up (monotonic)."""
    fresh: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Reports:
    """``send(event)`` raises while there is no coordinator that takes the event."""

    def __init__(self, send: Callable[[pb.StageEvent], Awaitable[None]]) -> None:
        self._send = send
        self._outboxes: dict[str, Outbox] = {}
        """By deployment, while there is something to tell."""
        self._stopped = False

    def put(self, event: pb.StageEvent) -> None:
        """Tell it after what was put before, of which only losses of the same epoch still matter: a stage that is ready
        now is ready, whatever kept it from that a moment ago."""
        if self._stopped:
            return
        box = self._outboxes.setdefault(event.deployment, Outbox())
        lost = [e for e in box.waiting if e[0].kind == "lost" and e[0].epoch == event.epoch]
        box.waiting = [*lost, (event, time.monotonic() + KEPT_S)]
        box.fresh.set()
        if box.task is None:
            box.task = asyncio.create_task(self._deliver(box), name=f"report {event.deployment}")
            box.task.add_done_callback(lambda t, d=event.deployment: self._ended(d, t))  # type: ignore[misc]

    async def stop(self) -> None:
        """What has not been told is dropped, and what comes later too."""
        self._stopped = True
        tasks = [box.task for box in self._outboxes.values() if box.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, deployment: str, task: asyncio.Task[None]) -> None:
        left = self._outboxes.pop(deployment).waiting
        failed = failure_of(task, _log, f"reports of deployment={deployment} not sent") is not None
        if not failed and not task.cancelled():
            for event, _ in left:  # put after the task had its last look
                self.put(event)

    async def _deliver(self, box: Outbox) -> None:
        attempt = 0
        while box.waiting:
            entry = event, until = box.waiting[0]
            box.fresh.clear()
            try:
                await self._send(event)
                done = True
            except (grpc.aio.AioRpcError, P2PShardError) as error:
                _log.debug("report not delivered: %s", error)
                done = time.monotonic() > until
                if done:
                    _log.warning("report not delivered kind=%s deployment=%s", event.kind, event.deployment)
            if done:
                attempt = 0
                box.waiting = [e for e in box.waiting if e is not entry]  # it may have been dropped meanwhile
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RETRY_MOST_S, RETRY_FIRST_S * 2**attempt)):
                    await box.fresh.wait()
            attempt += 1
