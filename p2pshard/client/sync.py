"""`Client`: the same cluster for code without asyncio."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from p2pshard.client.aio import CONNECT_S, AsyncClient
from p2pshard.client.options import GenerateOptions, Message, PlanOptions
from p2pshard.client.stream import AsyncStream
from p2pshard.errors import Cancelled, InvalidRequest
from p2pshard.results import (
    ClusterStatus,
    Deployment,
    Generation,
    Models,
    PlanResult,
    Requests,
    TextDelta,
)

__all__ = ["Client", "Stream"]

T = TypeVar("T")

#: how long an interrupt waits for what it interrupted to let go
_CANCEL_S = 3.0


class _LoopThread:
    """An event loop on a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._posted: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="p2pshard-client", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt of the waiting thread cancels it, and returns only when it has ended."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(task := self._loop.create_task(coroutine))
            task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(Cancelled("the client was closed while this was on its way"))
            elif error := task.exception():
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:
            coroutine.close()
            raise InvalidRequest("this client is closed") from error
        try:
            return outcome.result()
        except (KeyboardInterrupt, SystemExit):
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            wait([outcome], timeout=_CANCEL_S)
            raise

    def post(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run on the loop without waiting; nothing once it is closed."""

        def start() -> None:
            self._posted.add(task := self._loop.create_task(function()))
            task.add_done_callback(self._posted.discard)

        with suppress(RuntimeError):  # closed already: then nothing is left to do
            self._loop.call_soon_threadsafe(start)

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
        # a stream that nobody holds any more must not keep a request running
        weakref.finalize(self, thread.post, stream.aclose).atexit = False

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

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the whole answer; waits for it."""
        return self.result().token_ids

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length``, ``deadline`` or ``cancelled``; waits for the end."""
        return self.result().finish_reason

    @property
    def prompt_tokens(self) -> int:
        """Waits for the end."""
        return self.result().prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Waits for the end."""
        return self.result().completion_tokens

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

    def models(self) -> Models:
        """See `AsyncClient.models`."""
        return self._thread.run(self._client.models())

    def pause(self, node: str) -> str:
        """See `AsyncClient.pause`."""
        return self._thread.run(self._client.pause(node))

    def resume(self, node: str) -> str:
        """See `AsyncClient.resume`."""
        return self._thread.run(self._client.resume(node))

    def keys(self) -> list[dict[str, Any]]:
        """See `AsyncClient.keys`."""
        return self._thread.run(self._client.keys())

    def create_key(self, name: str, *, per_minute: int | None = None, at_once: int | None = None) -> str:
        """See `AsyncClient.create_key`."""
        return self._thread.run(self._client.create_key(name, per_minute=per_minute, at_once=at_once))

    def revoke_key(self, name: str) -> None:
        """See `AsyncClient.revoke_key`."""
        self._thread.run(self._client.revoke_key(name))

    def leave(self) -> int:
        """See `AsyncClient.leave`."""
        return self._thread.run(self._client.leave())

    def shutdown(self) -> int:
        """See `AsyncClient.shutdown`."""
        return self._thread.run(self._client.shutdown())

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
        """See `AsyncClient.generate`. Returns once a node has taken the request, and raises if none does."""
        return self._started(self._client.generate(model, prompt, **options))

    def chat(
        self, model: str, messages: str | Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> Stream:
        """See `AsyncClient.chat`. Returns once a node has taken the request, and raises if none does."""
        return self._started(self._client.chat(model, messages, **options))

    def _started(self, stream: AsyncStream) -> Stream:
        self._thread.run(stream.start())
        return Stream(stream, self._thread)
