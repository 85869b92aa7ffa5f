"""A stream of events whose client leaves at an awkward moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from p2pshard_node.api.sse import EventStream


@pytest.mark.parametrize("rounds", range(6))
async def test_leaving_while_an_event_is_being_sent_ends_the_stream(rounds: int) -> None:
    """The disconnect and the end of a send fall into the same round of the event loop, or near it."""
    gone = asyncio.Event()
    closed: list[str] = []
    sent = 0

    async def source() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            closed.append("source")

    async def chunks(numbers: AsyncGenerator[int, None]) -> AsyncGenerator[dict[str, Any], None]:
        async for number in numbers:
            yield {"number": number}

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1
        assert sent < 200, "the stream goes on after its client left"
        if sent == 5:
            gone.set()
            for _ in range(rounds):
                await asyncio.sleep(0)

    numbers = source()
    async with asyncio.timeout(2):
        await EventStream(chunks(numbers), numbers)({"type": "http"}, receive, send)
    assert closed == ["source"]


async def test_a_client_that_left_before_the_first_event_closes_the_source() -> None:
    closed: list[str] = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append("source")

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    numbers = source()
    await anext(numbers)
    async with asyncio.timeout(2):
        await EventStream(chunks(), numbers)({"type": "http"}, receive, send)
    assert closed == ["source"]
