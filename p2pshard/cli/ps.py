"""``p2pshard ps``: requests and the use of KV blocks."""

from __future__ import annotations

import click

from p2pshard.cli.options import json_flag, node_flag
from p2pshard.cli.output import console, deployments_table, kv_table, print_json, requests_table
from p2pshard.client import Client

__all__ = ["command"]


@click.command()
@node_flag
@json_flag
def command(nodes_at: tuple[str, ...], as_json: bool) -> None:
    """Show requests, and how full the KV caches are."""
    with Client(nodes_at) as client:
        requests = client.ps()
        if as_json:
            print_json(requests.json)
            return
        status = client.status()
    names = status.names()
    console.print(requests_table(requests) if requests.requests else "no requests")
    if requests.kv:
        console.print(kv_table(requests, names))
    if status.deployments:
        console.print(deployments_table(status.deployments, names))
