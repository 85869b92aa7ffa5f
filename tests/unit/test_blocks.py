"""No block is lost, used twice by mistake or found under a key that is not its content's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from p2pshard_node.scheduling.blocks import BlockPool, runs_of
from p2pshard_node.scheduling.prefix import extend_keys

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model that knows who has which block and what was written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owned: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}
        """Key of what a block holds, for those that were completed and not handed out since."""
        self.owners = 0
        self.keys = 0

    @rule(count=st.integers(0, TOTAL + 1), kept=st.lists(st.integers(0, 30), max_size=4, unique=True))
    def begin(self, count: int, kept: list[int]) -> None:
        hits = self.pool.find(b"%d" % k for k in kept)
        assert [self.content[b] for b in hits] == [b"%d" % k for k in kept[: len(hits)]]
        self.owners += 1
        if hits:
            self.pool.share(self.owners, hits)
            self.owned[self.owners] = list(hits)
        self.extend(self.owners, count)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, count: int) -> None:
        self.extend(data.draw(st.sampled_from(sorted(self.owned))), count)

    def extend(self, owner: int, count: int) -> None:
        free = TOTAL - len({b for blocks in self.owned.values() for b in blocks})
        runs = self.pool.extend(owner, count)
        assert (runs is not None) == (count <= free)
        if runs is None:
            return
        new = [b for first, size in runs for b in range(first, first + size)]
        assert len(new) == count
        for blocks in self.owned.values():
            assert not set(blocks) & set(new), "handed out while in use"
        for block in new:
            self.content.pop(block, None)
        self.owned.setdefault(owner, []).extend(new)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({b for blocks in self.owned.values() for b in blocks})))
        key = b"%d" % data.draw(st.integers(0, 30))
        if block not in self.content and key not in self.content.values():
            self.content[block] = key
        self.pool.keep(block, key)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.free(owner)
        del self.owned[owner]

    @invariant()
    def accounts_agree(self) -> None:
        used = {b for blocks in self.owned.values() for b in blocks}
        assert self.pool.used == len(used) and self.pool.available == TOTAL - len(used)
        for owner, blocks in self.owned.items():
            assert list(self.pool.blocks(owner)) == blocks
        for block in range(TOTAL):
            assert self.pool.references(block) == sum(block in blocks for blocks in self.owned.values())
        assert self.pool.kept == len(self.content)
        for block, key in self.content.items():
            assert self.pool.find([key]) == (block,)
        free = sorted(set(range(TOTAL)) - used - set(self.content))
        assert tuple(self.pool._free) == runs_of(free)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_least_recently_used_goes_first_and_a_tail_before_its_beginning() -> None:
    pool = BlockPool(6)
    for owner, name in ((1, b"a"), (2, b"b")):
        pool.extend(owner, 3)
        for i, block in enumerate(pool.blocks(owner)):
            pool.keep(block, name + b"%d" % i)
    pool.free(1)
    pool.free(2)
    assert pool.used == 0 and pool.kept == 6
    a = pool.find([b"a0", b"a1", b"a2"])
    assert len(a) == 3
    pool.share(3, a)  # used again: now b is the older one
    pool.free(3)
    pool.extend(4, 2)
    assert len(pool.find([b"b0", b"b1", b"b2"])) == 1
    pool.extend(4, 2)
    assert pool.find([b"b0"]) == () and len(pool.find([b"a0", b"a1", b"a2"])) == 2


def test_two_that_grow_keep_one_run_each() -> None:
    pool = BlockPool(32)
    for owner in (1, 2):
        pool.extend(owner, 3)
    for _ in range(10):
        for owner in (1, 2):
            pool.extend(owner, 1)
    assert all(len(runs_of(pool.blocks(owner))) == 1 for owner in (1, 2))


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(KeyError):
        pool.free(2)
    with pytest.raises(ValueError, match="cannot begin"):
        pool.share(1, [0])
    with pytest.raises(ValueError, match="nobody"):
        pool.keep(0, b"k")
    assert pool.extend(1, 3) is None and pool.owners == frozenset()


@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=24), st.lists(st.integers(0, 3), min_size=8, max_size=24)
)
def test_keys_are_equal_exactly_as_far_as_the_beginnings_are(a: list[int], b: list[int]) -> None:
    chains = []
    for ids in (a, b):
        keys: list[bytes] = []
        extend_keys(keys, ids, 4, 1, b"root")
        extend_keys(keys, ids, 4, len(ids) // 4, b"root")  # in two steps as in one
        chains.append(keys)
    for index, (x, y) in enumerate(zip(*chains, strict=False)):
        assert (x == y) == (a[: 4 * index + 4] == b[: 4 * index + 4])
    other: list[bytes] = []
    extend_keys(other, a, 4, 1, b"another model")
    assert other[0] != chains[0][0]


def test_a_pool_begins_with_what_an_earlier_one_left_and_can_forget_it() -> None:
    pool = BlockPool(8)
    keys = [bytes([i]) for i in range(4)]
    pool.inherit(zip(keys, (5, 2, 7, 0), strict=True))
    assert pool.find(keys) == (5, 2, 7, 0) and (pool.used, pool.available, pool.kept) == (0, 8, 4)
    pool.share(1, (5, 2))
    assert pool.extend(1, 4) is not None, "free ones"
    assert pool.find(keys) == (5, 2, 7, 0)
    assert pool.extend(2, 1) == ((0, 1),), "of those that nobody uses the last makes room first"
    assert pool.find(keys) == (5, 2, 7)
    pool.forget()
    assert pool.find(keys) == (5, 2), "what is in use stays"
    pool.free(1)
    pool.free(2)
    pool.forget()
    assert (pool.kept, pool.available) == (0, 8) and pool.extend(3, 8) == ((0, 8),)


@pytest.mark.parametrize("block", [-1, 8, 5])
def test_what_is_not_free_is_not_inherited(block: int) -> None:
    pool = BlockPool(8)
    pool.inherit([(b"a", 5)])
    with pytest.raises(ValueError, match="not free"):
        pool.inherit([(b"b", block)])
    pool.inherit([(b"a", 6)])  # a content that is there already
    assert pool.find([b"a"]) == (5,) and pool.kept == 1
