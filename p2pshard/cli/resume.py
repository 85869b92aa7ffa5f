"""``p2pshard resume``: let a paused node take part again."""

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
    """Let NODE, which was paused, hold layers again."""
    with Client(nodes_at) as client:
        resumed = client.resume(name)
    console_err.print(f"{resumed} takes part again", markup=False)
