"""What verbs share in asking: those that only print the answer, and those that are for this machine's own daemon."""

from __future__ import annotations

from collections.abc import Callable

import click

from p2pshard.cli.options import json_flag, node_flag
from p2pshard.client import Client
from p2pshard.config import local_address

__all__ = ["asks", "own_daemon"]


def own_daemon(nodes_at: tuple[str, ...]) -> Client:
    """A client of the daemon that was named, else of this machine's: never of one that zeroconf found."""
    return Client(nodes_at or (local_address(),))


def asks(show: Callable[[Client, bool], None]) -> click.Command:
    """Make ``show(client, as_json)`` a verb with ``--node`` and ``--json``, named by its file and told by its docstring."""

    @click.command(help=show.__doc__)
    @node_flag
    @json_flag
    def command(nodes_at: tuple[str, ...], as_json: bool) -> None:
        with Client(nodes_at) as client:
            show(client, as_json)

    return command
