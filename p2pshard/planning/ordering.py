"""Which nodes, in which order: a search over subsets and orders of nodes for a run that holds every layer.

A search state keeps *all* layer counts that the nodes so far can cover, as the bits of one integer: bit e
says that layers 0 to e-1 can lie on them. Whether the rest can be placed from (used nodes, last node, e)
does not depend on how the state was reached, so a failure is remembered once: with up to `EXACT_NODES`
nodes the answer is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

__all__ = ["EXACT_NODES", "Capacity", "Problem", "balance", "find_order"]

EXACT_NODES = 8
"""With more candidates the search gives up after `_MAX_VISITS` states, most promising orders first."""
_MAX_VISITS = 300


@dataclass(frozen=True)
class Capacity:
    """What one node can take: bytes left for layers, by its place in the pipeline; may be negative."""

    middle: int
    first: int
    """Less embedding."""
    last: int
    """Less head."""
    only: int
    """Both, alone."""
    pin: tuple[int, int] | None = None
    """Layers [first, last] that it must hold, no others."""

    def left(self, first: bool, last: bool) -> int:
        if first and last:
            return self.only
        return self.first if first else self.last if last else self.middle


@dataclass(frozen=True)
class Problem:
    """What the layers take and cost, and the candidates, the most wanted first."""

    costs: tuple[int, ...]
    """Bytes of each layer in memory: weights, KV and padding."""
    candidates: tuple[Capacity, ...]
    linked: tuple[tuple[bool, ...], ...]
    """By candidate number, both ways."""
    work: tuple[float, ...]
    """Of each layer, what a decode step has to do, in a unit that `speeds` shares: bytes read."""
    head_work: float
    """What the last stage has to do besides."""
    speeds: tuple[float, ...]
    """Work a candidate does in one unit of time, above 0."""

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Bytes of the layers before each, and of all."""
        return (0, *accumulate(self.costs))

    @cached_property
    def complete(self) -> bool:
        """Every candidate reaches every other."""
        return all(all(row[:i]) for i, row in enumerate(self.linked))

    @cached_property
    def best(self) -> tuple[tuple[int, int, int], ...]:
        """``(bytes, layers, number)`` that no place lets a candidate exceed, the largest first."""
        smallest = tuple(accumulate(sorted(self.costs)))
        rows = []
        for number, node in enumerate(self.candidates):
            left = max(node.middle, node.first, node.last, 0)
            rows.append((left, bisect_right(smallest, left), number))
        return tuple(sorted(rows, reverse=True))

    @cached_property
    def head_cost(self) -> tuple[int, int]:
        """``(bytes, layers)`` that any candidate has less when it comes last."""
        smallest = tuple(accumulate(sorted(self.costs)))
        size = min((max(c.middle, 0) - max(c.last, 0) for c in self.candidates), default=0)
        layers = min(
            (bisect_right(smallest, c.middle) - bisect_right(smallest, c.last) for c in self.candidates),
            default=0,
        )
        return max(size, 0), max(layers, 0)

    def fits(self, number: int, start: int, end: int) -> bool:
        """Whether candidate ``number`` can hold layers ``start`` to ``end - 1``."""
        node = self.candidates[number]
        if node.pin is not None and node.pin != (start, end - 1):
            return False
        return self.sums[end] - self.sums[start] <= node.left(start == 0, end == len(self.costs))


def find_order(problem: Problem, count: int) -> tuple[int, ...] | None:
    """``count`` candidates in an order that holds every layer, each at least one; None if there is none.

    Pinned candidates are always among them. Prefers candidates that come first in the problem.
    """
    pinned = sum(c.pin is not None for c in problem.candidates)
    if not 1 <= count <= min(len(problem.candidates), len(problem.costs)) or pinned > count:
        return None
    return _Search(problem, count).run()


class _Search:
    def __init__(self, problem: Problem, count: int) -> None:
        self.problem = problem
        self.count = count
        self.layers = len(problem.costs)
        self.pinned = sum(1 << i for i, c in enumerate(problem.candidates) if c.pin is not None)
        self.complete = problem.complete
        self.largest = max(problem.costs)
        self.failed: dict[tuple[int, int, int], int] = {}
        self.ends: dict[tuple[int, bool], tuple[int, ...]] = {}
        self.visits = 0
        self.bounded = len(problem.candidates) > EXACT_NODES

    def run(self) -> tuple[int, ...] | None:
        """Candidates in pipeline order."""
        if self.count == 1:
            alone = (i for i in range(len(self.problem.candidates)) if not self.pinned & ~(1 << i))
            return next(((i,) for i in alone if self.problem.fits(i, 0, self.layers)), None)
        return self._extend((), 0, 1)

    def _hopeless(self, used: int, more: int, covered: int) -> bool:
        """No choice of ``more`` unused candidates has the bytes, or the layers, for all after ``covered``."""
        size, layers = (-lost for lost in self.problem.head_cost)
        taken = 0
        for left, count, number in self.problem.best:
            if taken == more:
                break
            if not used >> number & 1:
                size, layers, taken = size + left, layers + count, taken + 1
        sums = self.problem.sums
        return sums[covered] + size < sums[-1] or covered + layers < self.layers

    def _extend(self, order: tuple[int, ...], used: int, reach: int) -> tuple[int, ...] | None:
        """Complete ``order``, which can cover any layer count in the bits of ``reach``."""
        more = self.count - len(order)
        name = (used, order[-1], order[0]) if order and not self.complete else (used, -1, -1)
        reach &= ~self.failed.get(name, 0)
        missing = (self.pinned & ~used).bit_count()
        if not reach or missing > more or self._hopeless(used, more, reach.bit_length() - 1):
            return None
        self.visits += 1
        tried: set[Capacity] = set()
        for number, node in enumerate(self.problem.candidates):
            if self.bounded and self.visits > _MAX_VISITS:
                return None  # not remembered as failed: it was not tried to the end
            bit = 1 << number
            if (
                used & bit
                or (missing == more and not self.pinned & bit)
                or not self._may_follow(order, number, more)
            ):
                continue
            if self.complete:  # of candidates that are alike in all that matters, one stands for the others
                if node in tried:
                    continue
                tried.add(node)
            if more == 1:
                if self._ends(number, reach):
                    return (*order, number)
                continue
            covered = self._cover(number, reach)
            if covered and (found := self._extend((*order, number), used | bit, covered)):
                return found
        self.failed[name] = self.failed.get(name, 0) | reach
        return None

    def _may_follow(self, order: tuple[int, ...], number: int, more: int) -> bool:
        if self.complete or not order:
            return True
        linked = self.problem.linked
        return linked[order[-1]][number] and (more > 1 or linked[number][order[0]])

    def _cover(self, number: int, reach: int) -> int:
        """Layer counts that can be covered with the candidate next, short of all: a later one needs some."""
        pin = self.problem.candidates[number].pin
        if pin is not None:
            start, last = pin
            good = (
                reach >> start & 1 and last + 1 < self.layers and self.problem.fits(number, start, last + 1)
            )
            return 1 << (last + 1) if good else 0
        low, high = (reach & -reach).bit_length() - 1, reach.bit_length() - 1
        left = self.problem.candidates[number].left(low == 0, False)
        if left >= self.largest and reach == (2 << high) - (
            1 << low
        ):  # any layer fits: no gaps to either side
            end = min(bisect_right(self.problem.sums, self.problem.sums[high] + left) - 1, self.layers - 1)
            return (2 << end) - (2 << low)
        ends = self._furthest(number, low == 0)
        covered = 0
        while reach:
            start = (reach & -reach).bit_length() - 1
            reach &= reach - 1
            end = ends[start]
            covered |= (1 << (end + 1)) - (1 << (start + 1))
        return covered

    def _ends(self, number: int, reach: int) -> bool:
        """Whether the candidate can hold all layers from some start in ``reach``."""
        while reach:
            start = reach.bit_length() - 1
            if self.problem.fits(number, start, self.layers):
                return True
            if self.problem.candidates[number].pin is None:
                return False  # an earlier start costs more
            reach ^= 1 << start
        return False

    def _furthest(self, number: int, first: bool) -> tuple[int, ...]:
        """By start: one past the last layer that fits, at most one short of all (start itself: none fits)."""
        known = self.ends.get((number, first))
        if known is not None:
            return known
        left = self.problem.candidates[number].left(first, False)
        sums, ends, end = self.problem.sums, [], 0
        for start in range(self.layers):
            end = max(end, start)
            while end < self.layers - 1 and sums[end + 1] - sums[start] <= left:
                end += 1
            ends.append(end)
        self.ends[number, first] = tuple(ends)
        return self.ends[number, first]


def balance(problem: Problem, order: Sequence[int]) -> tuple[int, ...] | None:
    """Where to cut: one past the last layer of each candidate in ``order``, or None if it does not hold all.

    Of all cuts that fit, the one whose slowest stage is the fastest: it sets the pace of all when each has a
    group of sequences to work on.
    """
    layers, done = len(problem.costs), tuple(accumulate(problem.work, initial=0.0))
    # best[e]: (time of the slowest so far, sum of squares, ends) for covering e layers
    best: Mapping[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for place, number in enumerate(order):
        final = place == len(order) - 1
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, ends) in best.items():
            stop = layers if final else layers - (len(order) - 1 - place)
            for end in range(layers if final else start + 1, stop + 1):
                if start >= end or not problem.fits(number, start, end):
                    if problem.candidates[number].pin is None:
                        break
                    continue
                spent = (done[end] - done[start] + problem.head_work * final) / problem.speeds[number]
                option = (max(slowest, spent), squares + spent * spent, (*ends, end))
                if end not in following or option < following[end]:
                    following[end] = option
        best = following
    return best[layers][2] if layers in best else None
