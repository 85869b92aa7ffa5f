"""Token ids to text, one token at a time, without broken characters.

The text is a pure function of the ids: however they arrive, the pieces joined equal the decoding of all ids
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["Detokeniser"]

REPLACEMENT = "\ufffd"
_MAX_HELD = 3
"""A UTF-8 character has at most four bytes, so at most three of them can be an unfinished one."""
_WINDOW = 16
"""Ids decoded anew at each push before the window is cut."""
_CONTEXT = 6
"""Ids tried as context when it is cut: a decoder may treat the first token of a text differently."""


class Detokeniser:
    """Incremental decoding over a short window of ids.

    An unfinished character decodes to U+FFFD at the end of the text; up to three of these are held back until
    the next ids decide. Where a decoder rewrites text that was already given (only a byte run that is no
    UTF-8 does that), what was given stays.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int] = ()) -> None:
        """`decode` turns ids into text, `skip` are the special ids that have none."""
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._text = ""  # decoding of the window
        self._shown = 0  # characters of it already given

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return "".join([self._push(i) for i in ids if i not in self._skip])

    def finish(self) -> str:
        """What was held back: an unfinished character, as U+FFFD."""
        rest = self._text[self._shown :]
        self._shown = len(self._text)
        return rest

    def _push(self, token: int) -> str:
        given = self._text[: self._shown]
        self._window.append(token)
        self._text = self._decode(self._window)
        if not self._text.startswith(given):
            self._window, self._shown = [token], 0
            self._text = self._decode(self._window)
        held = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        stable = max(self._shown, len(self._text) - min(held, _MAX_HELD))
        delta = self._text[self._shown : stable]
        self._shown = stable
        if held == 0 and len(self._window) >= _WINDOW:
            self._cut()
        return delta

    def _cut(self) -> None:
        """Keep the fewest last ids that decode on their own to the end of the text."""
        for size in range(2, _CONTEXT + 1):
            text = self._decode(self._window[-size:])
            if text and not text.startswith(REPLACEMENT) and self._text.endswith(text):
                self._window, self._text, self._shown = self._window[-size:], text, len(text)
                return
