"""``p2pshard run``: one prompt, answered by the cluster."""

from __future__ import annotations

import sys
from typing import Any

import click

from p2pshard.cli.options import json_flag, node_flag, plan_flags, plan_options, sampling_flags
from p2pshard.cli.output import console_err, plan_table, print_json
from p2pshard.cli.progress import DeployDisplay
from p2pshard.client import Client, GenerateOptions, Stream
from p2pshard.results import Generation

__all__ = ["command"]

_FAILED = 1


@click.command()
@click.argument("model")
@click.argument("prompt")
@sampling_flags
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the model's chat template.")
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(0, min_open=True), help="Seconds the answer may take."
)
@plan_flags
@node_flag
@json_flag
def command(
    model: str,
    prompt: str,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    raw: bool,
    deadline_s: float | None,
    nodes_at: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> int:
    """Answer PROMPT with MODEL, deploying it first when needed.

    MODEL is a name, a directory or a .gguf file; PROMPT goes through the model's chat template unless --raw;
    "-" reads it from standard input. The answer goes to standard output, all else to standard error.
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=list(stop),
        deadline_s=deadline_s,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(nodes_at) as client:
        with DeployDisplay(client.status().names()) as display:
            deployment = client.deploy(model, on_progress=display, **plan_options(**flags))
        if deployment.plan and not as_json:
            console_err.print(plan_table(deployment.plan, client.status().names()))
        name = deployment.model
        answer = client.generate(name, text, **options) if raw else client.chat(name, text, **options)
        with answer as stream:
            generation = stream.result() if as_json else _print_as_it_comes(stream)
    if as_json:
        print_json(generation.to_json())
    else:
        _print_figures(generation)
    return _FAILED if generation.finish_reason not in ("stop", "length") else 0


def _print_as_it_comes(stream: Stream) -> Generation:
    for piece in stream:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return stream.result()


def _print_figures(generation: Generation) -> None:
    console_err.print(
        f"{generation.prompt_tokens} prompt tokens, {generation.completion_tokens} given "
        f"({generation.finish_reason}), first after {generation.ttft_ms:.0f} ms, "
        f"{generation.tokens_per_second:.1f} tokens/s",
        style="dim",
    )
