"""One stage's block table: executes what the driver decided, and notices when that contradicts what is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from p2pshard.errors import ProtocolError
from p2pshard.transport.frames import Deltas

__all__ = ["BlockTable"]


class BlockTable:
    """Which blocks each sequence has, how far they are filled, and the token ids that stand in them.

    Ids stand beside keys and values and are shared with them, so that the history of a sequence is known
    wherever its blocks came from.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._references: Counter[int] = Counter()
        self._full: set[int] = set()
        """Blocks of which every position was written since they were allocated."""
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._reached: dict[int, int] = {}
        """Positions of each sequence that are written, from 0 on."""
        self._ids = np.zeros((blocks, block_size), np.int32)

    def successor(self) -> BlockTable:
        """A table without sequences that has the same content."""
        blocks, size = self._ids.shape
        after = BlockTable(blocks, size)
        after._full, after._ids = set(self._full), self._ids.copy()
        return after

    def rows(self, blocks: Sequence[int]) -> np.ndarray:
        """int32 [blocks, block_size]: the tokens that stand in these. Raises `ProtocolError` unless all are complete."""
        if not self._full.issuperset(blocks):
            raise ProtocolError("a block that is not complete")
        return self._ids[np.array(blocks, np.int64)]

    def fill(self, blocks: Sequence[int], ids: np.ndarray) -> None:
        """These blocks, which no sequence has, are complete, with those tokens in them: int32 [blocks, block_size]."""
        self._ids[np.array(blocks, np.int64)] = ids
        self._full.update(blocks)

    @property
    def used(self) -> int:
        return len(self._references)

    @property
    def sequences(self) -> int:
        return len(self._blocks)

    def blocks(self, sequence: int) -> tuple[int, ...]:
        """Raises `ProtocolError` for a sequence that has none."""
        try:
            return self._blocks[sequence]
        except KeyError:
            raise ProtocolError(f"sequence {sequence} has no blocks here") from None

    def apply(self, deltas: Deltas) -> None:
        """Execute changes, but for the copies. Raises `ProtocolError` when one is impossible."""
        for sequence in deltas.free:
            self._drop(self.blocks(sequence))
            del self._blocks[sequence], self._reached[sequence]
        for sequence, kept in deltas.truncate:
            blocks = self.blocks(sequence)
            self._drop(blocks[kept:])
            self._blocks[sequence] = blocks[:kept]
            self._reached[sequence] = min(self._reached[sequence], kept * self._size)
        for source, target in deltas.copy:
            self._ids[target] = self._ids[source]
            (self._full.add if source in self._full else self._full.discard)(target)
        for sequence, runs in deltas.share:
            shared = tuple(_each(runs))
            if sequence in self._blocks:
                raise ProtocolError(f"sequence {sequence} is to begin with shared blocks and has some")
            if not self._full.issuperset(shared):
                raise ProtocolError(f"sequence {sequence} is to share blocks that are not complete")
            self._references.update(shared)
            self._blocks[sequence] = shared
            self._reached[sequence] = len(shared) * self._size
        for sequence, runs in deltas.allocate:
            new = tuple(_each(runs))
            if any(block in self._references for block in new):
                raise ProtocolError(f"sequence {sequence} is given blocks that another one has")
            self._references.update(new)
            self._full.difference_update(new)
            self._blocks[sequence] = self._blocks.get(sequence, ()) + new
            self._reached.setdefault(sequence, 0)

    def _drop(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]

    def write(self, sequence: int, start: int, ids: np.ndarray) -> None:
        """Note that these ids stand at `start` and after it; what stood beyond them counts no longer.

        Raises `ProtocolError` for a gap before them, for too few blocks and for a block that others read.
        """
        blocks, end = self.blocks(sequence), start + len(ids)
        if start > self._reached[sequence]:
            raise ProtocolError(f"its tokens before position {start} never came")
        first, last = start // self._size, -(-end // self._size)
        if last > len(blocks):
            raise ProtocolError(f"positions {start}-{end - 1} are not within its {len(blocks)} blocks")
        if any(self._references[block] > 1 for block in blocks[first:last]):
            raise ProtocolError(f"positions {start}-{end - 1} are in blocks that other sequences read")
        positions = np.arange(start, end)
        touched = np.array(blocks[first:last])
        self._ids[touched[positions // self._size - first], positions % self._size] = ids
        self._full.update(blocks[first : end // self._size])
        self._reached[sequence] = end

    def ids(self, sequence: int, end: int) -> np.ndarray:
        """int32 [end]: the tokens of a sequence's first positions."""
        blocks = self.blocks(sequence)[: -(-end // self._size)]
        return self._ids[np.array(blocks, np.int64)].reshape(-1)[:end]


def _each(runs: tuple[tuple[int, int], ...]) -> Iterator[int]:
    return (block for first, count in runs for block in range(first, first + count))
