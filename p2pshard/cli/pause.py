"""``p2pshard pause``: have a node hand its layers over and free its memory."""

from __future__ import annotations

import click

from p2pshard.cli.options import node_flag
from p2pshard.cli.output import console_err
from p2pshard.client import Client

__all__ = ["command"]


@click.command()
@click.argument("name", metavar="NODE")
@node_flag
def command(name: str, nodes_at: tuple[str, ...]) -> None:
    """Have NODE hand its layers to the others and free its memory.

    It stays a member, and serves clients. Running answers go on. `p2pshard resume NODE` takes it back; so does a new
    start of its daemon.
    """
    with Client(nodes_at) as client:
        paused = client.pause(name)
    console_err.print(f"{paused} is paused: it holds no layers", markup=False)
