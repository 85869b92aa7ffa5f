"""Guesses the next tokens of a sequence from its own text, for the model to verify in one step. Pure.

Prompt lookup: where the last few tokens stood before, what followed them then is proposed. That a guess is
right is never assumed, so text does not depend on it; only time does.
(Speculative decoding: arXiv:2211.17192; a draft without probabilities is a point mass.)
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pshard.speculation import ADAPTIVE, MAX_DRAFT

__all__ = ["Drafter"]

_GRAM = 3
_FIRST = 2
_MOST_REST = 256


class Drafter:
    """Drafts for one sequence, which only ever grows."""

    def __init__(self, length: int) -> None:
        """`length`: tokens of each draft, or `ADAPTIVE`."""
        self._adaptive = length == ADAPTIVE
        self._length = _FIRST if self._adaptive else length
        self._followers: dict[tuple[int, ...], int] = {}
        """Where the last occurrence of some tokens in a row was followed by another token."""
        self._read = _GRAM
        self._misses = 0
        self._resting = 0
        """Length of the sequence before which there is no point in another try."""

    def draft(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `ids`; none where nothing is to be expected."""
        for end in range(self._read, len(ids)):
            self._followers[tuple(ids[end - _GRAM : end])] = end
        self._read = max(self._read, len(ids))
        if len(ids) < self._resting:
            return ()
        at = self._followers.get(tuple(ids[-_GRAM:]))
        if at is None:
            return ()
        # Beyond the end it goes on with itself: what repeats every few tokens goes on repeating.
        period = len(ids) - at
        return tuple(ids[at + i % period] for i in range(min(most, self._length)))

    def judge(self, drafted: int, accepted: int, length: int) -> None:
        """Learn how many tokens of a draft were right; the sequence has `length` tokens now.

        The next draft is twice as long after one that was right to its end, else a token longer than what was
        right. After one that was all wrong there is none for a while, each time for twice as many tokens.
        """
        if not self._adaptive or not drafted:
            return
        if accepted == drafted:
            self._length = min(MAX_DRAFT, 2 * self._length)
        else:
            self._length = accepted + 1
        self._misses = self._misses + 1 if not accepted else 0
        self._resting = length + (min(_MOST_REST, 2 << self._misses) if not accepted else 0)
