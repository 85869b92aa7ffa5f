"""``p2pshard ls``: models on the nodes, and those that can be pulled by name."""

from __future__ import annotations

from p2pshard.cli.ask import asks
from p2pshard.cli.output import catalogue_table, console, models_table, print_json, say_unreachable
from p2pshard.client import Client
from p2pshard.models.catalogue import CATALOGUE

__all__ = ["command"]


@asks
def command(client: Client, as_json: bool) -> None:
    """List models on the nodes, and those known by name."""
    models = client.models()
    if as_json:
        known = [
            {"name": e.name, "size_bytes": e.nbytes, "description": e.description, "license": e.license}
            for e in CATALOGUE.values()
        ]
        missing = [{"node": u.node, "reason": u.reason} for u in models.unreachable]
        print_json({"models": [m.to_json() for m in models], "catalogue": known, "unreachable": missing})
        return
    names = client.status().names()
    console.print(models_table(models, names) if models else "no models on the nodes")
    console.print(catalogue_table(CATALOGUE.values(), {m.name for m in models}))
    say_unreachable(models.unreachable, names)
