"""The worker's data port: one gRPC server for edges and gateways, whatever epoch is active."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from p2pshard.credentials import Credentials
from p2pshard.errors import NotReady, P2PShardError
from p2pshard.planning.plan import Epoch
from p2pshard.transport.channels import abort_with, add_raw_methods, bind, make_server
from p2pshard.transport.frames import Frame, Limits, encode
from p2pshard_node.worker.carry import Left, serve
from p2pshard_node.worker.edges import read_hello
from p2pshard_node.worker.epoch import ActiveEpoch

__all__ = ["DataPort"]

_NO_EPOCH = Epoch(0, "")


class DataPort:
    """Serves ``/p2pshard.v1.Data/Edge``, ``/Driver`` and ``/Kv``. `active()` is the epoch of the moment, if any."""

    def __init__(
        self,
        credentials: Credentials | None,
        limits: Limits,
        active: Callable[[], ActiveEpoch | None],
        left: Callable[[Epoch], Awaitable[Left]],
    ) -> None:
        """``left(epoch)``: what an epoch leaves that is over, or about to be; raises `NotReady`."""
        self._credentials, self._active, self._left = credentials, active, left
        self.limits = limits
        """Of the plan that is loaded."""
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self, host: str, ports: Sequence[int]) -> None:
        """Listen on the first free port. Raises `OSError`."""
        self._server = make_server()
        add_raw_methods(
            self._server, "p2pshard.v1.Data", {"Edge": self._edge, "Driver": self._driver, "Kv": self._kv}
        )
        self.port = bind(self._server, self._credentials, host, ports)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _edge(self, _: Any, context: Any) -> None:
        active = self._active()
        try:
            hello = await read_hello(context, self.limits)
            active = self._active()
            if active is None:
                raise NotReady("no epoch is active here yet")
            await active.accept(context, hello)
        except P2PShardError as error:
            # In band, so that the other end reads a reason; the call itself ends well.
            epoch = active.plan.epoch if active is not None else _NO_EPOCH
            for message in encode(Frame("error", epoch, error=error)):
                await context.write(message)

    async def _kv(self, _: Any, context: Any) -> None:
        try:
            await serve(context, self._left)
        except P2PShardError as error:
            await abort_with(context, error)

    async def _driver(self, _: Any, context: Any) -> None:
        active = self._active()
        if active is None or active.driver is None:
            what = "no epoch is active here yet" if active is None else "this worker is not the first stage"
            await abort_with(context, NotReady(what, state="loading", reason=what))
        await active.driver.serve(context)
