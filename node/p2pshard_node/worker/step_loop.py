"""Feeds one stage's compute thread. The event loop never waits for a computation, nor this for an edge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from p2pshard.errors import ProtocolError
from p2pshard.transport.frames import Frame
from p2pshard_node.worker.executor import StageExecutor

__all__ = ["StepLoop"]


class StepLoop:
    """A queue of as many steps as may be under way, and the thread that computes them one after another.

    The thread takes steps from the queue itself and hands results to the event loop: no task and no
    future per step.
    """

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
        self._depth = depth
        self._todo: SimpleQueue[tuple[Frame, float] | None] = SimpleQueue()
        """Steps with the time of their arrival; None ends the thread's work."""
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
        if self._todo.qsize() >= self._depth:
            raise ProtocolError(f"more than {self._depth} steps under way")
        self._todo.put((frame, time.perf_counter()))
        self.received = frame.step

    async def run(self) -> None:
        """Until cancelled, or a step contradicts what is here. Raises what else a step or its result raised."""
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()
        work = loop.run_in_executor(self._thread, self._work, loop, broken)
        try:
            over: set[asyncio.Future[Any]] = {work, broken}
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
            if (contradiction := work.result()) is not None:
                self._on_error(contradiction)
        finally:
            self._todo.put(None)
            work.cancel()
            broken.cancel()

    def _work(self, loop: asyncio.AbstractEventLoop, broken: asyncio.Future[None]) -> ProtocolError | None:
        """On the compute thread, until there is None to do."""
        while (todo := self._todo.get()) is not None:
            frame, arrived = todo
            begun = time.perf_counter()
            try:
                result = self.executor.run(frame, int((begun - arrived) * 1e6))
            except ProtocolError as error:
                return error
            self.busy_s += time.perf_counter() - begun
            loop.call_soon_threadsafe(self._take, frame.step, result, broken)
        return None

    def _take(self, step: int, result: Frame, broken: asyncio.Future[None]) -> None:
        if broken.done():
            return
        self.computed = step
        try:
            self._on_result(result)
        except Exception as error:
            broken.set_exception(error)
