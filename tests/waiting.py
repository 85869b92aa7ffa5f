"""Waiting for a condition, with an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(
    condition: Callable[[], Any], seconds: float, what: Callable[[], str] | str, every: float = 0.1
) -> Any:
    """The first true value of `condition`; fails naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(
                f"not within {seconds} s: {what() if callable(what) else what} (last: {value!r})"
            )
        time.sleep(every)


async def come_true(condition: Callable[[], Any], seconds: float = 10.0, every: float = 0.01) -> Any:
    """`until` for a test that shares its event loop with what it waits for."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"it did not come to that within {seconds} s (last: {value!r})"
        await asyncio.sleep(every)
