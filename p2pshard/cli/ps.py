"""``p2pshard ps``: requests of all nodes, and the use of KV blocks."""

from __future__ import annotations

from p2pshard.cli.ask import asks
from p2pshard.cli.output import (
    console,
    deployments_table,
    kv_table,
    print_json,
    requests_table,
    say_unreachable,
)
from p2pshard.client import Client

__all__ = ["command"]


@asks
def command(client: Client, as_json: bool) -> None:
    """Show the requests of all nodes, and how full the KV caches are."""
    requests = client.ps()
    if as_json:
        print_json(requests.json)
        return
    status = client.status()
    names = status.names()
    console.print(requests_table(requests, names) if requests.requests else "no requests")
    if requests.kv:
        console.print(kv_table(requests, names))
    if status.deployments:
        console.print(deployments_table(status.deployments, names))
    say_unreachable(requests.unreachable, names)
