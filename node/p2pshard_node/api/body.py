"""Reading a JSON request body from anyone: bounded, of the right type, plain JSON."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from p2pshard.errors import InvalidRequest
from p2pshard.json_text import parse_json

from .disconnect import Disconnected

__all__ = ["MAX_BODY_BYTES", "BodyTooLarge", "BodyTooSlow", "UnreadBody", "WrongContentType", "read_json"]

MAX_BODY_BYTES = 8 << 20
MAX_FIELDS = 1024
"""Of one JSON object: each that is not known costs a complaint."""
BODY_S = 60.0
"""For all of a body to arrive."""


class UnreadBody(InvalidRequest):
    """The body was not read to its end, so nothing after it on the connection can be."""


class BodyTooLarge(UnreadBody):
    code = "body_too_large"
    http_status = 413


class BodyTooSlow(UnreadBody):
    code = "body_too_slow"
    http_status = 408


class WrongContentType(UnreadBody):
    code = "wrong_content_type"
    http_status = 415


async def read_json(request: Request) -> Any:
    """The value of a body.

    Raises `WrongContentType`, `BodyTooLarge` (before it is read whole), `BodyTooSlow`, `InvalidRequest`, or
    `Disconnected` when the client leaves before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType(f"the content type is {kind or 'missing'!r}; send application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise BodyTooSlow(
            f"after {BODY_S:.0f} s there are {len(body)} bytes of the body, and no end"
        ) from None
    except ClientDisconnect:
        raise Disconnected from None
    try:
        return parse_json(body, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # ValueError: JSON and UTF-8 errors alike
        raise InvalidRequest(
            f"the body is not JSON: {str(error)[:200] or 'nested too deep'}", field="body"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        raise ValueError(f"an object of {len(pairs)} fields; at most {MAX_FIELDS} are taken")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
