"""Server-sent events: a stream that ends with ``[DONE]`` or an error, and notices a client that left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from p2pshard.errors import Internal, P2PShardError

from .disconnect import Disconnected, while_connected
from .errors import error_body

__all__ = ["EventStream"]

_SEND_TIMEOUT_S = 60.0
"""For one event to leave: a client that reads nothing for so long is taken for gone."""
log = logging.getLogger(__name__)


class EventStream(Response):
    """Sends each object of `chunks` as one event, and an error in the middle as an event too."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[dict[str, Any], None], source: AsyncGenerator[Any, None]
    ) -> None:
        """`source` is what `chunks` reads; it is closed here too, for `chunks` may never have started."""
        self.status_code = 200
        self.background = None
        self.body = b""
        self._chunks = chunks
        self._source = source
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send))
        except Disconnected:
            pass  # its request was cancelled with the stream; there is nobody to tell
        except TimeoutError:
            log.info("an HTTP client read nothing for %g s; its stream was closed", _SEND_TIMEOUT_S)
            raise ConnectionAbortedError("client does not read") from None
        finally:
            await self._source.aclose()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await self._send(send, json.dumps(chunk, ensure_ascii=False))
                await self._send(send, "[DONE]")
            except P2PShardError as error:
                await self._send(send, json.dumps(error_body(error)))
            except (TimeoutError, OSError):
                raise
            except Exception as error:
                log.exception("a stream failed")
                await self._send(send, json.dumps(error_body(Internal(f"{type(error).__name__}: {error}"))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, data: str) -> None:
        event = {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes as the send ends.
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await send(event)
