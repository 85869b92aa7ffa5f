"""Guesses the next tokens of a sequence from its own text, for the model to verify in one step. Pure.

Prompt lookup: where the last few tokens stood before, what followed them then is proposed. That a guess is
right is never assumed, so text does not depend on it; only time does.
(Speculative decoding: arXiv:2211.17192; a draft without probabilities is a point mass.)
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pshard.speculation import ADAPTIVE

__all__ = ["Drafter"]

_GRAM = 3
_COST = {1: 1.2, 3: 1.75, 7: 3.0}
"""Time of a step that verifies so many guesses, in steps of one token: estimated from tokens/s of 4-bit models at 1, 4
and 8 requests on one core. Rows are computed in tiles of four: the lengths between cost about as much as the next."""
_WORTH = 1.05
_MEMORY = 0.85
"""What an older guess still counts when another draft has been judged."""
_PRIOR = (1.2, 2.0)
"""Right guesses and all guesses, before there were any."""
_DOUBT = (0.35, 1.0)
"""The same after a rest: one that is right is believed, and so is one that is wrong."""
_MOST_REST = 256


class Drafter:
    """Drafts for one sequence, which only ever grows."""

    def __init__(self, length: int) -> None:
        """`length`: tokens of each draft, or `ADAPTIVE`."""
        self._adaptive = length == ADAPTIVE
        self._right, self._judged = _PRIOR
        self._length = self._best() if self._adaptive else length
        self._followers: dict[tuple[int, ...], int] = {}
        """Where the last occurrence of some tokens in a row was followed by another token."""
        self._read = _GRAM
        self._rests = 0
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
        length = min(most, self._length)
        if self._adaptive and length not in _COST:  # less room than wanted: the next length that pays
            length = max((n for n in _COST if n < length), default=0)
        # Beyond the end it goes on with itself: what repeats every few tokens goes on repeating.
        period = len(ids) - at
        return tuple(ids[at + i % period] for i in range(length))

    def judge(self, drafted: int, accepted: int, length: int) -> None:
        """Learn how many tokens of a draft were right; the sequence has `length` tokens now.

        The next draft has the length that gives most tokens for its time, if guesses go on being right as often as
        the last ones. Where none is worth its time there is none for a while, each time for twice as many tokens,
        and then a short one for another look.
        """
        if not self._adaptive or not drafted:
            return
        self._right = _MEMORY * self._right + accepted
        self._judged = _MEMORY * self._judged + min(drafted, accepted + 1)
        self._length = self._best()
        if accepted:
            self._rests = 0
        if not self._length:
            self._right, self._judged, self._length = *_DOUBT, min(_COST)
            self._rests += 1
            self._resting = length + min(_MOST_REST, 4 << self._rests)

    def _best(self) -> int:
        """The length that pays most; 0: none does."""
        chance = self._right / self._judged
        gains = {n: sum(chance**i for i in range(n + 1)) / cost for n, cost in _COST.items()}
        best = max(gains, key=lambda n: gains[n])
        return best if gains[best] >= _WORTH else 0
