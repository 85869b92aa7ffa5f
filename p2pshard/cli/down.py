"""``p2pshard down``: stop the daemon of this machine."""

from __future__ import annotations

import time

import click

from p2pshard.cli.options import node_flag
from p2pshard.cli.output import console_err
from p2pshard.client import Client
from p2pshard.config import local_address
from p2pshard.errors import Internal, NodeUnreachable

__all__ = ["command"]


@click.command()
@node_flag
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Seconds to wait."
)
def command(nodes_at: tuple[str, ...], timeout: float) -> None:
    """Stop the daemon of this machine and wait until it is gone.

    A node on another machine refuses.
    """
    # never one that zeroconf found: "down" without an address means here
    with Client(nodes_at or (local_address(),)) as client:
        address = client.connect()
        client.shutdown()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with Client(address, connect_timeout_s=0.5) as probe:
                probe.connect()
        except NodeUnreachable:
            console_err.print(f"the daemon at {address} is stopped")
            return
        time.sleep(0.1)
    raise Internal(f"the daemon at {address} took the request to stop and still answers after {timeout:g} s")
