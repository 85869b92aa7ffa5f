"""JSON that nobody vouches for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["parse_json"]

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_BYTES = re.compile(_SURROGATE.pattern.encode())


def parse_json(
    text: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value that `text` is.

    Raises `ValueError` for all that is none, and for what would fail later: nesting too deep for the parser, and
    half of a surrogate pair, which no text can be made of.
    """
    try:
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
        escaped = _SURROGATE.search(text) if isinstance(text, str) else _SURROGATE_BYTES.search(text)
        if escaped is not None:
            json.dumps(value, ensure_ascii=False, default=repr).encode()
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"JSON with half of a surrogate pair: \\u{ord(half):04x}") from None
    return value
