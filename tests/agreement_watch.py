"""What an agreement has come to, seen from outside: the members' ledgers on disk and the ports of their workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

Number = tuple[int, str]
"""An epoch: (n, proposer)."""
NONE: Number = (0, "")


@dataclass(frozen=True)
class Promise:
    """One member's record of the only deployment."""

    promised: Number = NONE
    active: Number = NONE


def promise(data_dir: Path) -> Promise:
    """What the member with this data directory has on its disk; of a deployment never heard of: nothing."""
    records = sorted((data_dir / "epochs").glob("*.json"))
    assert len(records) <= 1, "these tests deploy one model"
    if not records:
        return Promise()
    value = json.loads(records[0].read_text())
    (n, proposer), (active, by) = value["promised"], value["active"]
    return Promise((int(n), str(proposer)), (int(active), str(by)))


def workers(daemon: int) -> set[int]:
    """Pids of a daemon's workers, a warm one included."""
    found = set()
    for child in psutil.Process(daemon).children():
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            if "p2pshard_node.worker" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def loaded(pids: Iterable[int]) -> set[int]:
    """The workers among `pids` that have loaded: they listen for their neighbours."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN for c in psutil.Process(pid).net_connections("tcp")):
                found.add(pid)
    return found


@contextlib.contextmanager
def held(pids: Iterable[int]) -> Iterator[None]:
    """Workers that do nothing meanwhile. Their daemons answer: to the cluster they are slow, not gone."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # its daemon gave it up
                os.kill(pid, signal.SIGCONT)
