"""What the verbs share that only ask a node and print the answer."""

from __future__ import annotations

from collections.abc import Callable

import click

from p2pshard.cli.options import json_flag, node_flag
from p2pshard.client import Client

__all__ = ["asks"]


def asks(show: Callable[[Client, bool], None]) -> click.Command:
    """Make ``show(client, as_json)`` a verb with ``--node`` and ``--json``, named by its file and told by its docstring."""

    @click.command(help=show.__doc__)
    @node_flag
    @json_flag
    def command(nodes_at: tuple[str, ...], as_json: bool) -> None:
        with Client(nodes_at) as client:
            show(client, as_json)

    return command
