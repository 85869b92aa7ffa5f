"""Real daemons on this machine, each with its own data directory and ports, found through static peers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import until


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Node:
    """One daemon process."""

    def __init__(self, cluster: LocalCluster, name: str, flags: tuple[str, ...]) -> None:
        self.cluster, self.name, self.flags = cluster, name, flags
        self.port, self.api_port = free_port(), free_port()
        self.data_dir = cluster.folder / name
        self.models = cluster.models / name if cluster.own_models else cluster.models
        self.process: subprocess.Popen[bytes] | None = None
        self.core: int | None = None
        """The one core that this daemon and its workers may use."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *, peers: list[Node]) -> None:
        argv = [
            sys.executable, "-m", "p2pshard.cli", "up", "--name", self.name, "--data-dir", str(self.data_dir),
            "--port", str(self.port), "--api-port", str(self.api_port), "--bind", "127.0.0.1",
            "--cluster", self.cluster.name, "--no-mdns", *self.flags,
        ]  # fmt: skip
        if self.core is not None:
            argv = ["taskset", "-c", str(self.core), *argv]
        for peer in peers:
            argv += ["--peer", peer.address]
        env = {
            **os.environ,
            "P2PSHARD_DATA_PORTS": "0-0",
            "OMP_NUM_THREADS": "1",
            "P2PSHARD_MODELS_DIR": str(self.models),
        }
        self.cluster.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    @property
    def log_path(self) -> Path:
        return self.cluster.folder / f"{self.name}.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:] if self.log_path.exists() else ""

    def cli(self, *argv: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "p2pshard.cli", *argv, "--node", self.address],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{argv} gave {done.returncode}\n{done.stdout}\n{done.stderr}\n--- {self.name}\n{self.log()}"
            )
        return done

    def popen(self, *argv: str) -> subprocess.Popen[bytes]:
        """The same without waiting; what it prints goes to this node's log."""
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "p2pshard.cli", *argv, "--node", self.address], stdout=log, stderr=log
            )

    def json(self, *argv: str, timeout: float = 120) -> Any:
        return json.loads(self.cli(*argv, "--json", timeout=timeout).stdout)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(timeout=20)


class LocalCluster:
    """Use as a context manager; leaving it ends every daemon. ``own_models``: a models folder for each node."""

    def __init__(
        self, folder: Path, *flags: str, nodes: int = 3, name: str | None = None, own_models: bool = False
    ) -> None:
        self.folder = folder / "nodes"
        self.models, self.own_models = folder / "models", own_models
        self.models.mkdir(parents=True, exist_ok=True)
        self.name = name or f"test-{os.getpid()}-{free_port()}"
        self.nodes = [Node(self, f"n{i}", flags) for i in range(nodes)]

    def __enter__(self) -> LocalCluster:
        for node in self.nodes:
            node.start(peers=[other for other in self.nodes if other is not node])
        self.wait_members(len(self.nodes), 20 * len(self.nodes))
        return self

    def wait_members(self, count: int, seconds: float) -> None:
        def all_see() -> bool:
            return all(len(self.status(node).get("nodes", ())) == count for node in self.nodes)

        try:
            until(all_see, seconds, f"{count} members everywhere", every=0.2)
        except BaseException:
            self.__exit__()
            raise AssertionError("\n".join(f"--- {n.name}\n{n.log()}" for n in self.nodes)) from None

    def wait_measured(self, seconds: float = 120) -> None:
        """Until every node has told what memory it offers, which a worker measures once at the start."""

        def all_have() -> bool:
            nodes = self.status(self.nodes[0]).get("nodes", ())
            return len(nodes) == len(self.nodes) and all(n["memory_budget"] for n in nodes)

        until(all_have, seconds, "every node has measured its memory", every=0.5)

    def status(self, node: Node) -> dict[str, Any]:
        """`status` over gRPC, without starting a CLI process; empty while the daemon does not answer."""
        from p2pshard import Client
        from p2pshard.errors import P2PShardError

        try:
            with Client([node.address]) as client:
                return client.status()  # type: ignore[no-any-return]
        except P2PShardError:
            return {}

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.process and node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.process.send_signal(signal.SIGINT)
        for node in self.nodes:
            if node.process:
                try:
                    node.process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    node.process.kill()
                    node.process.wait()
