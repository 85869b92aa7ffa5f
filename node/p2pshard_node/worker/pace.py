"""How long a step should take, learnt from those that returned: late is against this, not a constant."""

from __future__ import annotations

__all__ = ["Pace"]

_DECAY = 0.98
_FIRST_S = 6.0
"""Prediction while nothing is known: the first step may page weights in."""


class Pace:
    """A slowly forgetting maximum of round-trip times, by size class (powers of two of tokens)."""

    def __init__(self) -> None:
        self._worst: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        self._worst[size] = max(seconds, self._worst.get(size, 0.0) * _DECAY)

    def predict(self, tokens: int) -> float:
        """Seconds. A size not seen yet is scaled up from the largest smaller one."""
        size = tokens.bit_length()
        if size in self._worst:
            return self._worst[size]
        smaller = [s for s in self._worst if s < size]
        if smaller:
            nearest = max(smaller)
            return float(self._worst[nearest] * 2 ** (size - nearest))
        return max(self._worst.values(), default=_FIRST_S)

    def allowance(self, tokens: int) -> float:
        """Seconds of silence after which a stage counts as stuck."""
        return max(2.0, 5.0 * self.predict(tokens))
