"""``p2pshard keys``: who may use this node's HTTP API from other machines."""

from __future__ import annotations

import time

import click

from p2pshard.cli.ask import own_daemon
from p2pshard.cli.options import json_flag, node_flag
from p2pshard.cli.output import console, console_err, make_table, print_json

__all__ = ["command"]


@click.group()
def command() -> None:
    """Keys for this node's HTTP API from other machines.

    Programs of its own machine need none. A key is good at the node that made it.
    """


@command.command()
@click.argument("name")
@click.option("--per-minute", type=click.IntRange(min=1), help="Requests that may begin in a minute.")
@click.option("--at-once", type=click.IntRange(min=1), help="Requests that may be under way.")
@node_flag
def create(name: str, per_minute: int | None, at_once: int | None, nodes_at: tuple[str, ...]) -> None:
    """Make a key called NAME and print it, which cannot be done again."""
    with own_daemon(nodes_at) as client:
        secret = client.create_key(name, per_minute=per_minute, at_once=at_once)
    click.echo(secret)
    console_err.print("this key is not shown again; send it as Authorization: Bearer KEY")


@command.command(name="list")
@node_flag
@json_flag
def list_keys(nodes_at: tuple[str, ...], as_json: bool) -> None:
    """Show the keys that there are, without what they are."""
    with own_daemon(nodes_at) as client:
        keys = client.keys()
    if as_json:
        print_json({"keys": keys})
        return
    table = make_table("Keys", "name", "made", "per minute", "at once", right=("per minute", "at once"))
    for key in keys:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key["created"]))
        table.add_row(key["name"], made, str(key["per_minute"] or ""), str(key["at_once"] or ""))
    console.print(table if keys else "no keys")


@command.command()
@click.argument("name")
@node_flag
def revoke(name: str, nodes_at: tuple[str, ...]) -> None:
    """End the key called NAME."""
    with own_daemon(nodes_at) as client:
        client.revoke_key(name)
    console_err.print(f"key {name} is of no use any more", markup=False)
