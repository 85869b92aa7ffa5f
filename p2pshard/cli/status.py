"""``p2pshard status``: members, peers that did not join and why, deployments."""

from __future__ import annotations

from p2pshard.cli.ask import asks
from p2pshard.cli.output import console, deployments_table, nodes_table, not_joined_table, print_json
from p2pshard.client import Client

__all__ = ["command"]


@asks
def command(client: Client, as_json: bool) -> None:
    """Show nodes, peers that did not join, deployments."""
    status = client.status()
    if as_json:
        print_json(status.json)
        return
    console.print(nodes_table(status))
    if status.not_joined:
        console.print(not_joined_table(status))
    if status.deployments:
        console.print(deployments_table(status.deployments, status.names()))
    for deployment in status.deployments:
        for node, why in deployment.idle.items():
            name = status.names().get(node, node[:12])
            console.print(f"{name} holds no layers of {deployment.model}: {why}", markup=False)
