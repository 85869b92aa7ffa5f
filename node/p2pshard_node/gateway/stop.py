"""Stop strings over a growing text: what may be shown already, and where the text ends."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Pushes text in, gives back what no stop string can still claim.

    The text ends before the stop string that *completes* first (of two that complete together, the longer),
    so the result depends on the text alone and not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that is now certain; after a match always empty."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        first: tuple[int, int, str] | None = None  # (end, start, stop): earliest end, then earliest start
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                first = found if first is None else min(first, found)
        if first is not None:
            self.matched, self._held = first[2], ""
            return text[: first[1]]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of `stop`."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
