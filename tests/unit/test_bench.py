"""`p2pshard bench`: figures from clocks, prompts that share nothing, and what is printed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pshard.bench import Figures, Round, Timeline, live
from p2pshard.bench.prompts import draw_prompts
from p2pshard.cli.app import invoke
from p2pshard.cli.output import console
from p2pshard.errors import InvalidRequest, StageLost
from p2pshard.trace import PhaseTrace, Spread, StageTrace, Trace
from tests.fake_node import PLAN, STATUS, FakeNode


# -- figures --------------------------------------------------------------------------------------
def test_a_rate_counts_only_while_all_streams_are_given_tokens() -> None:
    early = Timeline(0.0, (1.0, 1.5, 2.0, 2.5, 3.0))
    late = Timeline(0.0, (2.0, 3.0, 4.0, 5.0, 6.0))
    one = Round.of([early, late], prompt_tokens=10)
    # between 2 s and 3 s: two of the early stream's, one of the late one's
    assert one.tokens_per_second == pytest.approx(3.0)
    assert one.prefill_tokens_per_second == pytest.approx(20 / 2.0)
    assert one.overall_tokens_per_second == pytest.approx(10 / 6.0)


def test_streams_that_ran_one_after_another_have_no_common_rate() -> None:
    one = Round.of([Timeline(0.0, (1.0, 2.0)), Timeline(0.0, (3.0, 4.0))], prompt_tokens=1)
    assert one.tokens_per_second is None
    assert one.overall_tokens_per_second == pytest.approx(1.0)


def test_figures_take_medians_of_rates_and_spread_over_all_requests() -> None:
    def steady(period: float) -> list[Timeline]:
        return [Timeline(0.0, tuple(1.0 + period * i for i in range(11)))]

    figures = Figures.of([steady(0.1), steady(0.2), steady(1.0)], prompt_tokens=64)
    assert figures.streams == 1
    assert figures.tokens_per_second == pytest.approx(5.0)
    assert figures.prefill_tokens_per_second == pytest.approx(64.0)
    assert figures.ttft_ms == Spread(1000.0, 1000.0)
    assert figures.inter_token_ms.median == pytest.approx(200.0)
    assert figures.inter_token_ms.p95 == pytest.approx(1000.0)


@pytest.mark.parametrize("timelines", [[], [Timeline(0.0, (1.0,))]])
def test_a_round_without_two_tokens_is_refused(timelines: list[Timeline]) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        Round.of(timelines, prompt_tokens=1)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.lists(st.floats(0.001, 5), min_size=2, max_size=30)),
        min_size=1,
        max_size=8,
    )
)
def test_rates_are_of_tokens_that_came(streams: list[tuple[float, list[float]]]) -> None:
    timelines = []
    for began, gaps in streams:
        times, now = [], began
        for gap in gaps:
            now += gap
            times.append(now)
        timelines.append(Timeline(began, tuple(times)))
    one = Round.of(timelines, prompt_tokens=7)
    assert one.prefill_tokens_per_second > 0
    if one.tokens_per_second is not None:
        start = max(t.tokens[0] for t in timelines)
        end = min(t.tokens[-1] for t in timelines)
        assert one.tokens_per_second * (end - start) <= sum(len(t.tokens) - 1 for t in timelines) + 1e-6


# -- prompts --------------------------------------------------------------------------------------
@given(st.integers(0, 120), st.integers(1, 80), st.integers(0, 2**32))
def test_prompts_are_as_long_as_asked_and_share_no_prefix(count: int, length: int, seed: int) -> None:
    known = [5, 5, *range(10, 130)]
    prompts = draw_prompts(known, count, length, random.Random(seed))
    assert [len(p) for p in prompts] == [length] * count
    assert {i for p in prompts for i in p} <= set(known)
    assert len({p[0] for p in prompts}) == count


def test_more_prompts_than_ids_share_at_most_one_token() -> None:
    prompts = draw_prompts(range(12), 144, 20, random.Random(1))
    assert all(a[:2] != b[:2] for a, b in combinations(prompts, 2))
    with pytest.raises(InvalidRequest, match="145 different"):
        draw_prompts(range(12), 145, 20, random.Random(1))
    with pytest.raises(InvalidRequest):
        draw_prompts(range(12), 13, 1, random.Random(1))


def test_a_shared_prefix_is_all_but_the_end() -> None:
    prompts = draw_prompts(range(50), 40, 64, random.Random(1), shared_prefix=True)
    assert len({tuple(p[:62]) for p in prompts}) == 1
    assert len({p[-1] for p in prompts}) == 40
    assert all(len(p) == 64 for p in prompts)


# -- the command ----------------------------------------------------------------------------------
SPREAD = Spread(1.25, 20.0)
STAGES = tuple(
    StageTrace(SPREAD, Spread(40, 50), SPREAD, SPREAD, busy=0.875, bytes_per_token=1000.0 * i + 96)
    for i in range(3)
)
TRACE = Trace(7, False, PhaseTrace(96, 96, 1.5, Spread(90, 99), SPREAD, Spread(0.5, 0.75), STAGES), None)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    monkeypatch.setattr(live, "_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "_TRACE_S", 2.0)
    with FakeNode() as node:
        node.words = ["word "] * 8
        node.between_s = 0.002
        yield node


@pytest.fixture
def cli(node: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = invoke(["bench", "tiny", *arguments, "--node", node.address])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def trace_requests(node: FakeNode) -> None:
    """Let the node's trace be that of a new spell once a request of 8 tokens has come."""

    def status() -> dict[str, Any]:
        measured = any(getattr(r, "max_tokens", 0) == 8 for r in node.asked)
        value = copy.deepcopy(STATUS)
        value["deployments"][0]["trace"] = TRACE.to_json() | {"spell": 8 if measured else 7}
        return value

    node.status = status


def test_json_has_figures_edges_and_the_trace_of_these_rounds(cli: Any, node: FakeNode) -> None:
    trace_requests(node)
    code, out, err = cli("--streams", "2", "--prompt", "5", "--tokens", "8", "--rounds", "2", "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["plan"] == PLAN.to_json()
    assert (document["prompt_tokens"], document["tokens"], document["rounds"]) == (5, 8, 2)
    (row,) = document["results"]
    assert (row["streams"], len(row["rounds"])) == (2, 2)
    assert row["tokens_per_second"] > 0 and row["prefill_tokens_per_second"] > 0
    assert 2.0 <= row["inter_token_ms"]["median"] <= 50
    assert row["edges"] == [
        {"from": "id-a", "to": "id-b", "bytes_per_token": 1096.0},
        {"from": "id-b", "to": "id-c", "bytes_per_token": 2096.0},
        {"from": "id-c", "to": "id-a", "bytes_per_token": 96.0},
    ]
    assert row["trace"]["spell"] == 8


def test_requests_are_exactly_as_asked(cli: Any, node: FakeNode) -> None:
    code, _, err = cli(
        "--streams", "1,3", "--prompt", "5", "--tokens", "8", "--rounds", "2", "--dtype", "int8"
    )
    assert code == 0, err
    deploys = [r for r in node.asked if hasattr(r, "settings_json")]
    assert [json.loads(r.settings_json)["dtype"] for r in deploys] == ["int8"]
    requests = [r for r in node.asked if hasattr(r, "max_tokens") and r.max_tokens == 8]
    assert len(requests) == 2 * (1 + 3)
    assert all(r.ignore_eos and len(r.prompt_ids.ids) == 5 and not r.sampling.temperature for r in requests)
    assert not any(r.draft for r in requests)


def test_speculation_is_passed_on(cli: Any, node: FakeNode) -> None:
    code, out, err = cli("--streams", "1", "--tokens", "8", "--rounds", "1", "--speculation", "4", "--json")
    assert code == 0, err
    assert json.loads(out)["speculation"] == 4
    assert [r.draft for r in node.asked if getattr(r, "max_tokens", 0) == 8] == [4]
    for wrong in ("99", "always"):
        code, _, err = cli("--speculation", wrong)
        assert code == 2 and wrong in err


def test_tables_show_each_stage(cli: Any, node: FakeNode) -> None:
    trace_requests(node)
    code, out, err = cli("--streams", "1", "--tokens", "8", "--rounds", "1")
    assert code == 0, err
    for text in ("tokens/s", "88%", "40.0/50.0", "2,096", "wire 1.2/20.0 an edge"):
        assert text in out, text
    assert "1 stream:" in err


def test_tables_are_whole_on_a_console_of_80_columns(
    cli: Any, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 80)
    trace_requests(node)
    _, out, _ = cli("--streams", "1", "--tokens", "8", "--rounds", "1")
    for text in ("A decode step", "serialise", "B/token in", "40.0/50.0", "2,096"):
        assert text in out, text
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("streams", ["", "0", "1,x", "-1", "1,,2", "2000"])
def test_streams_that_are_no_counts_are_wrong_usage(cli: Any, node: FakeNode, streams: str) -> None:
    code, _, err = cli("--streams", streams)
    assert (code, node.asked) == (2, [])
    assert "1,8" in err


def test_what_the_plan_has_no_room_for_is_refused_before_anything_runs(cli: Any, node: FakeNode) -> None:
    code, _, err = cli("--prompt", "2040", "--tokens", "9", "--streams", "1")
    assert code == 1 and "2,049 tokens" in err
    code, _, err = cli("--prompt", "1000", "--tokens", "24", "--streams", "3")
    assert code == 2 and "192 KV blocks" in err and "has 128" in err
    assert not [r for r in node.asked if hasattr(r, "max_tokens")]


def test_a_lost_stage_is_the_error_of_the_whole(cli: Any, node: FakeNode) -> None:
    node.break_after, node.break_with = 3, StageLost("node b (layers 10-19) is gone", node="b")
    code, out, _ = cli("--json", "--tokens", "8")
    assert code == 1
    assert json.loads(out)["error"]["code"] == "stage_lost"


def test_an_answer_of_another_length_is_an_error(cli: Any) -> None:
    code, _, err = cli("--tokens", "9", "--streams", "1")
    assert code == 1
    assert "9 tokens ended with 8" in err
