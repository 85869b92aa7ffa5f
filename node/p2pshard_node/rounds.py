"""Loops that must outlive an error of one round."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Rounds"]

AGAIN_S = 60.0
"""After so long the same error of a loop is logged again."""


class Rounds:
    """Rounds of one control loop: an error nobody foresaw (a full disk, no free file descriptor) ends its round
    and is logged, and the next round comes."""

    def __init__(self, loop: str, log: logging.Logger) -> None:
        self._loop, self._log = loop, log
        self._said, self._at = "", 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Of the body, every `Exception`; a cancellation passes."""
        try:
            yield
        except Exception as error:
            said, now = f"{type(error).__name__}: {error}", time.monotonic()
            if said != self._said or now - self._at >= AGAIN_S:
                self._said, self._at = said, now
                self._log.exception("%s: a round failed, the next one comes: %s", self._loop, said)
