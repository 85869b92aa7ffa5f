"""Drafts repeat what the text has, and stop where that does not pay."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.scheduling.drafting import Drafter

from p2pshard.errors import InvalidRequest
from p2pshard.speculation import ADAPTIVE, MAX_DRAFT, check_draft, draft_of


def test_what_followed_the_last_time_is_proposed() -> None:
    drafter = Drafter(4)
    ids = [1, 2, 3, 40, 41, 42, 43, 44, 9, 1, 2, 3]
    assert drafter.draft(ids, 10) == (40, 41, 42, 43)
    assert drafter.draft(ids, 2) == (40, 41)
    assert drafter.draft([*ids, 7], 4) == ()
    # The latest occurrence counts.
    assert drafter.draft([*ids, 7, 1, 2, 3], 2) == (7, 1)


def test_a_short_period_goes_on() -> None:
    assert Drafter(7).draft([5, 1, 2, 1, 2, 1], 7) == (2, 1, 2, 1, 2, 1, 2)
    assert Drafter(5).draft([8, 8, 8, 8], 5) == (8, 8, 8, 8, 8)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, MAX_DRAFT), st.data())
def test_the_same_whether_read_at_once_or_bit_by_bit(
    ids: list[int], length: int, data: st.DataObject
) -> None:
    bit = Drafter(length)
    for end in sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8))):
        bit.draft(ids[:end], 1)
    whole = Drafter(length).draft(ids, MAX_DRAFT)
    assert bit.draft(ids, MAX_DRAFT) == whole and len(whole) <= length
    places = [i for i in range(len(ids) - 3) if ids[i : i + 3] == ids[-3:]]
    assert bool(whole) == bool(places)
    if places:
        assert whole[0] == ids[places[-1] + 3]


def test_right_drafts_grow_and_wrong_ones_shrink() -> None:
    drafter, ids = Drafter(ADAPTIVE), [1, 2] * 40
    lengths = []
    for _ in range(4):
        draft = drafter.draft(ids, 99)
        lengths.append(len(draft))
        drafter.judge(len(draft), len(draft), len(ids))
    assert lengths == [2, 4, 8, 16]
    drafter.judge(16, 2, len(ids))
    assert len(drafter.draft(ids, 99)) == 3


def test_text_that_does_not_repeat_costs_few_wrong_tokens() -> None:
    """Two letters in random order: every three of them have been there before, and what follows is a guess."""
    rng = random.Random(2)
    drafter, ids, drafted = Drafter(ADAPTIVE), [0, 1, 0], 0
    for _ in range(2000):
        draft = drafter.draft(ids, 16)
        ids.append(rng.randrange(50) + 2)
        ids += [0, 1, 0]
        accepted = int(bool(draft) and draft[0] == ids[-4])
        drafted += len(draft)
        drafter.judge(len(draft), accepted, len(ids))
    assert drafted < 0.02 * len(ids)


def test_settings() -> None:
    assert [draft_of(s) for s in ("off", "adaptive", 1, 16)] == [0, -1, 1, 16]
    assert [check_draft(d) for d in (0, -1, 1, 16)] == [0, -1, 1, 16]


@pytest.mark.parametrize("bad", ["on", "4", "", 17, -2, True, 1.5, None])
def test_other_settings_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="off, adaptive or a number"):
        draft_of(bad)
