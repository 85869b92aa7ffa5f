"""All that differs between operating systems, in one place."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import sys
from pathlib import Path
from typing import IO

import ifaddr

from p2pshard.errors import Conflict

__all__ = [
    "bridge_networks",
    "die_with_parent",
    "interface_addresses",
    "kill_hard",
    "lock_file",
    "peak_bytes",
    "raise_file_limit",
]

#: Interfaces of containers and virtual machines: their addresses mean nothing to other machines.
_BRIDGES = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "vmnet",
    "vboxnet",
    "cni",
    "flannel",
    "podman",
    "lxc",
    "lxdbr",
    "cali",
)
_PR_SET_PDEATHSIG = 1


def lock_file(path: Path) -> IO[str]:
    """Take an exclusive lock that the system drops when this process ends; the file then holds our pid.

    Raises `Conflict` naming the pid that holds it.
    """
    handle = open(path, "a+", encoding="ascii")  # noqa: SIM115 - open for the life of the process
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:  # pragma: no cover - not run where the tests run
            import msvcrt

            handle.seek(1 << 20)  # beyond the pid, which others must be able to read
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError as error:
        handle.seek(0)
        pid = handle.read(32).strip() or "unknown"
        handle.close()
        raise Conflict(
            f"the data directory {path.parent} is in use by another daemon (pid {pid}); "
            "stop it with `p2pshard down`, or give this one another --data-dir",
            pid=pid,
        ) from error
    handle.seek(0)
    handle.truncate()
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends; elsewhere nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_hard(pid: int) -> None:
    """SIGKILL the process group that `pid` leads; nothing if it is gone."""
    try:
        if os.name == "posix":
            os.killpg(pid, signal.SIGKILL)
        else:  # pragma: no cover
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def peak_bytes(pid: int) -> int | None:
    """Peak resident memory (VmHWM) of a process; None where the system does not tell or the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def is_stopped(pid: int) -> bool:
    """Whether the system has stopped a process (SIGSTOP); False where it does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def reset_peak_bytes() -> None:
    """Let the peak of this process count from what it holds now, where the system can do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def raise_file_limit(enough: int) -> int:
    """Let this process have up to `enough` open files, as far as the system allows; the number it may have now."""
    if os.name != "posix":
        return enough
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return enough
    wanted = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a limit of its own below a hard one that says more
        return soft
    return wanted


def interface_addresses() -> tuple[list[str], list[str]]:
    """``(usable, loopback)``: this machine's addresses, IPv4 first; container bridges and IPv6 link-local are left out."""
    usable: list[str] = []
    loopback: list[str] = []
    for adapter in ifaddr.get_adapters():
        names = {adapter.name, adapter.nice_name}
        for ip in adapter.ips:
            text = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
            if text.startswith("127.") or text == "::1":
                loopback.append(text)
            elif any(name.startswith(_BRIDGES) for name in names):
                continue
            elif not text.startswith(("fe80:", "169.254.")):
                usable.append(text)
    return sorted(set(usable), key=lambda a: (":" in a, a)), sorted(
        set(loopback), key=lambda a: (":" in a, a)
    )


def bridge_networks() -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Networks of this machine's container and virtual machine bridges."""
    networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    for adapter in ifaddr.get_adapters():
        if any(name.startswith(_BRIDGES) for name in (adapter.name, adapter.nice_name)):
            for ip in adapter.ips:
                host = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
                networks.append(ipaddress.ip_network(f"{host}/{ip.network_prefix}", strict=False))
    return networks
