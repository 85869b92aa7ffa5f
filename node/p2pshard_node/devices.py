"""What this node offers: memory measured anew each second, speeds measured once by a worker."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psutil

from p2pshard.errors import P2PShardError
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.units import format_bytes

from .cluster.checks import word
from .cluster.traces import trace_to_proto
from .probe import probe_memory
from .rounds import Rounds
from .supervisor import Supervisor

__all__ = ["Devices"]

REFRESH_S = 1.0
RETRY_S = 5.0
HEADROOM = 0.9
"""Of free memory that nobody has promised us: other programs use some of it while a model loads."""

_log = logging.getLogger("p2pshard.devices")


class Devices:
    """The device of one node and what it may use. ``memory``: the hard budget of all workers; None: what is free.

    ``device`` ``auto`` is the CPU, which runs every dtype; another one is used when it is asked for by name.
    """

    def __init__(self, memory: int | None, device: str, supervisor: Supervisor) -> None:
        self._memory, self._supervisor = memory, supervisor
        self._wanted = "cpu" if device == "auto" else device
        self._device: dict[str, Any] | None = None
        self._host = probe_memory(memory)

    def _measure(self) -> None:
        held = sum(_resident(w.pid) for w in self._supervisor.workers())
        self._host = probe_memory(self._memory, held_bytes=held)

    def available(self) -> int:
        """Bytes that all workers may use together now: free or held by them already, at most the budget."""
        if self._device is None or self._wanted == "cpu":
            return self._host.budget_bytes
        free = int(self._device.get("free_bytes", 0))
        return free if self._memory is None else min(self._memory, free)

    def profiles(self) -> list[pb.DeviceProfile]:
        """As gossiped; empty until a worker has told what it needs itself."""
        base, d = self._supervisor.base_bytes, self._device
        if not base or d is None:
            return []
        cpu = self._wanted == "cpu"
        available = self.available()
        given = self._memory is not None and available == self._memory
        return [
            pb.DeviceProfile(
                device=self._wanted,
                name=word(str(d.get("name", ""))),
                total_bytes=self._host.total_bytes if cpu else int(d.get("total_bytes", 0)),
                free_bytes=self._host.free_bytes if cpu else int(d.get("free_bytes", 0)),
                budget_bytes=available if given else int(available * HEADROOM),
                base_bytes=base,
                matmul_gflops=float(d.get("matmul_gflops", 0.0)),
                bandwidth_gbps=float(d.get("bandwidth_gbps", 0.0)),
                dtypes=[str(t) for t in d.get("dtypes", [])],
            )
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
                replayed_rows=int((w.stats.get("step") or {}).get("replayed", 0)),
                trace=trace_to_proto((w.stats.get("step") or {}).get("trace")),
            )
            for w in self._supervisor.workers()
            if w.key and w.loaded
        ]

    async def run(self) -> None:
        """Probe until it succeeds, then measure memory for ever."""
        while self._device is None:
            try:
                devices = (await self._supervisor.probe())["devices"]
                self._device = next((d for d in devices if d.get("device") == self._wanted), None)
                if self._device is None:
                    names = ", ".join(str(d.get("device")) for d in devices) or "none"
                    _log.error(
                        "no device %s on this node; there are: %s. Give another --device", self._wanted, names
                    )
                    return
            except (P2PShardError, OSError) as error:
                _log.error("probe failed; trying again in %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)
        if self.available() < self._supervisor.base_bytes:
            _log.warning(
                "this node can hold no layer: a worker alone takes %s and %s is what it may use; give a larger --memory, "
                "or end other programs",
                format_bytes(self._supervisor.base_bytes),
                format_bytes(self.available()),
            )
        rounds = Rounds("memory", _log)
        while True:
            with rounds.one():
                self._measure()
            await asyncio.sleep(REFRESH_S)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
