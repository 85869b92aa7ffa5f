"""Background tasks that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

__all__ = ["failure_of"]


def failure_of(task: asyncio.Task[Any], log: logging.Logger, what: str) -> BaseException | None:
    """What a task that has ended raised, which is logged as ``what``; None for one that ended well or was cancelled."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s", what, exc_info=error)
    return error
