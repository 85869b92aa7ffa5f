"""How a deployment comes up, on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from p2pshard.cli.output import console_err
from p2pshard.results import Deployment

__all__ = ["DeployDisplay"]


class DeployDisplay:
    """A bar for each node while it fetches and loads; on a pipe, a line for each change."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """``names``: node id to name."""
        self._names = names
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TransferSpeedColumn(),
            console=console_err,
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._live = console_err.is_terminal
        self._shown = ""
        self._model = ""
        """What is being loaded, once a node has said so."""

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._model:
            console_err.print(
                f"{self._model} goes on loading; `p2pshard undeploy {self._model}` ends that", markup=False
            )

    def _name(self, node: str) -> str:
        return self._names.get(node, node[:12])

    def __call__(self, deployment: Deployment) -> None:
        self._model = deployment.model
        phases = sorted({f"{self._name(p.node)} {p.phase}" for p in deployment.progress})
        line = f"{deployment.model}: {deployment.state}" + (
            f" ({deployment.reason})" if deployment.reason else ""
        )
        if not self._live:
            line += f" [{', '.join(phases)}]" if phases and deployment.state != "ready" else ""
        if line != self._shown and not (deployment.state == "ready" and not self._shown):
            self._shown = line
            console_err.print(line, markup=False, soft_wrap=True)
        if not self._live:
            return
        for p in deployment.progress:
            key = (p.node, p.phase)
            if key not in self._tasks:
                self._tasks[key] = self._progress.add_task(
                    f"{self._name(p.node)} {p.phase}", total=p.total_bytes or None
                )
            self._progress.update(self._tasks[key], completed=p.done_bytes, total=p.total_bytes or None)
