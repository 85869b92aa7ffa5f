"""``p2pshard plan``: the dry run of a deployment."""

from __future__ import annotations

from typing import Any

import click

from p2pshard.cli.options import json_flag, node_flag, plan_flags, plan_options
from p2pshard.cli.output import console, console_err, plan_table, print_json, show_refusal, wire_lines
from p2pshard.client import Client

__all__ = ["command"]

_DOES_NOT_FIT = 3


@click.command()
@click.argument("model")
@plan_flags
@node_flag
@json_flag
def command(model: str, nodes_at: tuple[str, ...], as_json: bool, **flags: Any) -> int:
    """Show how MODEL would be split; loads nothing.

    MODEL is a name, a directory or a .gguf file. Exits 3 when it does not fit.
    """
    with Client(nodes_at) as client:
        result = client.plan(model, **plan_options(**flags))
        if as_json:
            print_json(result.json)
        elif result.plan:
            names = client.status().names()
            console.print(plan_table(result.plan, names))
            for line in wire_lines(result.json.get("wires") or (), names):
                console.print(line, markup=False, highlight=False)
    if result.fits:
        return 0
    if not as_json:
        console_err.print(result.reason or f"{model} does not fit", style="bold red", markup=False)
        show_refusal(result)
    return _DOES_NOT_FIT
