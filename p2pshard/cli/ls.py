"""``p2pshard ls``: models on the nodes, and those that can be pulled by name."""

from __future__ import annotations

from typing import Any

import click

from p2pshard.cli.options import json_flag, node_flag
from p2pshard.cli.output import catalogue_table, console, models_table, print_json
from p2pshard.client import Client
from p2pshard.models.catalogue import CATALOGUE

__all__ = ["command"]


@click.command()
@node_flag
@json_flag
def command(nodes_at: tuple[str, ...], as_json: bool) -> None:
    """List models on the nodes, and those known by name."""
    with Client(nodes_at) as client:
        models = client.models()
        names = {} if as_json else client.status().names()
    if as_json:
        held: list[dict[str, Any]] = [
            {"name": m.name, "size_bytes": m.size_bytes, "nodes": list(m.nodes), "path": m.path or None}
            for m in models
        ]
        known = [
            {"name": e.name, "size_bytes": e.nbytes, "description": e.description, "license": e.license}
            for e in CATALOGUE.values()
        ]
        print_json({"models": held, "catalogue": known})
        return
    console.print(models_table(models, names) if models else "no models on the nodes")
    console.print(catalogue_table(CATALOGUE.values(), {m.name for m in models}))
