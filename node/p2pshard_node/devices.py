"""What this node offers: memory measured anew each second, speeds measured once by a worker."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psutil

from p2pshard.errors import P2PShardError
from p2pshard.transport.generated import control_pb2 as pb

from .probe import free_memory
from .supervisor import Supervisor

__all__ = ["Devices"]

REFRESH_S = 1.0
RETRY_S = 5.0
HEADROOM = 0.9
"""Of free memory that nobody has promised us: other programs use some of it while a model loads."""

_log = logging.getLogger("p2pshard.devices")


class Devices:
    """The profiles of one node's devices. ``memory``: the hard budget of all workers; None: what is free."""

    def __init__(self, memory: int | None, supervisor: Supervisor) -> None:
        self._memory, self._supervisor = memory, supervisor
        self._probed: list[dict[str, Any]] = []
        self._free = 0
        self._held = 0
        self._measure()

    def _measure(self) -> None:
        self._free = free_memory()
        self._held = sum(_resident(w.pid) for w in self._supervisor.workers())

    def available(self) -> int:
        """Bytes that all workers may use together: free now or held by them already, at most the budget."""
        measured = self._free + self._held
        return measured if self._memory is None else min(self._memory, measured)

    def profiles(self) -> list[pb.DeviceProfile]:
        """As gossiped; empty until a worker has told what it needs itself."""
        base = self._supervisor.base_bytes
        if not base or not self._probed:
            return []
        measured = int((self._free + self._held) * HEADROOM)
        budget = measured if self._memory is None else min(self._memory, measured)
        return [
            pb.DeviceProfile(
                device=str(d.get("device", "cpu")),
                name=str(d.get("name", "")),
                total_bytes=int(d.get("total_bytes", 0)),
                free_bytes=self._free,
                budget_bytes=budget,
                base_bytes=base,
                matmul_gflops=float(d.get("matmul_gflops", 0.0)),
                bandwidth_gbps=float(d.get("bandwidth_gbps", 0.0)),
                dtypes=[str(t) for t in d.get("dtypes", [])],
            )
            for d in self._probed
        ]

    def counts(self) -> list[pb.WorkerCounts]:
        """Of this node's loaded workers."""
        return [
            pb.WorkerCounts(
                deployment=w.key,
                stage=int(w.stage),
                pid=w.pid,
                peak_bytes=w.peak_bytes,
                blocks_used=int(w.stats.get("blocks_used", 0)),
                blocks_total=int(w.stats.get("blocks_total", 0)),
                sequences=int(w.stats.get("sequences", 0)),
            )
            for w in self._supervisor.workers()
            if w.key and w.loaded
        ]

    async def run(self) -> None:
        """Probe until it succeeds, then measure memory for ever."""
        while not self._probed:
            try:
                self._probed = (await self._supervisor.probe())["devices"]
            except (P2PShardError, OSError) as error:
                _log.error("probe failed; trying again in %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)
        while True:
            self._measure()
            await asyncio.sleep(REFRESH_S)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
