"""State of the daemon as JSON files: replaced in one step, and written beside the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from p2pshard.errors import Conflict, Internal
from p2pshard.private_files import write_private

__all__ = ["JsonFiles", "read_json", "write_json"]

_log = logging.getLogger("p2pshard.files")


def write_json(path: Path, value: Any) -> None:
    """Replace the file in one step and have it on the disk before returning."""
    write_private(path, json.dumps(value).encode())


def read_json(path: Path) -> Any | None:
    """The file's value; None if there is no such file. Raises `Conflict` when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Conflict(f"{path} is damaged ({error}); move it away and start again") from error


class JsonFiles:
    """Writes files on a thread of its own, of each only the newest value: having bytes on the disk of a small machine can
    take seconds, in which pings must go on.

    What cannot be written is logged, and tried again with whatever is written next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[Path, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="json files")

    def put(self, path: Path, value: Any) -> None:
        """Have the value written soon. It may not be changed afterwards."""
        with self._lock:
            self._due.pop(path, None)
            self._due[path] = value
        self._thread.submit(self._write_due).add_done_callback(_log_trouble)

    async def saved(self) -> None:
        """Return once all that was put is on the disk. Raises `Internal` when it cannot be written."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._write_due)))
        except OSError as error:
            raise Internal(f"this node's state cannot be written: {error}") from error

    def flush(self) -> None:
        """As `saved`, for a thread that may wait; trouble is only logged."""
        done = self._thread.submit(self._write_due)
        done.exception()
        _log_trouble(done)

    def _write_due(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    return
                path = next(iter(self._due))
                value = self._due.pop(path)
            try:
                write_json(path, value)
            except BaseException:
                with self._lock:
                    self._due.setdefault(path, value)
                raise


def _log_trouble(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("this node's state is not written, and will be lost if it ends now: %s", error)
