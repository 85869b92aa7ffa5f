"""``p2pshard bench``: how fast a deployment is, and where its time goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from p2pshard.bench import Measured, measure
from p2pshard.cli.bench_output import bench_table, trace_tables
from p2pshard.cli.options import json_flag, node_flag, plan_flags, plan_options
from p2pshard.cli.output import console, console_err, plan_table, print_json
from p2pshard.cli.progress import DeployDisplay
from p2pshard.client import AsyncClient, PlanOptions
from p2pshard.errors import NotReady
from p2pshard.planning.plan import Plan
from p2pshard.speculation import draft_of

__all__ = ["Counts", "command"]


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """``1,8``: different positive numbers."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(p.isascii() and p.isdigit() and 0 < int(p) <= 1024 for p in parts):
            self.fail(f"{value!r} is not a list of numbers from 1 to 1024 like 1,8", param, ctx)
        return tuple(dict.fromkeys(int(p) for p in parts))


@click.command()
@click.argument("model")
@click.option(
    "--streams", type=Counts(), default="1,8", show_default=True, help="Numbers of requests to run at once."
)
@click.option(
    "--prompt",
    "prompt_tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Tokens of each prompt, exactly.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Tokens of each answer; the end of text is ignored.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Repetitions for each number of streams.",
)
@click.option(
    "--shared-prefix",
    is_flag=True,
    help="Let prompts differ in their last tokens only. Default: they differ from the first on.",
)
@click.option(
    "--speculation",
    default="off",
    show_default=True,
    metavar="off|adaptive|N",
    help="Tokens to guess from the text at a time.",
)
@plan_flags
@node_flag
@json_flag
def command(
    model: str,
    streams: tuple[int, ...],
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    shared_prefix: bool,
    speculation: str,
    nodes_at: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure MODEL on the cluster, deploying it first when needed.

    MODEL is a name, a directory or a .gguf file. Times are those of this client; where a step spends its time is
    what the cluster's own trace says. Requests of others at the same time are in both.
    """
    load: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "rounds": rounds,
        "shared_prefix": shared_prefix,
        "speculation": int(speculation) if speculation.isdecimal() else speculation,
    }
    draft_of(load["speculation"])  # wrong usage before anything is deployed
    asyncio.run(_bench(model, nodes_at, plan_options(**flags), streams, load, as_json))


async def _bench(
    model: str,
    nodes_at: tuple[str, ...],
    options: PlanOptions,
    streams: tuple[int, ...],
    load: Mapping[str, Any],
    as_json: bool,
) -> None:
    async with AsyncClient(nodes_at) as client:
        names = (await client.status()).names()
        with DeployDisplay(names) as display:
            deployment = await client.deploy(model, on_progress=display, **options)
        if (plan := deployment.plan) is None:
            raise NotReady(
                f"{deployment.model} has no plan", state=deployment.state, reason=deployment.reason
            )
        if not as_json:
            console.print(plan_table(plan, names))
        results = []
        async for measured in measure(client, deployment.model, plan, streams, **load):
            results.append(measured)
            console_err.print(_line(measured), style="dim", markup=False)
    if as_json:
        print_json(_document(deployment.model, plan, load, results))
        return
    console.print(bench_table([m.figures for m in results]))
    for measured in results:
        if measured.trace is not None:
            for table in trace_tables(measured.trace, plan, names, measured.figures.streams):
                console.print(table)
    if any(m.figures.tokens_per_second is None for m in results):
        console_err.print(
            "streams were not given tokens all at once: the first had ended before the last began. "
            "More --tokens, or a shorter --prompt, gives a rate of all together."
        )


def _line(measured: Measured) -> str:
    figures = measured.figures
    rate = figures.tokens_per_second or figures.overall_tokens_per_second
    return f"{figures.streams} stream{'s'[: figures.streams > 1]}: {rate:.1f} tokens/s"


def _document(model: str, plan: Plan, load: Mapping[str, Any], results: list[Measured]) -> dict[str, Any]:
    """What ``--json`` prints."""
    edges = [
        {"from": stage.node, "to": plan.stages[(index + 1) % len(plan.stages)].node}
        for index, stage in enumerate(plan.stages)
        if len(plan.stages) > 1
    ]
    return {
        "model": model,
        "plan": plan.to_json(),
        **load,
        "results": [
            {
                **m.figures.to_json(),
                "edges": [
                    edge | {"bytes_per_token": _edge_bytes(m, index)} for index, edge in enumerate(edges)
                ],
                "trace": m.trace.to_json() if m.trace else None,
            }
            for m in results
        ],
    }


def _edge_bytes(measured: Measured, index: int) -> float | None:
    """Of the edge that leaves stage ``index``, while sequences continue."""
    decode = measured.trace.decode if measured.trace else None
    if decode is None:
        return None
    return decode.stages[(index + 1) % len(decode.stages)].bytes_per_token
