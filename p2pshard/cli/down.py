"""``p2pshard down``: stop the daemon of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from p2pshard.cli.ask import own_daemon
from p2pshard.cli.options import node_flag
from p2pshard.cli.output import console_err
from p2pshard.client import Client
from p2pshard.errors import Internal, NodeUnreachable

__all__ = ["command", "wait_gone"]


@click.command()
@node_flag
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Seconds to wait."
)
def command(nodes_at: tuple[str, ...], timeout: float) -> None:
    """Stop the daemon of this machine and wait until it is gone.

    A node on another machine refuses.
    """
    with own_daemon(nodes_at) as client:
        address = client.connect()
        pid = client.shutdown()
    wait_gone(address, pid, timeout)


def wait_gone(address: str, pid: int, timeout: float) -> None:
    """Return, with a line for people, once a daemon that was asked to stop is gone. Raises `Internal` while it answers."""
    deadline = time.monotonic() + timeout
    while _answers(address):
        if time.monotonic() > deadline:
            raise Internal(
                f"the daemon at {address} took the request to stop and still answers after {timeout:g} s"
            )
        time.sleep(0.1)
    while _runs(pid):  # it ends its workers after it stopped answering, and has its data directory until then
        if time.monotonic() > deadline:
            console_err.print(
                f"the daemon at {address} answers no more; its process {pid} is still there after {timeout:g} s",
                style="yellow",
            )
            return
        time.sleep(0.05)
    console_err.print(f"the daemon at {address} is stopped")


def _answers(address: str) -> bool:
    try:
        with Client(address, connect_timeout_s=0.5) as probe:
            probe.connect()
    except NodeUnreachable:
        return False
    return True


def _runs(pid: int) -> bool:
    """Whether there is such a process of this machine, other than one that ended and waits for its parent to notice.

    Unknown, hence no, on Windows, where asking would end it.
    """
    if pid == 0 or os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no Linux, or it has just gone
        return True
