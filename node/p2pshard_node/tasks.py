"""Background tasks: of those that nobody waits for, and of several of which the first counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

__all__ = ["failure_of", "first_of"]


def failure_of(task: asyncio.Task[Any], log: logging.Logger, what: str) -> BaseException | None:
    """What a task that has ended raised, which is logged as ``what``; None for one that ended well or was cancelled."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s", what, exc_info=error)
    return error


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Until the first of them has ended, which ends the others. Raises what one of them raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
