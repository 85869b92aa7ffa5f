"""Threads change how long the fused kernels take, never a bit of what they give; between steps they sleep."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.engine.fused import team as team_module
from p2pshard_node.engine.fused.pace import Pace
from p2pshard_node.engine.fused.team import Team, Work, team
from p2pshard_node.engine.quant import Int8Linear
from p2pshard_node.engine.stage import Row, StageModel

from tests.unit.engine_helpers import DirectoryWeights, load, reference, run, step, tokens

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "gemma3_text": {"sliding_window": 24, "final_logit_softcapping": 20.0},
}
BASE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


@pytest.fixture(autouse=True)
def every_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models are worth all threads, in every call; torch's number is put back."""
    before = torch.get_num_threads()
    monkeypatch.setattr(Work, "ranks", property(lambda self: 1 << 10))
    monkeypatch.setattr(Pace, "took", lambda self, seconds: None)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    config = {**BASE, **FAMILIES[request.param], "model_type": request.param}
    path = tmp_path_factory.mktemp(request.param)
    model = reference(config)
    model.save_pretrained(path)
    return path, config


def stage(folder: tuple[Path, dict[str, Any]], threads: int, **changes: Any) -> StageModel:
    torch.set_num_threads(threads)
    path, config = folder
    settings = {"dtype": "int8", "blocks": 48, "block_size": 16, **changes}
    model = load(DirectoryWeights(path), config, (0, 2), 3, **settings)
    assert model.kernels.startswith("fused") and model.numerics == "invariant"
    return model


def outputs(model: StageModel) -> list[np.ndarray]:
    """Prefill of one prompt, decoding, a batch of prompts and of single tokens, and all tokens' logits."""
    ids = tokens(150, 331)
    found = [run([model], ids, 150, tuple(range(12))), run([model], ids[:20], 1, tuple(range(12)))]
    prompts = [tokens(9 * i + 1, 331, seed=i) for i in range(8)]
    tables = [tuple(range(5 * i, 5 * i + 5)) for i in range(8)]
    rows = [Row(i, 0, len(p), t, "verify") for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    found.append(step([model], rows, [i for p in prompts for i in p]))
    rows = [Row(i, len(p), 1, t, "sample") for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    found.append(step([model], rows, [7] * 8))
    return found


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("kernels-")]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bits_do_not_depend_on_threads(folder: tuple[Path, dict[str, Any]], dtype: str) -> None:
    before = set(helpers())
    one = stage(folder, 1, dtype=dtype)
    assert not set(helpers()) - before
    want = outputs(one)
    for threads in (2, 3, 4):
        several = stage(folder, threads, dtype=dtype)
        assert several._fused._team.threads == threads and several.fingerprint == one.fingerprint
        for a, b in zip(want, outputs(several), strict=True):
            np.testing.assert_array_equal(a, b)


def test_bits_over_blocks_that_break_up_keys(folder: tuple[Path, dict[str, Any]]) -> None:
    """Every thread copies keys for itself where blocks hold fewer than sixteen tokens."""
    ids, pool = tokens(40, 331), {"block_size": 4, "blocks": 48}
    one, several = (stage(folder, threads, **pool) for threads in (1, 3))
    for chunk in (40, 1):
        want, got = (run([model], ids, chunk, tuple(range(48))) for model in (one, several))
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("two_rows", [False, True])
def test_linear_layers_alone(two_rows: bool) -> None:
    weight, x = torch.randn(331, 192), torch.randn(70, 192)
    torch.set_num_threads(3)
    layer = Int8Linear(lambda a, b: weight[a:b], 331, 192, None, two_rows=two_rows)
    for _ in range(20):
        assert torch.equal(layer(x), layer.reference(x))
    x[69, 3] = float("inf")  # found by whichever thread has the row
    assert layer(x).isnan().all()
    x[69, 3] = 0
    assert torch.equal(layer(x), layer.reference(x))


def test_threads_end_with_their_stage(folder: tuple[Path, dict[str, Any]]) -> None:
    model = stage(folder, 7)
    mine = list(model._fused._team._helpers)
    assert len(mine) == 6 and all(helper.is_alive() for helper in mine)
    del model
    gc.collect()
    for helper in mine:
        helper.join(5)
    assert not any(helper.is_alive() for helper in mine)


def test_one_team_of_a_size_and_close() -> None:
    first = team(5)
    assert team(5) is first
    mine = first._helpers
    first.close()
    assert not any(helper.is_alive() for helper in mine)
    assert first.threads == 1
    assert team(5) is not first
    assert first.call(Work(1 << 30, 1, 1), lambda crew, x: (crew.ranks, x), 7) == (1, 7)


def test_two_callers_at_once(folder: tuple[Path, dict[str, Any]]) -> None:
    """Two stages that share a team, driven from two threads: one of them goes alone, both are right."""
    models = [stage(folder, 3), stage(folder, 3)]
    want = outputs(models[0])
    failures: list[BaseException] = []

    def drive(model: StageModel) -> None:
        try:
            for _ in range(5):
                for a, b in zip(want, outputs(model), strict=True):
                    np.testing.assert_array_equal(a, b)
        except BaseException as error:
            failures.append(error)

    drivers = [threading.Thread(target=drive, args=(m,)) for m in models]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(120)
        assert not driver.is_alive()
    assert not failures


def test_a_kernel_that_raises_leaves_the_team_usable(
    folder: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    model = stage(folder, 3)
    crew = model._fused._team
    want = outputs(model)

    def raises(crew: Any) -> None:
        raise ValueError(f"rank {crew.rank}")

    def raises_elsewhere(crew: Any) -> int:
        if crew.rank:
            raise ValueError("a helper")
        return 5

    with pytest.raises(ValueError, match="rank 0"):
        crew.call(Work(1, 1, 1), raises)
    assert crew.call(Work(1, 1, 1), raises_elsewhere) == 5
    for a, b in zip(want, outputs(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(helper.is_alive() for helper in crew._helpers)


def test_threads_sleep_between_steps(folder: tuple[Path, dict[str, Any]]) -> None:
    model = stage(folder, 4)
    outputs(model)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_many_steps_on_busy_cores(folder: tuple[Path, dict[str, Any]]) -> None:
    """Four threads beside a process that never sleeps for each core: every step ends, with the same bits."""
    model = stage(folder, 4)
    ids = tokens(12, 331)
    want = run([model], ids, 12, (0,))
    load_ = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(2000):
            np.testing.assert_array_equal(step([model], [Row(1, 11, 1, (0,), "logits")], ids[-1:]), want)
    finally:
        for process in load_:
            process.kill()
            process.wait()


def test_a_process_ends_with_threads_asleep() -> None:
    code = "from p2pshard_node.engine.fused.team import team; t = team(4); print(len(t._helpers))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")


# -- pace -----------------------------------------------------------------------------------------
def settle(pace: Pace, cost: dict[int, float], calls: int) -> list[int]:
    used = []
    for _ in range(calls):
        used.append(pace.ranks)
        REAL_TOOK(pace, cost[pace.ranks])
    return used


REAL_TOOK = Pace.took


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_pace_finds_the_best_of_a_valley(most: int, random: Any) -> None:
    choices = sorted({most, *(1 << i for i in range(most.bit_length()))})
    best = random.choice(choices)
    cost = {c: 1.3 ** abs(choices.index(c) - choices.index(best)) for c in choices}
    used = settle(Pace(most), cost, 600)
    assert used[0] == most and set(used) <= set(choices)
    assert used[-100:].count(best) > 90


def test_pace_follows_a_change_at_once() -> None:
    pace = Pace(2)
    assert settle(pace, {1: 2.0, 2: 1.1}, 4000).count(1) < 4000 * 0.02
    # it tries the other number a few times more: 3 calls of the next 11, then of 19, 35, ...
    assert settle(pace, {1: 4.0, 2: 10.0}, 40)[10:].count(1) >= 20
    assert settle(pace, {1: 2.0, 2: 1.1}, 400)[100:].count(2) > 270


def test_small_calls_are_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    crew = Team(4)
    seen: list[int] = []
    for weights, rows, layers in ((1 << 20, 1, 1), (1 << 22, 1, 64), (1 << 26, 1, 8)):
        crew.call(Work(weights, layers, rows), lambda c: seen.append(c.rank if c.ranks == 1 else c.ranks))
    assert seen[:2] == [0, 0] and 4 in seen[2:]
    crew.close()
    assert team_module.team(1).threads == 1
