"""The setting `speculation` of a request, and the draft that it stands for; the same in client, API and driver."""

from __future__ import annotations

from p2pshard.errors import InvalidRequest

__all__ = ["ADAPTIVE", "MAX_DRAFT", "check_draft", "draft_of"]

ADAPTIVE = -1
"""In place of a number of tokens: as many as are worth their time, by how many proved right."""
MAX_DRAFT = 16
_NAMED = {"off": 0, "adaptive": ADAPTIVE}


def draft_of(speculation: str | int) -> int:
    """Tokens to draft at a time: 0 for ``off``, `ADAPTIVE` for ``adaptive``, else the number itself.

    Raises `InvalidRequest` for anything but these and 1 to `MAX_DRAFT`.
    """
    draft = _NAMED.get(speculation) if isinstance(speculation, str) else speculation
    if type(draft) is not int or (draft not in _NAMED.values() and not 1 <= draft <= MAX_DRAFT):
        raise InvalidRequest(
            f"speculation is {speculation!r}; it must be off, adaptive or a number of tokens from 1 to {MAX_DRAFT}",
            field="speculation",
        )
    return draft


def check_draft(draft: int) -> int:
    """A draft as it came over the wire. Raises `InvalidRequest`."""
    return draft_of({0: "off", ADAPTIVE: "adaptive"}.get(draft, draft))
