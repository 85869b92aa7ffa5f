"""Feeds one stage's compute thread. The event loop never waits for a computation, nor this for an edge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from p2pshard.errors import ProtocolError
from p2pshard.transport.frames import Frame
from p2pshard_node.worker.executor import StageExecutor

__all__ = ["StepLoop"]


class StepLoop:
    """A queue of as many steps as may be under way, and the task that computes them one after another."""

    def __init__(
        self,
        executor: StageExecutor,
        thread: ThreadPoolExecutor,
        *,
        depth: int,
        on_result: Callable[[Frame], None],
        on_error: Callable[[ProtocolError], None],
    ) -> None:
        self.executor = executor
        self._thread = thread
        self._queue: asyncio.Queue[tuple[Frame, float]] = asyncio.Queue(depth)
        self._on_result, self._on_error = on_result, on_error
        self.received = 0
        """Number of the last step taken in."""
        self.computed = 0
        """Number of the last step computed."""
        self.busy_s = 0.0
        """Time spent computing, in all."""

    def submit(self, frame: Frame) -> None:
        """Queue a step; never waits. Raises `ProtocolError` for more than the window allows."""
        if frame.step <= self.received:
            raise ProtocolError(f"step {frame.step} after step {self.received}")
        try:
            self._queue.put_nowait((frame, time.perf_counter()))
        except asyncio.QueueFull:
            raise ProtocolError(f"more than {self._queue.maxsize} steps under way") from None
        self.received = frame.step

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame, arrived = await self._queue.get()
            begun = time.perf_counter()
            queued_us = int((begun - arrived) * 1e6)
            try:
                result = await loop.run_in_executor(self._thread, self.executor.run, frame, queued_us)
            except ProtocolError as error:
                self._on_error(error)
                return
            self.busy_s += time.perf_counter() - begun
            self.computed = frame.step
            self._on_result(result)
