"""Blocking work beside the event loop that is never left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a caller that is cancelled leaves only when the work has ended.

    A thread cannot be stopped: whoever undoes the work (closes its file, deletes what it wrote) before it has
    ended undoes nothing.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # it is raised below, once for all
        if not running.cancelled():
            running.exception()  # of work that nobody waits for any more
        raise
