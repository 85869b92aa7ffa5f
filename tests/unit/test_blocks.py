"""No block is lost or owned twice, whatever is allocated and freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.scheduling.blocks import BlockAllocator


def owned(allocator: BlockAllocator) -> list[int]:
    return [
        b for o in allocator.owners for first, count in allocator.runs(o) for b in range(first, first + count)
    ]


@given(
    st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 12)), max_size=80)
)
def test_accounting_is_exact(total: int, operations: list[tuple[bool, int, int]]) -> None:
    allocator = BlockAllocator(total)
    sizes: dict[int, int] = {}
    for take, owner, count in operations:
        if take and owner not in sizes:
            fits = count <= total - sum(sizes.values())
            runs = allocator.allocate(owner, count)
            assert (runs is not None) == fits
            if fits:
                sizes[owner] = count
        elif owner in sizes:
            assert allocator.free(owner) == sizes.pop(owner)
        blocks = owned(allocator)
        assert len(set(blocks)) == len(blocks) == sum(sizes.values()) == allocator.used
        assert all(0 <= b < total for b in blocks)
    for owner in list(sizes):
        allocator.free(owner)
    assert allocator.used == 0
    assert allocator.allocate(99, total) == ((0, total),)  # all merged again


def test_prefers_one_run_and_the_tightest() -> None:
    allocator = BlockAllocator(10)
    for owner, count in ((1, 4), (2, 1), (3, 2), (4, 3)):
        allocator.allocate(owner, count)
    allocator.free(1)
    allocator.free(3)
    assert allocator.allocate(5, 2) == ((5, 2),)
    assert allocator.allocate(6, 3) == ((0, 3),)
    allocator.free(2)
    assert allocator.allocate(7, 2) == ((3, 2),)


def test_misuse_is_an_error() -> None:
    allocator = BlockAllocator(2)
    allocator.allocate(1, 1)
    with pytest.raises(ValueError, match="already"):
        allocator.allocate(1, 1)
    with pytest.raises(KeyError):
        allocator.free(2)
