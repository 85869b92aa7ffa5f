"""``p2pshard chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import click

from p2pshard.cli.options import node_flag, plan_flags, plan_options, sampling_flags
from p2pshard.cli.output import console_err
from p2pshard.cli.progress import DeployDisplay
from p2pshard.client import Client, GenerateOptions, Message
from p2pshard.errors import P2PShardError

__all__ = ["command"]


@click.command()
@click.argument("model")
@sampling_flags
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@plan_flags
@node_flag
def command(
    model: str,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    system: str | None,
    nodes_at: tuple[str, ...],
    **flags: Any,
) -> None:
    """Talk with MODEL; what was said before is kept.

    /reset forgets it, /exit or end of input leaves. Ctrl-C stops an answer.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing, where the system has it
    options = GenerateOptions(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=list(stop)
    )
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    with Client(nodes_at) as client:
        with DeployDisplay(client.status().names()) as display:
            deployment = client.deploy(model, on_progress=display, **plan_options(**flags))
        console_err.print(
            f"{deployment.model} is ready; /reset forgets, /exit leaves", style="dim", markup=False
        )
        history = list(beginning)
        while (said := _ask()) is not None:
            if said == "/exit":
                return
            if said == "/reset":
                history = list(beginning)
                continue
            if not said:
                continue
            if said.startswith("/") and " " not in said:
                console_err.print(
                    f"there is no {said}; /reset forgets, /exit leaves", style="yellow", markup=False
                )
                continue
            asked: list[Message] = [*history, {"role": "user", "content": said}]
            answer = _answer(client, deployment.model, asked, options)
            if answer is not None:
                history = [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """A line from the user; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(client: Client, model: str, messages: list[Message], options: GenerateOptions) -> str | None:
    """Print the answer as it comes; what was printed. None when the question failed: it leaves no trace."""
    try:
        with client.chat(model, messages, **options) as stream:
            try:
                for piece in stream:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                console_err.print(" (stopped)", style="yellow")
            sys.stdout.write("\n")
            sys.stdout.flush()
            return stream.result().text
    except P2PShardError as error:
        console_err.print(f"error: {error.message}", style="bold red", markup=False)
        return None
