"""The stage's block table takes what the driver may decide, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from p2pshard_node.worker.table import BlockTable

from p2pshard.errors import ProtocolError
from p2pshard.transport.frames import Deltas


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def table() -> BlockTable:
    """Sequence 1 with seven tokens in blocks 3, 4 and 1 of two positions each, the last one half full."""
    made = BlockTable(8, 2)
    made.apply(Deltas(allocate=((1, ((3, 2),)),)))
    made.write(1, 0, ids(10, 11, 12))
    made.apply(Deltas(allocate=((1, ((1, 2),)),)))
    made.write(1, 3, ids(13, 14, 15, 16))
    return made


def test_ids_stand_in_the_blocks(table: BlockTable) -> None:
    assert table.blocks(1) == (3, 4, 1, 2) and table.used == 4
    assert table.ids(1, 7).tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert table.ids(1, 3).tolist() == [10, 11, 12] and table.ids(1, 0).size == 0


def test_a_shared_block_brings_its_ids_and_outlives_its_first_owner(table: BlockTable) -> None:
    table.apply(Deltas(share=((2, ((3, 2),)), (3, ((3, 1),))), allocate=((2, ((7, 1),)),)))
    table.write(2, 4, ids(50))
    assert table.ids(2, 5).tolist() == [10, 11, 12, 13, 50]
    table.apply(Deltas(free=(1,)))
    assert table.used == 3 and table.sequences == 2
    with pytest.raises(ProtocolError, match="another one has"):
        table.apply(Deltas(allocate=((4, ((4, 1),)),)))
    table.apply(Deltas(free=(2, 3)))
    assert table.used == 0
    # Nobody's, and still complete: it may be shared again until it is handed out.
    table.apply(Deltas(share=((5, ((3, 2),)),)))
    assert table.ids(5, 4).tolist() == [10, 11, 12, 13]
    table.apply(Deltas(free=(5,), allocate=((6, ((3, 1),)),)))
    with pytest.raises(ProtocolError, match="not complete"):
        table.apply(Deltas(share=((7, ((3, 1),)),)))


def test_what_was_rejected_is_written_over(table: BlockTable) -> None:
    table.write(1, 4, ids(60, 61))
    assert table.ids(1, 6).tolist() == [10, 11, 12, 13, 60, 61]
    with pytest.raises(ProtocolError, match="never came"):
        table.write(1, 7, ids(1))


def test_copied_blocks_bring_their_ids(table: BlockTable) -> None:
    table.apply(Deltas(copy=((3, 6), (2, 5))))
    table.apply(Deltas(share=((2, ((6, 1),)),)))
    assert table.ids(2, 2).tolist() == [10, 11]
    with pytest.raises(ProtocolError, match="not complete"):
        table.apply(Deltas(share=((3, ((5, 1),)),)))


@pytest.mark.parametrize(
    ("deltas", "why"),
    [
        (Deltas(free=(9,)), "no blocks here"),
        (Deltas(truncate=((9, 1),)), "no blocks here"),
        (Deltas(allocate=((2, ((4, 1),)),)), "another one has"),
        (Deltas(share=((1, ((3, 1),)),)), "has some"),
        (Deltas(share=((2, ((2, 1),)),)), "not complete"),
        (Deltas(share=((2, ((6, 1),)),)), "not complete"),
    ],
)
def test_contradictions_are_refused(table: BlockTable, deltas: Deltas, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        table.apply(deltas)


def test_rows_without_a_place_are_refused(table: BlockTable) -> None:
    table.apply(Deltas(share=((2, ((3, 2),)),)))
    for sequence, start, why in (
        (9, 0, "no blocks"),
        (1, 8, "never came"),
        (1, 3, "other sequences read"),
        (2, 4, "not within"),
    ):
        with pytest.raises(ProtocolError, match=why):
            table.write(sequence, start, ids(1))
    table.apply(Deltas(free=(2,)))
    table.write(1, 3, ids(1))


def test_truncated_blocks_are_free(table: BlockTable) -> None:
    table.apply(Deltas(truncate=((1, 1),)))
    assert table.blocks(1) == (3,) and table.used == 1
    with pytest.raises(ProtocolError, match="never came"):
        table.write(1, 3, ids(1))


def test_a_table_follows_another_with_its_content_and_none_of_its_sequences() -> None:
    table = BlockTable(8, 4)
    table.apply(Deltas(allocate=((1, ((2, 3),)),)))
    table.write(1, 0, np.arange(10, dtype=np.int32))
    after = table.successor()
    assert (after.sequences, after.used) == (0, 0)
    after.apply(Deltas(share=((7, ((2, 2),)),)))
    assert after.ids(7, 8).tolist() == list(range(8))
    with pytest.raises(ProtocolError, match="not complete"):
        after.apply(Deltas(share=((8, ((4, 1),)),)))
    with pytest.raises(ProtocolError, match="not complete"):
        table.rows([2, 4])
    other = BlockTable(8, 4)
    other.fill([2, 3], table.rows([2, 3]))
    other.apply(Deltas(share=((7, ((2, 2),)),)))
    assert other.ids(7, 8).tolist() == list(range(8))
    table.write(1, 4, np.array([9], np.int32))
    assert after.ids(7, 8).tolist() == list(range(8)), "a copy"
