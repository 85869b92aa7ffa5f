"""Who may use the HTTP API: programs of this machine, keys from elsewhere, and no foreign web page."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2pshard.errors import P2PShardError, Refused, Unauthenticated

from ..keys import ApiKey, ApiKeys
from .origins import Origins

__all__ = ["Guard"]

MAX_TOLD = 256
"""Callers whose refusal is logged; once each, for each reason."""
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of a proxy: whoever it speaks for is elsewhere."""

_log = logging.getLogger("p2pshard.api")


class Guard:
    """Around the app. ``is_local(host)``: whether an address is this machine's; ``answer(error)``: an error's response."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        origins: Origins,
        keys: ApiKeys,
        is_local: Callable[[str], bool],
        answer: Callable[[P2PShardError], Response],
    ) -> None:
        self._app, self._origins, self._keys = app, origins, keys
        self._is_local, self._answer = is_local, answer
        self._told: set[tuple[str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = scope["client"][0] if scope.get("client") else ""
        try:
            origin = self._check_page(headers)
            if origin and scope["method"] == "OPTIONS":
                await _preflight(origin)(scope, receive, send)
                return
            key = self._key(headers, client)
            with self._keys.use(key) if key is not None else nullcontext():
                await self._app(scope, receive, _shared(send, origin) if origin else send)
        except (Refused, Unauthenticated) as error:
            self._tell(client, error)
            await self._answer(error)(scope, receive, send)
        except P2PShardError as error:  # of the key's limits: the app answers its own
            await self._answer(error)(scope, receive, send)

    def _check_page(self, headers: Headers) -> str:
        """The origin of the page that asks, empty when none does. Raises `Refused` for one that is foreign."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if not self._origins.takes_host(host):
            raise Refused(
                f"this node is not called {host[:80]!r}; use its address, or start it with --allow-origin "
                f"http://{host[:80] or 'NAME'}"
            )
        if origin and not self._origins.takes_origin(origin):
            raise Refused(
                f"pages of {origin[:80]!r} may not use this node; start it with --allow-origin {origin[:80]} to let them"
            )
        return origin

    def _key(self, headers: Headers, client: str) -> ApiKey | None:
        """The key that a request from elsewhere has; None where none is needed. Raises `Unauthenticated`."""
        kind, _, secret = headers.get("authorization", "").partition(" ")
        key = self._keys.find(secret.strip()) if kind.lower() == "bearer" and secret else None
        if key is None and not (self._is_local(client) and not any(h in headers for h in _FORWARDED)):
            raise Unauthenticated(
                "from another machine this API takes requests with a key alone: Authorization: Bearer KEY; "
                "`p2pshard keys create NAME` on the node makes one"
                if not secret
                else "that key is not one of this node's, or was revoked"
            )
        return key

    def _tell(self, client: str, error: P2PShardError) -> None:
        told = (client, error.message)
        if told not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(told)
            _log.warning("refused client=%s reason=%s", client or "-", error.message)


def _preflight(origin: str) -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
            "vary": "origin",
        },
    )


def _shared(send: Send, origin: str) -> Send:
    """Lets pages of an origin read the answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Any = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("origin")
        await send(message)

    return sent
