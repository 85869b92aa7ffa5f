"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from p2pshard.errors import InvalidRequest, P2PShardError

__all__ = ["error_body", "from_validation", "unsupported"]


def error_body(error: P2PShardError) -> dict[str, Any]:
    """The response body of an error; ``param`` is the offending field where there is one."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.details.get("field"),
            "code": error.details.get("code", error.code),
        }
    }


def unsupported(field: str, what: str) -> InvalidRequest:
    """A field that we know, whose meaning we would have to drop."""
    return InvalidRequest(f"{field} {what}", field=field, code="unsupported_parameter")


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints, in words with the field's path."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"{field} is not a field that this server knows; it is refused rather than ignored",
            field=field,
            code="unknown_parameter",
        )
    return InvalidRequest(f"{field}: {first['msg']}", field=field, code="invalid_value")


def _path(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"
