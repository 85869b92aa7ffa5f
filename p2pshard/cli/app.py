"""The command group, and the one place that turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from p2pshard.cli.output import console_err, show_refusal
from p2pshard.errors import DoesNotFit, P2PShardError
from p2pshard.version import __version__

__all__ = ["Session", "cli", "invoke", "main"]

_VERBS = (
    "up",
    "leave",
    "down",
    "status",
    "pause",
    "resume",
    "plan",
    "pull",
    "ls",
    "deploy",
    "undeploy",
    "ps",
    "keys",
    "run",
    "chat",
    "bench",
)

EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed
  2    wrong usage
  3    the model does not fit the cluster
  4    no cluster or node reachable
  130  interrupted"""


@dataclass
class Session:
    """What one invocation learnt from its flags and errors need."""

    json: bool = False
    """``--json`` was given: standard output is for one object."""


class _Verbs(click.Group):
    """Loads a verb's module when it is used: the command line starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = importlib.import_module(f"p2pshard.cli.{name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="p2pshard %(version)s")
def cli() -> None:
    """Run one model across several ordinary machines.

    Start a daemon on each machine with `p2pshard up`; then `p2pshard run MODEL PROMPT` on any of them.
    """


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    session = Session()
    try:
        result: Any = cli.main(args=list(arguments), prog_name="p2pshard", standalone_mode=False, obj=session)
    except click.ClickException as error:
        error.show()
        if session.json or "--json" in arguments:  # flags after the wrong one have not been read
            _print_error({"code": "usage", "message": error.format_message(), "details": {}})
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        console_err.print("interrupted", style="yellow")
        if session.json:
            _print_error({"code": "interrupted", "message": "interrupted", "details": {}})
        return 130
    except P2PShardError as error:
        _report(error, session)
        return error.exit_code
    except BrokenPipeError:
        # whoever read our output has gone; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _report(error: P2PShardError, session: Session) -> None:
    if session.json:
        _print_error(error.to_wire())
    console_err.print(f"[bold red]error:[/] {_escaped(error.message)}", soft_wrap=True)
    if isinstance(error, DoesNotFit) and not session.json:
        show_refusal(error.details)


def _print_error(error: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"error": error}))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def main() -> NoReturn:
    """Entry point of the ``p2pshard`` script."""
    sys.exit(invoke(sys.argv[1:]))
