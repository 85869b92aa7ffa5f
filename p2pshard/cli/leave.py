"""``p2pshard leave``: hand this machine's layers to the others, then stop its daemon."""

from __future__ import annotations

import click

from p2pshard.cli.ask import own_daemon
from p2pshard.cli.down import wait_gone
from p2pshard.cli.options import node_flag

__all__ = ["command"]


@click.command()
@node_flag
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds to wait."
)
def command(nodes_at: tuple[str, ...], timeout: float) -> None:
    """Stop the daemon of this machine once the others have its layers.

    Running answers go on without it. Where the others cannot hold its layers it stops all the same, and its log says
    what was missing. A node on another machine refuses.
    """
    with own_daemon(nodes_at) as client:
        address = client.connect()
        pid = client.leave()
    wait_gone(address, pid, timeout)
