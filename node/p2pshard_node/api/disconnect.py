"""A client that goes away ends its request, also while nothing is being sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

__all__ = ["Disconnected", "while_connected"]

T = TypeVar("T")


class Disconnected(Exception):
    """The client is gone; nobody reads an answer."""


async def while_connected(source: Request | Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and waited for when the client disconnects first.

    The body must have been read. Raises `Disconnected`.
    """
    receive = source.receive if isinstance(source, Request) else source
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
