"""Drafts repeat what the text has, and stop where that does not pay."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.scheduling import drafting
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
    assert lengths == [1, 3, 3, 7]
    assert [len(drafter.draft(ids, most)) for most in (0, 1, 2, 3, 6, 7)] == [0, 1, 1, 3, 3, 7]
    drafter.judge(7, 2, len(ids))
    assert len(drafter.draft(ids, 99)) == 3
    for _ in range(4):
        drafter.judge(3, 0, len(ids))
    assert len(drafter.draft(ids, 99)) == 1


def test_drafts_rest_where_they_do_not_pay_and_come_back_where_they_do() -> None:
    drafter, ids = Drafter(ADAPTIVE), [8] * 10
    tries = []
    for length in range(len(ids), 1000):
        ids.append(8)
        if drafter.draft(ids, 99):
            tries.append(length)
            drafter.judge(1, 0, len(ids))
    rests = [b - a for a, b in pairwise(tries)]
    assert rests == sorted(rests) and rests[0] == 1 and rests[-1] == 256 and len(tries) < 15
    ids += [8] * 256
    assert len(drafter.draft(ids, 99)) == 1
    drafter.judge(1, 1, len(ids))
    assert len(drafter.draft(ids, 99)) == 3


class Cost:
    """Of a step by its rows, in steps of one token: a small and a large 4-bit model on one core."""

    SMALL = (1.0, 1.2, 1.5, 1.55, 1.9, 2.1, 2.3, 2.5)
    LARGE = (1.0, 1.3, 2.1, 2.0, 3.0, 3.3, 3.9, 3.7)


def gain(prompt: str, answer: str, cost: tuple[float, ...], length: int = ADAPTIVE) -> float:
    """Tokens (here: words) per step's time, against one at a time."""
    words: dict[str, int] = {}
    ids, right = (
        [words.setdefault(w, len(words)) for w in re.findall(r"\w+|\s|.", t)] for t in (prompt, answer)
    )
    drafter, done, spent = Drafter(length), 0, 0.0
    while done < len(right):
        draft = drafter.draft(ids, len(cost) - 1)
        accepted = 0
        while accepted < min(len(draft), len(right) - done - 1) and draft[accepted] == right[done + accepted]:
            accepted += 1
        spent += cost[len(draft)]
        ids += right[done : done + accepted + 1]
        done += accepted + 1
        drafter.judge(len(draft), accepted, len(ids))
    return len(right) / spent


@pytest.mark.parametrize(("cost", "least"), [(Cost.SMALL, 1.7), (Cost.LARGE, 1.35)])
def test_a_text_that_is_edited_gains_more_than_with_any_fixed_length(
    cost: tuple[float, ...], least: float
) -> None:
    code = Path(drafting.__file__).read_text()
    edited = code.replace("draft", "guess").replace("length", "size")
    adaptive = gain(code, edited, cost)
    assert adaptive > least
    assert adaptive > 0.95 * max(gain(code, edited, cost, n) for n in range(1, 8))


@pytest.mark.parametrize("cost", [Cost.SMALL, Cost.LARGE])
def test_a_text_that_is_new_loses_nothing(cost: tuple[float, ...]) -> None:
    text = (Path(__file__).parents[2] / "docs/ARCHITECTURE.md").read_text()
    rng = random.Random(2)
    noise = " ".join(rng.choice("abcdef") for _ in range(2000))
    for new in (text[2000:12000], noise):
        assert gain(text[:500], new, cost) > 0.98


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
