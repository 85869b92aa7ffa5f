"""``p2pshard undeploy``: take a model off the cluster."""

from __future__ import annotations

import click

from p2pshard.cli.options import node_flag
from p2pshard.cli.output import console_err
from p2pshard.client import Client

__all__ = ["command"]


@click.command()
@click.argument("model")
@node_flag
def command(model: str, nodes_at: tuple[str, ...]) -> None:
    """Take MODEL off the cluster, freeing its memory."""
    with Client(nodes_at) as client:
        client.undeploy(model)
    console_err.print(f"{model} is removed", markup=False)
