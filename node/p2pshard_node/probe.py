"""How much memory this node's workers may use: what is free now, within every limit above us. No torch.

Devices other than the CPU are measured by a worker, which has the libraries for it. Nothing here raises for
hardware or systems that it does not know: what cannot be read is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2pshard_node.platform import peak_bytes

__all__ = ["HostMemory", "Limit", "cgroup_limits", "peak_bytes", "probe_memory"]

_UNLIMITED = 1 << 60
"""A cgroup v1 without a limit says 2^63 less a page."""


@dataclass(frozen=True)
class Limit:
    """A memory limit of a control group that holds this process."""

    path: str
    limit_bytes: int
    used_bytes: int
    """Without the file pages that the kernel drops under pressure."""

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class HostMemory:
    """Memory of the CPU's side. Sizes in bytes."""

    total_bytes: int
    """For people; no budget comes from it."""
    free_bytes: int
    """What new processes can have now: free in the system and under every control group above us."""
    budget_bytes: int
    """What all workers of this node may use together."""
    bound_by: str
    """What decides: ``free memory``, ``cgroup /path`` or ``--memory``."""


def probe_memory(memory: int | None = None, *, held_bytes: int = 0, root: Path = Path("/")) -> HostMemory:
    """Measure. A budget is never above what is free, however large ``memory`` is.

    Args:
        memory: the user's ``--memory``: bytes that all workers may use.
        held_bytes: what this node's own workers hold already. It is part of the budget, not taken from it.
        root: where /proc and /sys are, for tests.
    """
    total, free = _system_memory(root)
    bound_by = "free memory"
    for limit in cgroup_limits(root):
        total = min(total, limit.limit_bytes)
        if limit.left_bytes < free:
            free, bound_by = limit.left_bytes, f"cgroup {limit.path}"
    budget = free + held_bytes
    if memory is not None and memory < budget:
        budget, bound_by = memory, "--memory"
    return HostMemory(total, free, budget, bound_by)


def _system_memory(root: Path) -> tuple[int, int]:
    """``(total, available)``."""
    values = _keyed(root / "proc/meminfo")
    if "MemTotal:" in values and "MemAvailable:" in values:
        return values["MemTotal:"] * 1024, values["MemAvailable:"] * 1024
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def cgroup_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every memory limit, v1 and v2, from our own control group up to the top; empty where there is none."""
    if root == Path("/") and not sys.platform.startswith("linux"):
        return ()
    limits = []
    for mount, inside, version in _memberships(root):
        for folder in _upwards(mount, inside):
            limit = _limit_v2(folder, root) if version == 2 else _limit_v1(folder, root)
            if limit is not None:
                limits.append(limit)
    return tuple(limits)


def _memberships(root: Path) -> Iterator[tuple[Path, str, int]]:
    """``(mount point, our group below it, version)`` of each hierarchy that accounts memory."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]  # "" names the v2 hierarchy
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or len(kind) < 3:
            continue
        top, mount = _unescaped(fields[3]), root / _unescaped(fields[4]).lstrip("/")
        if kind[0] == "cgroup2" and "" in groups:
            yield mount, _below(groups[""], top), 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(",") and "memory" in groups:
            yield mount, _below(groups["memory"], top), 1


def _below(group: str, top: str) -> str:
    """Our group as seen from a mount that shows the hierarchy from ``top`` on, as a container's does.

    A group outside of what is mounted cannot be seen: the top of the mount stands for it.
    """
    if top in ("", "/"):
        return group
    return group[len(top) :] if group == top or group.startswith(top + "/") else "/"


def _upwards(mount: Path, inside: str) -> Iterator[Path]:
    folder = mount / inside.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount  # the group lies outside our namespace, or is gone
    while True:
        yield folder
        if folder == mount:
            return
        folder = folder.parent


def _limit_v2(folder: Path, root: Path) -> Limit | None:
    limits = [n for name in ("memory.max", "memory.high") if (n := _number(folder / name)) is not None]
    used = _number(folder / "memory.current")
    if not limits or used is None:
        return None  # "max" is no number; the top group has no files
    reclaimable = _keyed(folder / "memory.stat").get("inactive_file", 0)
    return Limit(_shown(folder, root), min(limits), max(0, used - reclaimable))


def _limit_v1(folder: Path, root: Path) -> Limit | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    stat = _keyed(folder / "memory.stat")
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return Limit(_shown(folder, root), limit, max(0, used - reclaimable))


def _shown(folder: Path, root: Path) -> str:
    return os.sep + str(folder.relative_to(root))


def _unescaped(text: str) -> str:
    r"""mountinfo writes a space as ``\040``."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _keyed(path: Path) -> dict[str, int]:
    """``name number …`` lines; others are skipped."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isascii() and row[1].isdigit()}
