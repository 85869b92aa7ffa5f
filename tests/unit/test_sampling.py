"""The sampler against a plain reference, and the laws it promises."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from p2pshard_node.engine.sampling import Draw, Sampled, sample, sample_rows, uniform

from p2pshard.errors import Internal, InvalidRequest
from p2pshard.sampling import SamplingParams

# few distinct values, so that ties are common
logit_rows = st.lists(
    st.one_of(st.sampled_from([-3.0, 0.0, 1.5, 2.0, -math.inf]), st.floats(-30, 30, width=32)),
    min_size=1,
    max_size=40,
).filter(lambda row: any(math.isfinite(x) for x in row))
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0, 100.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([-1, 0, 5, 20]),
)


def reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], index: int
) -> int:
    """The documented steps, one token at a time."""
    values = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        if params.repetition_penalty != 1:
            value = values[token]
            values[token] = (
                value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            )
    for token in set(output):
        values[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.temperature == 0:
        return ranked[0]
    top = values[ranked[0]]
    weight = [math.exp((v - top) / params.temperature) for v in values]
    ranked.sort(key=lambda i: (-weight[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total, reached, kept = math.fsum(weight[i] for i in ranked), 0.0, []
        for token in ranked:
            kept.append(token)
            reached += weight[token]
            assume(abs(reached - params.top_p * total) > 1e-12 * total)  # else two ways to add may differ
            if reached >= params.top_p * total:
                break
        ranked = kept
    ranked = sorted(i for i in ranked if params.min_p == 0 or weight[i] >= params.min_p)
    target, reached = uniform(params.seed, index) * math.fsum(weight[i] for i in ranked), 0.0
    for token in ranked:
        reached += weight[token]
        assume(abs(reached - target) > 1e-12)
        if reached > target:
            return token
    return [i for i in ranked if weight[i]][-1]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), logits=logit_rows, params=all_params)
def test_equals_the_plain_reference(data: st.DataObject, logits: list[float], params: SamplingParams) -> None:
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=8)
    prompt, output = data.draw(ids), data.draw(ids)
    row = np.array(logits, np.float32)
    before = row.copy()
    found = sample(row, params, prompt, output, len(output))
    assert found.id == reference(row.tolist(), params, prompt, output, len(output))
    assert np.array_equal(row, before), "the logits were changed"
    if params.logprobs < 0:
        assert (found.logprob, found.top) == (0.0, ())
    else:
        finite = [x for x in row.tolist() if math.isfinite(x)]
        shift = max(finite) + math.log(math.fsum(math.exp(x - max(finite)) for x in finite))
        assert found.logprob == pytest.approx(float(row[found.id]) - shift, abs=1e-9)
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[: params.logprobs]
        assert [i for i, _ in found.top] == best


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 7, 600, 3000]),
    many=st.lists(all_params, min_size=1, max_size=8),
    spread=st.sampled_from([0.01, 3.0, 40.0]),
    bad=st.sampled_from([None, math.nan, math.inf]),
)
def test_rows_together_equal_each_row_alone(
    seed: int, size: int, many: list[SamplingParams], spread: float, bad: float | None
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, spread, (len(many), size)).round(1).astype(np.float32)
    if bad is not None:
        rows[0, rng.integers(size)] = bad
    before = rows.copy()
    draws = [
        Draw(params, rng.integers(0, size, 9), rng.integers(0, size, 5).tolist(), 5 + i)
        for i, params in enumerate(many)
    ]
    for row, draw, got in zip(rows, draws, sample_rows(rows, draws), strict=True):
        try:
            want = sample(row, draw.params, draw.prompt_ids, draw.output_ids, draw.index)
        except Internal as error:
            assert isinstance(got, Internal) and got.message == error.message
            assert bad is not None and not np.isfinite(row).all()
        else:
            assert got == want and isinstance(got, Sampled)
    assert np.array_equal(rows, before, equal_nan=True), "the logits were changed"
    with pytest.raises(Internal):
        sample_rows(rows, draws[1:])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 0.999999, 1 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [0, 50])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(top_p: float, spread: float, top_k: int) -> None:
    row = np.random.default_rng(3).normal(0, spread, 20_000).round(2).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k, seed=1)
    weights = np.exp((row.astype(np.float64) - float(row.max())) / 0.9)
    order = np.argsort(-weights, kind="stable")[: top_k or None]
    # The sum is taken in the order of ids, as the definition has it.
    reached = np.cumsum(weights[order]) >= top_p * weights[np.sort(order)].sum()
    kept = np.sort(order[: int(np.argmax(reached)) + 1 if reached.any() else len(order)])
    cumulative = np.cumsum(weights[kept])
    for index in range(20):
        want = kept[np.searchsorted(cumulative, uniform(1, index) * cumulative[-1], side="right")]
        assert sample(row, params, [], [], index).id == want


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = np.array([1, 5, 5, 0, 5], np.float32)
    assert sample(row, SamplingParams(), [], [], 0).id == 1
    assert sample(row, SamplingParams(temperature=1.0, top_k=1, seed=7), [], [], 3).id == 1


def test_top_p_takes_no_more_than_it_needs() -> None:
    row = np.zeros(4, np.float32)  # a quarter each
    half = SamplingParams(temperature=1.0, top_p=0.5, seed=5)
    assert {sample(row, half, [], [], i).id for i in range(200)} == {0, 1}


def test_the_random_number_is_pinned() -> None:
    """A change of it would change every seeded answer, and must be seen."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**64 - 1, 5), uniform(0, 0, 1)] == [
        0.6565684332685667,
        0.5449923961942581,
        0.575830427209952,
        0.9148016059575608,
        0.3768429477609545,
    ]


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    with np.errstate(divide="ignore"):
        row = np.log(probabilities).astype(np.float32)
    draws = 20_000
    ids = [sample(row, SamplingParams(temperature=1.0, seed=3), [], [], i).id for i in range(draws)]
    counts = np.bincount(ids, minlength=5)
    assert counts[1] == 0
    expected = probabilities * draws
    chi_squared = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    assert chi_squared < 21.1  # 3 degrees of freedom: one in 10,000


def test_history_does_not_move_the_random_number() -> None:
    row = np.linspace(0, 1, 100, dtype=np.float32)
    params = SamplingParams(temperature=1.0, seed=11)
    resumed = [sample(row, params, [1, 2], list(range(i)), i).id for i in range(20)]
    assert resumed == [sample(row, params, [], [], i).id for i in range(20)]
    assert len(set(resumed)) > 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_an_internal_error(bad: float, temperature: float) -> None:
    row = np.zeros(10, np.float32)
    row[4] = bad
    with pytest.raises(Internal, match="output index 6"):
        sample(row, SamplingParams(temperature=temperature), [], [], 6)


def test_nothing_to_choose_from_is_an_internal_error() -> None:
    with pytest.raises(Internal, match="no finite"):
        sample(np.full(4, -math.inf, np.float32), SamplingParams(), [], [], 0)
    with pytest.raises(Internal):
        sample(np.zeros((2, 4), np.float32), SamplingParams(), [], [], 0)


def test_history_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="vocabulary of 4"):
        sample(np.zeros(4, np.float32), SamplingParams(repetition_penalty=1.1), [4], [], 0)


def test_fast_at_a_large_vocabulary() -> None:
    """At 152k tokens a draw costs a few milliseconds; a full sort in Python would cost hundreds."""
    row = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    hard = SamplingParams(temperature=1.0, top_p=0.95, min_p=0.01, repetition_penalty=1.1, logprobs=20)
    for params, limit in ((SamplingParams(), 0.01), (hard, 0.1)):
        best = math.inf
        for index in range(5):
            start = time.perf_counter()
            sample(row, params, [1, 2, 3], [4], index)
            best = min(best, time.perf_counter() - start)
        assert best < limit, f"{best * 1000:.1f} ms"
