"""Which KV blocks are free, in use or kept for what is in them. Pure; the driver's half of every stage's block table.

A block has as many references as sequences use it. One without references stays as it is while its content
has a key: a later prompt with the same beginning takes it up again, and the least recently used ones make
room when blocks run out. (Block-wise prefix reuse: PagedAttention, arXiv:2309.06180.)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "Run", "runs_of"]

Run = tuple[int, int]
"""(first block, count)"""


def runs_of(blocks: Iterable[int]) -> tuple[Run, ...]:
    """Blocks in order, as runs of neighbours."""
    runs: list[Run] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


class BlockPool:
    """Blocks 0..total-1."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: list[Run] = [(0, total)] if total else []  # sorted, never adjacent
        self._free_count = total
        self._references = [0] * total
        self._owned: dict[int, list[int]] = {}
        self._kept: dict[bytes, int] = {}
        """Block by the key of its content."""
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """Kept blocks without references, least recently used first."""

    @property
    def available(self) -> int:
        """Blocks that may be handed out: free ones and kept ones that nobody uses."""
        return self._free_count + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.total - self.available

    @property
    def kept(self) -> int:
        """Blocks whose content has a key."""
        return len(self._keys)

    @property
    def owners(self) -> frozenset[int]:
        return frozenset(self._owned)

    def blocks(self, owner: int) -> Sequence[int]:
        """In order of position; empty for one that has none."""
        return self._owned.get(owner, ())

    def references(self, block: int) -> int:
        return self._references[block]

    # -- content --------------------------------------------------------------------------------
    def find(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The kept blocks of the longest beginning of `keys`."""
        found = []
        for key in keys:
            block = self._kept.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these have no reference."""
        return sum(block in self._idle for block in blocks)

    def keep(self, block: int, key: bytes) -> None:
        """A referenced block is complete and will not change again: it can be found by `key`.

        Nothing happens when another block has that content already.
        """
        if not self._references[block]:
            raise ValueError(f"block {block} is nobody's")
        if key not in self._kept and block not in self._keys:
            self._kept[key], self._keys[block] = block, key

    def inherit(self, content: Iterable[tuple[bytes, int]]) -> None:
        """Free blocks that hold what these keys stand for, from an earlier pool over the same memory. Of those given together,
        a later one makes room first. Raises `ValueError` for a block that is not free."""
        for key, block in reversed(tuple(content)):
            if not 0 <= block < self.total or self._references[block] or block in self._keys:
                raise ValueError(f"block {block} is not free")
            if key not in self._kept:
                self._take(block, 1)
                self._kept[key], self._keys[block] = block, key
                self._idle[block] = None

    def forget(self) -> None:
        """No block that nobody has is found by its key any more."""
        for block in list(self._idle):
            self._forget(block)

    # -- owners ---------------------------------------------------------------------------------
    def share(self, owner: int, blocks: Sequence[int]) -> None:
        """Kept blocks as the first ones of a new owner. Raises `ValueError` for others, or an old owner."""
        if owner in self._owned or not all(block in self._keys for block in blocks):
            raise ValueError(f"sequence {owner} cannot begin with blocks {runs_of(blocks)}")
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] += 1
        self._owned[owner] = list(blocks)

    def extend(self, owner: int, count: int) -> tuple[Run, ...] | None:
        """`count` more blocks for an owner; None, and no change, when so many are not available.

        As few runs as there are to be had, each with room to grow where possible.
        """
        if count > self.available:
            return None
        while self._free_count < count:
            self._forget(next(iter(self._idle)))
        owned = self._owned.setdefault(owner, [])
        taken: list[int] = []
        while len(taken) < count:
            last = (taken or owned or [-1])[-1]
            first, size = self._place(count - len(taken), last + 1 if last >= 0 else None)
            self._take(first, size)
            taken += range(first, first + size)
        for block in taken:
            self._references[block] = 1
        owned += taken
        return runs_of(taken)

    def free(self, owner: int) -> None:
        """Take an owner's references back. Raises `KeyError` when it has none.

        Of its blocks that stay kept the last is the least recently used one: without those before it a block
        is of no use.
        """
        for block in reversed(self._owned.pop(owner)):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._release(block)

    # -- free runs ------------------------------------------------------------------------------
    def _forget(self, block: int) -> None:
        del self._idle[block], self._kept[self._keys.pop(block)]
        self._release(block)

    def _place(self, count: int, after: int | None) -> Run:
        """Where to take up to `count` blocks: behind block `after` - 1, or from the largest run."""
        if after is not None:
            at = bisect.bisect_left(self._free, (after, 0))
            if at < len(self._free) and self._free[at][0] == after:
                return after, min(count, self._free[at][1])
        first, size = max(self._free, key=lambda run: run[1])
        if first and self._references[first - 1]:
            # Its neighbour may grow: the half next to it is left to that one.
            start = max(first, min(first + size // 2, first + size - count))
            return start, min(count, first + size - start)
        return first, min(count, size)

    def _take(self, first: int, count: int) -> None:
        at = bisect.bisect_right(self._free, (first, self.total)) - 1
        start, size = self._free.pop(at)
        rest = ((start, first - start), (first + count, start + size - first - count))
        self._free[at:at] = [run for run in rest if run[1]]
        self._free_count -= count

    def _release(self, block: int) -> None:
        self._free_count += 1
        at = bisect.bisect_left(self._free, (block, 0))
        first, count = block, 1
        if at < len(self._free) and self._free[at][0] == block + 1:
            count += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == block:
            first, before = self._free.pop(at - 1)
            count, at = count + before, at - 1
        self._free.insert(at, (first, count))
