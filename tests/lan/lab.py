"""Several hosts on one machine: network namespaces on one bridge, each with its own disk and memory limit.

Multicast crosses the bridge, so zeroconf is the real thing. Each host has a mount namespace in which its own
folder lies at `HOME` and everything in ``hidden`` (model caches, the other hosts' folders) is empty, so a file
on one host is on no other. Memory is capped by a cgroup (v1 or v2). Needs root; `unavailable` says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pshard.config import CONTROL_PORT
from tests.waiting import until

HOME = Path("/mnt")
"""Where each host sees its own folder."""
WATCH = Path(__file__).with_name("watch.py")
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def unavailable() -> str | None:
    """Why a lab cannot be built here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a Linux feature"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for tool in ("ip", "tc", "nsenter", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"needs the {tool} command (iproute2, util-linux, mount)"
    if _sh("unshare", "-n", "-m", "true", check=False).returncode:
        return "may not create namespaces"
    return None


def _sh(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def _memory_group(name: str, limit: int) -> Path:
    """A new cgroup that may hold `limit` bytes of memory; v1 where it is mounted, else v2."""
    root = _V1 if (_V1 / "memory.limit_in_bytes").exists() else _V2
    group = root / name
    group.mkdir()
    (group / ("memory.limit_in_bytes" if root == _V1 else "memory.max")).write_text(str(limit))
    return group


@dataclass
class Host:
    """One machine of the lab."""

    name: str
    ip: str
    namespace: str
    folder: Path
    holder: subprocess.Popen[bytes]
    group: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def data_dir(self) -> Path:
        return HOME / "data"

    def argv(self, *argv: str) -> list[str]:
        """`argv` inside this host."""
        enter = ["nsenter", "-t", str(self.holder.pid), "-m", "-n", "--"]
        if self.group is None:
            return [*enter, *argv]
        # The cgroup must be joined by the process itself before it allocates anything.
        return ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs; exec "$@"', "sh", *enter, *argv]

    def run(self, *argv: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*argv), capture_output=True, text=True, timeout=timeout, cwd="/", env=self.env()
        )
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {' '.join(argv)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def popen(self, *argv: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                self.argv(*argv),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=self.env(),
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("P2PSHARD_")}
        return {
            **kept,
            "HOME": str(HOME),
            "P2PSHARD_MODELS_DIR": str(HOME / "models"),
            "OMP_NUM_THREADS": "1",
        }

    # -- p2pshard on this host ------------------------------------------------------------------
    def cli(self, *argv: str, timeout: float = 180, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "p2pshard.cli", *argv, timeout=timeout, check=check)

    def json(self, *argv: str, timeout: float = 180) -> Any:
        return json.loads(self.cli(*argv, "--json", timeout=timeout).stdout)

    def up(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start this host's daemon."""
        argv = (
            sys.executable,
            "-m",
            "p2pshard.cli",
            "up",
            "--name",
            self.name,
            "--data-dir",
            str(self.data_dir),
        )
        return self.popen(*argv, *flags, log="daemon.log")

    def status(self) -> dict[str, Any] | None:
        """`status --json`, or None while no daemon answers."""
        done = self.cli("status", "--json", timeout=30, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def watch(self) -> None:
        """Begin to ask this host's daemon for its status several times a second; `watched` gives the last."""
        self.popen(sys.executable, str(WATCH), f"127.0.0.1:{CONTROL_PORT}", log="watch.log")

    def watched(self) -> dict[str, Any]:
        lines = (self.folder / "watch.log").read_bytes().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else {"asked": 0.0}

    def members(self) -> set[str]:
        status = self.status()
        return {node["name"] for node in status["nodes"]} if status else set()

    def log(self) -> str:
        path = self.folder / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- faults ---------------------------------------------------------------------------------
    def pids(self, needle: str = "") -> list[int]:
        """Processes in this host's network namespace whose command line contains `needle`."""
        mine = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.holder.pid:
                continue
            try:
                if os.stat(entry / "ns/net").st_ino == mine:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if needle in command:
                        found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
        return sorted(found)

    def listens(self, pid: int) -> bool:
        """Whether the process waits for TCP connections in this host's network namespace."""
        waiting = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.holder.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # TCP_LISTEN
                    waiting.add(f"socket:[{fields[9]}]")
        try:
            return any(os.readlink(fd) in waiting for fd in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            return False  # it ended, or closed one of them, while we looked

    def signal(self, number: signal.Signals, needle: str = "") -> list[int]:
        pids = self.pids(needle)
        for pid in pids:
            os.kill(pid, number)
        return pids

    def kill(self) -> None:
        """The machine loses power: every process gone at once."""
        self.signal(signal.SIGKILL)

    def cut(self, other: Host) -> None:
        """Nothing from here reaches `other` any more."""
        self.run("ip", "route", "add", "blackhole", f"{other.ip}/32")

    def heal(self, other: Host) -> None:
        self.run("ip", "route", "del", "blackhole", f"{other.ip}/32")

    def shape(self, rate: str) -> None:
        """Limit what this host sends, for example ``20mbit``."""
        self.run(
            "tc",
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "64kb",
            "latency",
            "400ms",
        )

    def received_bytes(self) -> int:
        """Bytes that came in over this host's network card, by the kernel's count."""
        for line in Path(f"/proc/{self.holder.pid}/net/dev").read_text().splitlines():
            if line.strip().startswith("eth0:"):
                return int(line.split(":")[1].split()[0])
        raise AssertionError("no eth0")

    def peak_group_bytes(self) -> int:
        assert self.group is not None
        name = (
            "memory.max_usage_in_bytes"
            if (self.group / "memory.max_usage_in_bytes").exists()
            else "memory.peak"
        )
        return int((self.group / name).read_text())


class Lab:
    """A bridge and its hosts. Use as a context manager: leaving it ends every process and removes everything."""

    def __init__(self, folder: Path, *, ipv6: bool = True, hidden: Sequence[Path] = ()) -> None:
        self.tag = "p2l" + uuid.uuid4().hex[:5]
        self.folder = folder
        self.ipv6 = ipv6
        self.hidden = [Path(p) for p in hidden]
        self.hosts: list[Host] = []
        self._bridge = f"{self.tag}-br"

    def __enter__(self) -> Lab:
        _sh("ip", "netns", "add", self._bridge)
        self._in_bridge("ip", "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        self._in_bridge("ip", "link", "set", "br0", "up")
        return self

    def _in_bridge(self, *argv: str) -> None:
        _sh("ip", "netns", "exec", self._bridge, *argv)

    def host(self, name: str, *, memory: int | None = None) -> Host:
        """A new machine, capped at `memory` bytes by a cgroup."""
        number = len(self.hosts) + 1
        namespace = f"{self.tag}-{name}"
        folder = self.folder / name
        (folder / "models").mkdir(parents=True)
        _sh("ip", "netns", "add", namespace)
        _sh(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            namespace,
            "type",
            "veth",
            "peer",
            "name",
            f"h{number}",
            "netns",
            self._bridge,
        )
        self._in_bridge("ip", "link", "set", f"h{number}", "master", "br0", "up")
        net = ("ip", "netns", "exec", namespace)
        if not self.ipv6:
            _sh(*net, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        _sh(*net, "ip", "link", "set", "lo", "up")
        _sh(*net, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _sh(*net, "ip", "link", "set", "eth0", "up")
        _sh(*net, "ip", "route", "add", "224.0.0.0/4", "dev", "eth0")
        # Not `ip netns exec`: it remounts /sys and would hide the cgroups from the daemon.
        covers = "; ".join(
            f"mount -t tmpfs none {path}" for path in [*self.hidden, self.folder] if path.exists()
        )
        script = f"mount --bind {folder} {HOME}; {covers}; echo ready; exec sleep infinity"
        holder = subprocess.Popen(
            [
                "nsenter",
                f"--net=/run/netns/{namespace}",
                "unshare",
                "-m",
                "--propagation",
                "private",
                "sh",
                "-ec",
                script,
            ],
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {name} did not start")
        host = Host(name, f"10.77.0.{number}", namespace, folder, holder)
        if memory is not None:
            host.group = _memory_group(namespace, memory)
        self.hosts.append(host)
        return host

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.kill()
            host.holder.kill()
            host.holder.wait()
            for process in host.processes:
                process.wait(timeout=10)
        for host in self.hosts:
            if host.group is not None:
                until(lambda g=host.group: _removed(g), 10, f"{host.group} empty")
            _sh("ip", "netns", "del", host.namespace, check=False)
        _sh("ip", "netns", "del", self._bridge, check=False)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True
