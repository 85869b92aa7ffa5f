"""The fused layers give the plain modules' numbers, and the same bits whatever is computed beside a row."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from p2pshard_node.engine import stage as stage_module
from p2pshard_node.engine.fused import vectors
from p2pshard_node.engine.fused.maths import exp, rotation
from p2pshard_node.engine.fused.structure import Unrecognised
from p2pshard_node.engine.fused.vectors import LANES
from p2pshard_node.engine.stage import Row, StageModel, StepBatch

from p2pshard.errors import Internal
from tests.unit.engine_helpers import DirectoryWeights, expected, load, reference, run, split, step, tokens

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama-scaled-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 21},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"head_dim": 32},
    "gemma2": {
        "sliding_window": 18,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {"sliding_window": 18, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": {},
    "phi3-partial": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
}
LENGTH = 75  # more than one block of keys, several groups of queries, and more than one window


def made(name: str) -> dict[str, Any]:
    return {**BASE, "model_type": name, **FAMILIES[name]}


@cache
def whole(name: str) -> Any:
    return reference(made(name))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = tmp_path_factory.mktemp(name)
            whole(name).save_pretrained(saved[name])
        return saved[name]

    return folder


def stages(folders: Any, name: str, starts: list[int], **changes: Any) -> list[StageModel]:
    config = {**whole(name).config.to_dict(), "num_hidden_layers": 4}
    settings = {"dtype": "int8", "blocks": 24, "block_size": 16, **changes}
    return split(DirectoryWeights(folders(name)), config, starts, **settings)


def unrecognised(*_: Any) -> Any:
    raise Unrecognised("told not to")


KERNELS = {"int8": "w8a8", "int4": "groups"}


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_against_plain_modules(
    name: str, dtype: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recognised, invariant; as near to the plain modules as roundings allow, and to float32 as the dtype
    allows."""
    fused = stages(folders, name, [2], dtype=dtype)
    assert all(s.kernels.startswith(f"fused {KERNELS[dtype]}") for s in fused)
    assert all(s.numerics == "invariant" for s in fused)
    assert fused[0].fingerprint == fused[1].fingerprint
    ids, blocks = tokens(LENGTH), tuple(range(24))
    got = run(fused, ids, 25, blocks)
    monkeypatch.setattr(stage_module, "recognise", unrecognised)
    plain = stages(folders, name, [2], dtype=dtype)
    assert all(s.kernels.startswith(f"plain {KERNELS[dtype]}") and s.numerics == "tolerant" for s in plain)
    assert plain[0].fingerprint != fused[0].fingerprint
    near = run(plain, ids, 25, blocks)
    want = expected(whole(name), ids)[24::25]
    scale = np.linalg.norm(want)
    rounding = np.linalg.norm(got - near) / scale
    error, plain_error = (np.linalg.norm(x - want) / scale for x in (got, near))
    assert rounding < 0.06
    # small random matrices in 4 bits are far from themselves
    assert error < 1.3 * plain_error < {"int8": 0.4, "int4": 0.9}[dtype]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "int8"),
        ("gemma2", "int8"),
        ("mistral", "int8"),
        ("qwen3", "int8"),
        ("glm4", "int8"),
        ("llama", "int4"),
        ("gemma2", "int4"),
    ],
)
@pytest.mark.parametrize("size", [16, 4])
def test_bits_do_not_depend_on_the_company(name: str, dtype: str, size: int, folders: Any) -> None:
    """Solo, in a batch of eight, in chunks, cut, and over scattered blocks of either size: the same bits."""
    pool = {"block_size": size, "blocks": 1024 // size, "dtype": dtype}
    [one] = stages(folders, name, [], **pool)
    ids = tokens(LENGTH)
    every = tuple(range(-(-LENGTH // size)))
    want = run([one], ids, LENGTH, every)
    singles = run([one], ids, 1, every)
    np.testing.assert_array_equal(singles[-1:], want)
    for chunk in (7, 64):
        np.testing.assert_array_equal(run([one], ids, chunk, every)[-1:], want)
    for starts in ([2], [1, 3]):
        parts = stages(folders, name, starts, **pool)
        np.testing.assert_array_equal(run(parts, ids, 32, every)[-1:], want)

    order = np.random.default_rng(3).permutation(1024 // size).tolist()
    tables = [tuple(order[i * len(every) : (i + 1) * len(every)]) for i in range(8)]
    prompts = [tokens(LENGTH - 1 if i == 5 else 9 * i + 1, seed=0 if i == 5 else i) for i in range(8)]
    rows = [Row(i, 0, len(p), t, "sample") for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    prefilled = step([one], rows, [*chain(*prompts)])
    np.testing.assert_array_equal(prefilled[5], singles[-2])
    rows = [Row(i, len(p), 1, t, "sample") for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    decoded = step([one], rows, [ids[-1]] * 8)
    np.testing.assert_array_equal(decoded[5:6], want)


def test_logits_only_of_wanted_rows_and_copied_blocks(folders: Any) -> None:
    [one] = stages(folders, "llama", [])
    first, second = tokens(20), tokens(11, seed=1)
    rows = [Row(1, 0, 20, (3, 9), "none"), Row(2, 0, 11, (5,), "logits")]
    logits = step([one], rows, first + second)
    assert logits.shape == (1, 97)
    np.testing.assert_array_equal(logits, run([one], second, 11, (0,)))
    assert step([one], [Row(3, 0, 1, (0,), "none")], [1]).shape == (0, 97)
    one.copy_blocks([(3, 1), (9, 2)])
    continued = [step([one], [Row(4, 20, 1, t, "sample")], [7]) for t in ((3, 9), (1, 2))]
    np.testing.assert_array_equal(*continued)


def test_stale_numbers_in_a_block_are_not_seen(folders: Any) -> None:
    """What another sequence left behind the last token, be it NaN, changes nothing."""
    [one] = stages(folders, "mistral", [])
    ids = tokens(40)
    want = run([one], ids, 13, (0, 1, 2))
    for tensors in (one._pool.keys, one._pool.values):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    np.testing.assert_array_equal(run([one], ids, 13, (0, 1, 2)), want)


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_end_the_step(bad: float, dtype: str, folders: Any) -> None:
    last = stages(folders, "llama", [2], dtype=dtype)[1]
    hidden = np.ones((3, 64), np.float32)
    hidden[1, 5] = bad
    batch = StepBatch((Row(1, 0, 3, (0,), "sample"),), np.zeros(3, np.int32))
    with pytest.raises(Internal, match=r"layers 2-3 .* not finite in int"):
        last.forward(batch, hidden)
    hidden[1, 5] = 1
    assert np.isfinite(last.forward(batch, hidden)).all()


# -- mathematics ----------------------------------------------------------------------------------
@njit
def exp_of(x: Any, y: Any) -> None:
    for i in range(0, x.shape[0], LANES):
        vectors.store(y, i, exp(vectors.load(x, i)))


@njit
def rotations_of(angles: Any, cos: Any, sin: Any) -> None:
    for i in range(angles.shape[0]):
        cos[i], sin[i] = rotation(angles[i])


def test_exponential() -> None:
    x = np.concatenate([np.linspace(-86.9, 87.9, 1 << 14), np.random.default_rng(0).normal(0, 1, 1 << 14)])
    x = x.astype(np.float32)
    y = np.empty_like(x)
    exp_of(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=3e-7)
    x = np.array([0, -0.0, -88, -1e30, -np.inf, np.nan, 88, 1e30, np.inf, *[1] * 7], np.float32)
    y = np.empty_like(x)
    exp_of(x, y)
    assert y[:2].tolist() == [1, 1] and y[2:5].tolist() == [0, 0, 0]
    assert np.isnan(y[5]) and (y[6:9] == y[6]).all() and y[6] > 1e38


def test_rotations() -> None:
    random = np.random.default_rng(0)
    angles = np.concatenate([random.uniform(0, 10, 5000), random.uniform(0, 1 << 20, 5000), [0.0, np.pi / 4]])
    cos, sin = np.empty_like(angles), np.empty_like(angles)
    rotations_of(angles, cos, sin)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1e-9)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1e-9)


# -- recognition ----------------------------------------------------------------------------------
def test_other_wirings_are_found_by_running(
    folders: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The modules look like a Llama's and compute something else."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) * 1.1)
    with caplog.at_level(logging.INFO, logger="p2pshard_node.engine.stage"):
        [one] = stages(folders, "llama", [])
    assert one.kernels.startswith("plain") and one.numerics == "tolerant"
    lines = [r.getMessage() for r in caplog.records if "plain modules" in r.getMessage()]
    assert any("llama runs on plain modules: layer 0 differs from its module by" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "MLP|experts|has"),
        ("starcoder2", {}, "activation"),
        ("llama", {"head_dim": 8}, "multiple of 16|fit together"),
        ("llama", {"hidden_act": "relu"}, "activation"),
    ],
)
def test_all_else_runs_on_plain_modules(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**BASE, **changes, "model_type": name}
    model = reference(config)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="p2pshard_node.engine.stage"):
        one = load(DirectoryWeights(tmp_path), config, (0, 3), 4, dtype="int8")
    assert one.kernels.startswith("plain")
    [line] = [r.getMessage() for r in caplog.records if f"{name} runs on plain modules" in r.getMessage()]
    assert any(word in line for word in reason.split("|"))
    want = expected(model, tokens(9))[-1]
    assert np.linalg.norm(run([one], tokens(9), 9)[0] - want) / np.linalg.norm(want) < 0.2


# -- processors -----------------------------------------------------------------------------------
CHILD = """
import hashlib, sys
import numpy as np, torch
torch.set_num_threads(1)
from p2pshard_node.engine.stage import Row, StageModel, StepBatch
from p2pshard_node.engine import numerics
model = StageModel.from_weights(
    numerics.GoldenWeights, numerics.GOLDEN_CONFIG, layers=(0, 0), embedding=True, head=True, dtype=sys.argv[1],
    blocks=16, block_size=16, chunk_tokens=64,
)
ids = np.arange(100, dtype=np.int32) % 64
logits = model.forward(StepBatch((Row(1, 0, 100, tuple(range(7)), "sample"),), ids), None)
print(model.kernels, model.numerics, model.fingerprint, hashlib.sha256(logits.tobytes()).hexdigest(), sep="|")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNELS)
def test_the_same_bits_on_older_processors(dtype: str) -> None:
    """Compiled for other instruction sets, 128 to 512 bits wide, with and without a dot product instruction."""
    results = {}
    for target, flags in (
        ("", ""),
        ("nehalem", "+sse4.2,+ssse3"),
        ("haswell", "+avx2,+f16c,+fma"),
        ("skylake-avx512", "+avx2,+f16c,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"),
    ):
        held = {"NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": flags} if target else {}
        environment = {**os.environ, **held}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, dtype],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        kernels, *bits = done.stdout.strip().splitlines()[-1].split("|")
        assert kernels.startswith(f"fused {KERNELS[dtype]}") and bits[0] == "invariant"
        assert target == "" or not kernels.endswith(("vnni", "vnni512"))
        results[target] = bits
    assert len({tuple(bits) for bits in results.values()}) == 1, results


@pytest.mark.slow
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """Into one folder; afterwards a third finds all that it needs there."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, "int4"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [child.communicate(timeout=280)[0].splitlines()[-1] for child in children]
    assert results[0] == results[1] and "|invariant|" in results[0]
    files = sorted(tmp_path.rglob("*.nbc"))
    assert files
    written = {path: path.stat().st_mtime_ns for path in files}
    again = subprocess.run(
        [sys.executable, "-c", CHILD, "int4"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert again.stdout.splitlines()[-1] == results[0]
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.nbc"))} == written
