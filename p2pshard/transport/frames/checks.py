"""Checks of single values that a header carries: each gives the value back, or raises `ProtocolError`."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from p2pshard.errors import P2PShardError, ProtocolError, from_wire
from p2pshard.transport.frames.wire import TEXT, U32, U63

__all__ = ["distinct", "error_of", "fail", "integer", "items_of", "name_of", "number", "text_of"]


def fail(what: str) -> ProtocolError:
    return ProtocolError(f"bad frame: {what}")


def integer(value: object, what: str, most: int = U63, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise fail(f"{what} is {str(value)[:40]!r}, not an integer from {least} to {most}")
    return value


def text_of(value: object, what: str, most: int = 256) -> str:
    if type(value) is not str or len(value) > most:
        raise fail(f"{what} is not a text of at most {most} characters")
    return value


def name_of(value: object, what: str) -> str:
    """A name that is safe wherever it may end up: no separators, no parent folder, no control characters."""
    text = text_of(value, what)
    if not text.isprintable() or any(c in text for c in "/\\") or ".." in text:
        raise fail(f"{what} is no plain name")
    return text


def number(value: object, what: str) -> float:
    if type(value) not in (int, float) or not isfinite(value):  # type: ignore[arg-type]
        raise fail(f"{what} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def items_of(value: object, what: str, most: int, length: int | None = None) -> list[Any]:
    if type(value) is not list or len(value) > most or (length is not None and len(value) != length):
        wanted = f"{length}" if length is not None else f"at most {most}"
        raise fail(f"{what} is not a list of {wanted}")
    return value


def distinct(values: Iterable[int], what: str) -> None:
    seen = list(values)
    if len(set(seen)) != len(seen):
        raise fail(f"{what} appear twice")


def error_of(value: object) -> P2PShardError:
    if type(value) is not dict or set(value) != {"code", "message", "details"}:
        raise fail("error is not {code, message, details}")
    details = value["details"]
    if type(details) is not dict or not set(details) <= {"node", "layers", "stage"}:
        raise fail("error details are not node, layers, stage")
    if "node" in details:
        name_of(details["node"], "node")
    if "layers" in details:
        for layer in items_of(details["layers"], "layers", 2, 2):
            integer(layer, "layer", U32)
    if "stage" in details:
        integer(details["stage"], "stage", U32)
    return from_wire(
        {
            "code": name_of(value["code"], "code"),
            "message": text_of(value["message"], "message", TEXT),
            "details": details,
        }
    )
