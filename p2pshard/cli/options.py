"""Flags that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from p2pshard.client import PlanOptions
from p2pshard.config import parse_address
from p2pshard.planning.plan import WIRES
from p2pshard.planning.settings import DTYPES

__all__ = ["Address", "LayerPin", "json_flag", "node_flag", "plan_flags", "plan_options", "sampling_flags"]

F = TypeVar("F", bound=Callable[..., Any])


class Address(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``HOST:PORT``; the port may be left out."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LayerPin(click.ParamType):  # type: ignore[type-arg]
    """``NODE=FIRST-LAST``, both inclusive; ``NODE=3`` is one layer."""

    name = "NODE=FIRST-LAST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, int]]:
        if isinstance(value, tuple):
            return value
        node, _, span = value.rpartition("=")
        first, dash, last = span.partition("-")
        bounds = (first, last if dash else first)
        if not node or not all(b.isascii() and b.isdigit() for b in bounds):
            self.fail(f"{value!r} is not NODE=FIRST-LAST, for example laptop=0-11", param, ctx)
        if int(bounds[0]) > int(bounds[1]):
            self.fail(f"{value!r} ends before it begins", param, ctx)
        return node, (int(bounds[0]), int(bounds[1]))


def node_flag(function: F) -> F:
    """``--node``, repeatable."""
    return click.option(
        "--node",
        "nodes_at",
        type=Address(),
        multiple=True,
        envvar="P2PSHARD_NODE",
        help="Node to talk to; repeatable, tried in order. "
        "Default: the daemon on this machine, else one found by zeroconf.",
    )(function)


def json_flag(function: F) -> F:
    """``--json``; also tells the error handler."""

    def tell(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.find_root().obj.json = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=tell,
        help="Print exactly one JSON object on standard output.",
    )(function)


def plan_flags(function: F) -> F:
    """What shapes a plan."""
    for option in reversed(
        (
            click.option(
                "--context",
                type=click.IntRange(min=1),
                help="Tokens one sequence may have. Default: the largest that fits.",
            ),
            click.option(
                "--concurrency",
                type=click.IntRange(min=1),
                help="How many full contexts to keep room for, at least. Default: 1; one that runs keeps what it has.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(DTYPES),
                default="auto",
                show_default=True,
                help="Type of the weights in memory; auto: as the file has them.",
            ),
            click.option(
                "--layers",
                type=LayerPin(),
                multiple=True,
                help="Pin layers to a node, by name or id; repeatable.",
            ),
            click.option(
                "--nodes", type=click.IntRange(min=1), help="Use so many nodes. Default: the fewest that fit."
            ),
            click.option("--exclude", metavar="NODE", multiple=True, help="Leave a node out; repeatable."),
            click.option(
                "--wire",
                type=click.Choice(("auto", *WIRES)),
                default="auto",
                show_default=True,
                help="How hidden states travel between nodes: raw float32, or rounded to 16 or 8 bits for slow "
                "links (the plan is then tolerant); auto: by what each link carries.",
            ),
        )
    ):
        function = option(function)
    return function


def plan_options(
    context: int | None,
    concurrency: int | None,
    dtype: str,
    layers: tuple[tuple[str, tuple[int, int]], ...],
    nodes: int | None,
    exclude: tuple[str, ...],
    wire: str,
) -> PlanOptions:
    """The flags of `plan_flags` as options of the client. A node pinned twice is wrong usage."""
    pins = dict(layers)
    if len(pins) != len(layers):
        raise click.UsageError("--layers names a node twice; a node holds one contiguous run of layers")
    return PlanOptions(
        context=context,
        concurrency=concurrency,
        dtype=dtype,
        layers=pins,
        nodes=nodes,
        exclude=list(exclude),
        wire=wire,
    )


def sampling_flags(function: F) -> F:
    """How tokens are chosen and when to stop."""
    for option in reversed(
        (
            click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens to give."),
            click.option(
                "--temperature",
                type=click.FloatRange(0, 100),
                default=0.0,
                show_default=True,
                help="0: always the most likely token.",
            ),
            click.option(
                "--top-p",
                type=click.FloatRange(0, 1, min_open=True),
                default=1.0,
                show_default=True,
                help="Keep the smallest set whose probability reaches P.",
            ),
            click.option(
                "--top-k",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                help="Keep the K most likely; 0: all.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(0, 2**64 - 1),
                help="The same seed gives the same text on any split. Default: drawn.",
            ),
            click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; repeatable."),
        )
    ):
        function = option(function)
    return function
