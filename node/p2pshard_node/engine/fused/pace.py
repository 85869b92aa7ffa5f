"""How many threads a kind of work gains by, found by trying: a core that others use makes a crew wait at every phase.

Only the time depends on it, never a result.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Pace"]

_TRIES = 3
"""Calls in a row with another number."""
_RECENT = 5
"""Calls whose median is compared with that."""
_GAP, _LONGEST = 8, 256
"""Calls between two trials: at first, and after many that changed nothing."""
_BETTER, _WORSE = 0.95, 1.4
"""Take another number when it takes this part of the time; try at once when calls take this many times longer
than when the number was chosen."""


class Pace:
    """Chooses between 1, 2, 4, ... and `most` ranks. Begins with `most`, and tries its neighbours in turn."""

    def __init__(self, most: int) -> None:
        self._choices = sorted({most, *(1 << i for i in range(most.bit_length()))} - {0})
        self._chosen = len(self._choices) - 1
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._trial: list[float] = []
        self._tried: int | None = None
        self._step = -1
        self._gap = self._left = _GAP
        self._usual: float | None = None

    @property
    def ranks(self) -> int:
        """For the next call."""
        return self._choices[self._chosen if self._tried is None else self._tried]

    def took(self, seconds: float) -> None:
        """How long a call with `ranks` took, for each row."""
        if self._tried is not None:
            self._trial.append(seconds)
            if len(self._trial) == _TRIES:
                self._decide(self._tried)
            return
        self._recent.append(seconds)
        self._left -= 1
        if len(self._recent) == _RECENT:
            now = median(self._recent)
            if self._usual is None:
                self._usual = now
            if now > _WORSE * self._usual:
                self._usual, self._gap, self._left = now, _GAP, 0
        if self._left <= 0 and len(self._recent) == _RECENT:
            self._try()

    def _try(self) -> None:
        if not 0 <= self._chosen + self._step < len(self._choices):
            self._step = -self._step
        if 0 <= self._chosen + self._step < len(self._choices):
            self._tried, self._trial = self._chosen + self._step, []

    def _decide(self, tried: int) -> None:
        if median(self._trial) < _BETTER * median(self._recent):
            self._chosen, self._gap = tried, _GAP
            self._recent.clear()
            self._usual = None
        else:
            self._step, self._gap = -self._step, min(2 * self._gap, _LONGEST)
            self._usual = median(self._recent)
        self._tried, self._left = None, self._gap
