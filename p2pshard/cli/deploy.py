"""``p2pshard deploy``: put a model on the cluster."""

from __future__ import annotations

from typing import Any

import click

from p2pshard.cli.options import json_flag, node_flag, plan_flags, plan_options
from p2pshard.cli.output import console, plan_table, print_json
from p2pshard.cli.progress import DeployDisplay
from p2pshard.client import Client

__all__ = ["command"]


@click.command()
@click.argument("model")
@plan_flags
@node_flag
@json_flag
def command(model: str, nodes_at: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Plan, fetch and load MODEL, and return once it serves.

    MODEL is a name, a directory or a .gguf file.
    """
    with Client(nodes_at) as client:
        with DeployDisplay(client.status().names()) as display:
            deployment = client.deploy(model, on_progress=display, **plan_options(**flags))
        if as_json:
            print_json(
                {
                    "model": deployment.model,
                    "state": deployment.state,
                    "plan": deployment.plan.to_json() if deployment.plan else None,
                }
            )
        elif deployment.plan:
            console.print(plan_table(deployment.plan, client.status().names()))
