"""Several real daemons on this machine, for the demo and for tests of the examples.

Each has its own data directory, ports and memory budget, and they find each other by zeroconf under a cluster
name of their own, so that they never meet a daemon that you run. Leaving the ``with`` block stops everything;
`LocalNodes.left_behind` then says whether anything is still there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from p2pshard import Client
from p2pshard.errors import P2PShardError

_STOP_S = 20.0


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


@dataclass
class LocalNode:
    """One daemon process."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tail(self, lines: int = 20) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
        )


@dataclass
class LocalNodes:
    """Daemons of one private cluster under one temporary directory."""

    flags: tuple[str, ...] = ()
    """Further flags of ``p2pshard up`` for every node."""
    threads: int = max(1, (os.cpu_count() or 1) // 3)
    """Of each worker. One takes every core by default; several on one machine would fight over them."""
    nodes: list[LocalNode] = field(default_factory=list)
    cluster: str = field(default_factory=lambda: f"local-{uuid.uuid4().hex[:8]}")
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="p2pshard-")))
    _seen: dict[psutil.Process, None] = field(default_factory=dict)
    _ports: set[int] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *flags: str) -> LocalNode:
        """Start one more daemon; returns at once."""
        port, api_port = free_ports(2)
        log = self.folder / f"{name}.log"
        # libraries leave caches in the temporary directory; these go with ours
        scratch = self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "p2pshard.cli", "up", "--name", name),
                    *("--data-dir", str(self.folder / name), "--cluster", self.cluster),
                    *("--port", str(port), "--api-port", str(api_port), "--data-ports", "0-0"),
                    *self.flags,
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **temporary, "OMP_NUM_THREADS": str(self.threads)},
                # a Ctrl-C in the terminal is for the program that started the nodes; it stops them in order
                start_new_session=True,
            )
        node = LocalNode(name, port, process, log)
        self.nodes.append(node)
        self._ports |= {port, api_port}
        return node

    def client(self) -> Client:
        """A client that knows all nodes."""
        return Client([n.address for n in self.nodes])

    def wait_for_members(self, timeout_s: float = 60.0) -> float:
        """Wait until every node sees every other; the seconds it took.

        Raises:
            RuntimeError: a daemon ended, or they did not find each other in time; with the end of its log.
        """
        begin = time.monotonic()
        missing = list(self.nodes)
        while missing:
            node = missing[0]
            if node.process.poll() is not None:
                raise RuntimeError(f"node {node.name} ended with {node.process.returncode}:\n{node.tail()}")
            if time.monotonic() - begin > timeout_s:
                raise RuntimeError(
                    f"node {node.name} does not see all others in {timeout_s:g} s:\n{node.tail()}"
                )
            try:
                with Client(node.address, connect_timeout_s=1) as client:
                    if len(client.status().nodes) == len(self.nodes):
                        missing.pop(0)
                        continue
            except P2PShardError:
                pass  # it is not up yet; the time limit above ends this
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_until_measured(self, timeout_s: float = 90.0) -> None:
        """Wait until every node has told what memory it offers; each starts a worker once to measure.

        Raises:
            RuntimeError: not in time; with the end of a log.
        """
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while not all(n.memory_budget for n in client.status().nodes):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"not every node is measured in {timeout_s:g} s:\n{self.nodes[0].tail()}"
                    )
                time.sleep(0.1)

    def _note(self) -> None:
        """Remember every process and listening port that is ours, to check afterwards that it is gone."""
        for node in self.nodes:
            with contextlib.suppress(psutil.Error):
                daemon = psutil.Process(node.process.pid)
                for process in (daemon, *daemon.children(recursive=True)):
                    self._seen[process] = None
                    with contextlib.suppress(psutil.Error):
                        connections = process.net_connections("tcp")
                        self._ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    def stop(self) -> None:
        """Stop every daemon, by force those that do not go by themselves, and remove the directory."""
        self._note()
        for node in self.nodes:
            if node.process.poll() is None:
                # all go: nothing is handed over, as SIGTERM would ask for
                node.process.send_signal(signal.SIGINT) if os.name == "posix" else node.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for node in self.nodes:
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if hasattr(os, "killpg"):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(node.process.pid, signal.SIGKILL)
                node.process.kill()
                node.process.wait()
        psutil.wait_procs(list(self._seen), timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def left_behind(self) -> list[str]:
        """What is still there after `stop`; empty when all is well."""
        left = [
            f"process {p.pid}" for p in self._seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
        for port in sorted(self._ports):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    left.append(f"port {port}")
        if self.folder.exists():
            left.append(f"directory {self.folder}")
        return left
