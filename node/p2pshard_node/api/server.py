"""Running the HTTP app inside the daemon's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Handle", "serve"]

MAX_CONNECTIONS = 1024
"""At once; each is a file descriptor, and a daemon without any left can do nothing."""
FIRST_REQUEST_S = 30.0
"""For a connection to send the head of its first request; uvicorn itself times only those that follow."""
_BACKLOG = 128
_STOP_S = 1
"""For open answers to end after a stop was asked for; then they are cut."""


class _Server(uvicorn.Server):
    """Without signal handlers: those are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes connections that are too many, and those that ask for nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(FIRST_REQUEST_S, self._check_asked)

    def _check_asked(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class Handle:
    """A server that listens."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], port: int) -> None:
        self._server = server
        self._task = task
        self.port = port
        """The real one, also where 0 was asked for."""

    async def stop(self) -> None:
        """Close the port at once and open answers after a second. Idempotent."""
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=_STOP_S + 3)
        if not self._task.done():
            self._server.force_exit = True
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def serve(app: ASGIApp, host: str, port: int) -> Handle:
    """Listen on `host` and `port` (0: any). Raises `OSError` when the port is taken."""
    sock = _listen(host, port)
    bound = int(sock.getsockname()[1])
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who a proxy speaks for is what it says; the guard wants to know who calls
        ws="none",
        http=_Protocol,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_STOP_S,
        timeout_keep_alive=30,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([sock]))
    while not server.started:
        if task.done():
            await task
            raise OSError(f"the HTTP server on {host}:{port} ended while starting")
        await asyncio.sleep(0.01)
    return Handle(server, task, bound)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
