"""`Client`: the same cluster for code without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from p2pshard.client.aio import CONNECT_S, AsyncClient
from p2pshard.client.options import GenerateOptions, Message, PlanOptions
from p2pshard.client.stream import AsyncStream
from p2pshard.errors import InvalidRequest
from p2pshard.results import (
    ClusterStatus,
    Deployment,
    Generation,
    ModelEntry,
    PlanResult,
    Requests,
    TextDelta,
)

__all__ = ["Client", "Stream"]

T = TypeVar("T")


class _LoopThread:
    """An event loop on a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="p2pshard-client", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the waiting thread cancels it on the loop."""
        if self._loop.is_closed():
            coroutine.close()
            raise InvalidRequest("this client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()


class Stream:
    """An answer on its way, without asyncio. Iterate for its pieces, or read `text` or `result`.

    Leaving the loop early, an interrupt, or `close` cancels the request on every node.
    """

    def __init__(self, stream: AsyncStream, thread: _LoopThread) -> None:
        self._stream = stream
        self._thread = thread

    def __iter__(self) -> Iterator[TextDelta]:
        pieces = aiter(self._stream)
        done = object()

        async def step() -> Any:
            return await anext(pieces, done)

        try:
            while (piece := self._thread.run(step())) is not done:
                yield piece
        finally:
            self._thread.run(pieces.aclose())  # type: ignore[attr-defined]  # an async generator

    def result(self) -> Generation:
        """Read what is left and return the whole. Raises as `AsyncStream.result`."""
        for _ in self:
            pass
        return self._stream._generation()

    @property
    def text(self) -> str:
        """The whole answer; waits for it."""
        return self.result().text

    def close(self) -> None:
        """Cancel the request unless it has finished."""
        self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """`AsyncClient` for code without asyncio; safe to use from several threads. Close it, or use ``with``.

    Arguments of every method, and what they raise, are those of the same method there.
    """

    def __init__(
        self,
        nodes: Sequence[str] | str | None = None,
        *,
        cluster: str | None = None,
        connect_timeout_s: float = CONNECT_S,
    ) -> None:
        self._client = AsyncClient(nodes, cluster=cluster, connect_timeout_s=connect_timeout_s)
        self._thread = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connection and thread; streams that are open are cancelled."""
        with suppress(InvalidRequest):  # closed already
            self._thread.run(self._client.aclose())
        self._thread.close()

    def connect(self) -> str:
        """Connect if need be; the address of the node in use. Raises `NodeUnreachable`."""
        return self._thread.run(self._client.connect())

    def status(self) -> ClusterStatus:
        """See `AsyncClient.status`."""
        return self._thread.run(self._client.status())

    def ps(self) -> Requests:
        """See `AsyncClient.ps`."""
        return self._thread.run(self._client.ps())

    def models(self) -> tuple[ModelEntry, ...]:
        """See `AsyncClient.models`."""
        return self._thread.run(self._client.models())

    def shutdown(self) -> None:
        """See `AsyncClient.shutdown`."""
        self._thread.run(self._client.shutdown())

    def undeploy(self, model: str) -> None:
        """See `AsyncClient.undeploy`."""
        self._thread.run(self._client.undeploy(model))

    def plan(self, model: str, **options: Unpack[PlanOptions]) -> PlanResult:
        """See `AsyncClient.plan`."""
        return self._thread.run(self._client.plan(model, **options))

    def deploy(
        self,
        model: str,
        *,
        on_progress: Callable[[Deployment], None] | None = None,
        **options: Unpack[PlanOptions],
    ) -> Deployment:
        """See `AsyncClient.deploy`."""
        return self._thread.run(self._client.deploy(model, on_progress=on_progress, **options))

    def generate(self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """See `AsyncClient.generate`."""
        return Stream(self._client.generate(model, prompt, **options), self._thread)

    def chat(
        self, model: str, messages: str | Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> Stream:
        """See `AsyncClient.chat`."""
        return Stream(self._client.chat(model, messages, **options), self._thread)
