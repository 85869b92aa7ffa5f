"""Who owns which KV block. Pure; the driver's half of every stage's block table."""

from __future__ import annotations

import bisect

__all__ = ["BlockAllocator", "Run"]

Run = tuple[int, int]
"""(first block, count)"""


class BlockAllocator:
    """Blocks 0..total-1, handed out as few contiguous runs as there are to be had."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[Run] = [(0, total)] if total else []  # sorted, never adjacent
        self._owned: dict[int, tuple[Run, ...]] = {}

    @property
    def used(self) -> int:
        return self.total - sum(count for _, count in self._free)

    @property
    def owners(self) -> frozenset[int]:
        return frozenset(self._owned)

    def runs(self, owner: int) -> tuple[Run, ...]:
        return self._owned[owner]

    def allocate(self, owner: int, count: int) -> tuple[Run, ...] | None:
        """Runs of `count` blocks in all, or None (and no change) when so many are not free.

        Raises `ValueError` when the owner holds blocks already.
        """
        if owner in self._owned:
            raise ValueError(f"sequence {owner} has its blocks already")
        if count > self.total - self.used:
            return None
        taken: list[Run] = []
        while count:
            fitting = [run for run in self._free if run[1] >= count]
            # The tightest run that fits; without one, the largest there is.
            run = min(fitting, key=lambda r: r[1]) if fitting else max(self._free, key=lambda r: r[1])
            self._free.remove(run)
            first, size = run
            used = min(size, count)
            if used < size:
                bisect.insort(self._free, (first + used, size - used))
            taken.append((first, used))
            count -= used
        self._owned[owner] = tuple(taken)
        return self._owned[owner]

    def free(self, owner: int) -> int:
        """Take back all blocks of the owner; how many. Raises `KeyError` when it has none."""
        runs = self._owned.pop(owner)
        merged: list[Run] = []
        for first, count in sorted([*self._free, *runs]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            else:
                merged.append((first, count))
        self._free = merged
        return sum(count for _, count in runs)
