"""Whether this node takes part in what is served, and how it steps back: its layers go to others first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from p2pshard.errors import NotReady, P2PShardError
from p2pshard.transport.generated import control_pb2 as pb

from .peers import Peers

__all__ = ["DUTIES", "OwnDuty"]

DUTIES: dict[pb.Duty.ValueType, str] = {
    pb.DUTY_SERVING: "member",
    pb.DUTY_PAUSED: "paused",
    pb.DUTY_LEAVING: "leaving",
}
"""What people read of each."""
FREED_S = 10.0
"""So long a node that has handed its layers over waits for its workers to end."""
LOOK_S = 0.05

_log = logging.getLogger("p2pshard.duty")


class OwnDuty:
    """One per node. ``hand_over()``: returns once the coordinator has given this node's layers to others; ``held()``:
    deployments that still have a worker here."""

    def __init__(
        self,
        peers: Peers,
        hand_over: Callable[[], Awaitable[None]],
        held: Callable[[], set[str]],
    ) -> None:
        self._peers, self._hand_over, self._held = peers, hand_over, held
        self.value: pb.Duty.ValueType = pb.DUTY_SERVING
        self._changing = asyncio.Lock()

    def _set(self, duty: pb.Duty.ValueType) -> None:
        if duty != self.value:
            _log.info("this node is now %s", DUTIES[duty])
        self.value = duty
        self._peers.changed()

    async def rest(self, duty: pb.Duty.ValueType) -> None:
        """Have this node's layers handed over, and its memory free.

        Where that cannot be, nothing has changed: raises `DoesNotFit` with what is missing, or why else.
        """
        async with self._changing:
            before = self.value
            self._set(duty)
            try:
                await self._hand_over()
                await self._freed()
            except (P2PShardError, asyncio.CancelledError):
                self._set(before)
                raise

    async def serve(self) -> None:
        """Take part again."""
        async with self._changing:
            if self.value == pb.DUTY_LEAVING:
                raise NotReady("this node is leaving", state="stopping", reason="leaving")
            self._set(pb.DUTY_SERVING)

    async def _freed(self) -> None:
        try:
            async with asyncio.timeout(FREED_S):
                while self._held():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            _log.warning("workers of %s have not ended within %.0f s", ", ".join(self._held()), FREED_S)
