"""JSON that nobody vouches for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["parse_json"]


def parse_json(
    text: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value that `text` is. Raises `ValueError` for all that is none, nesting too deep for the parser included."""
    try:
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
