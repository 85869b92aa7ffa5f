"""Predicted bytes against the engine's own: weights within 1 %, KV exactly, peak memory within the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from p2pshard_node.models.builder import build_model

from p2pshard.models.layout import layer_count
from p2pshard.planning.memory import blocks_for, kv_bytes, profile_model, workspace_bytes
from tests.tiny import write_tiny_llama
from tests.unit.text_models import model_path

MB = 10**6

CHILD = """
import json, sys
import numpy as np
import torch
torch.set_num_threads(1)
import transformers
from p2pshard_node.platform import peak_bytes
import os
from pathlib import Path
from p2pshard_node.models.store import ModelStore
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.engine.stage import Row, StageModel, StepBatch

ask = json.loads(sys.argv[1])
store = ModelStore(Path(ask["data"]), [Path(ask["model"]).parent])
manifest = store.resolve(ask["model"], local_client=True).manifest
from p2pshard.models.layout import needed_tensors
first, last, embedding, head = ask["first"], ask["last"], ask["embedding"], ask["head"]
path = Path(ask["data"]) / "source.json"
store.write_source(manifest, needed_tensors(manifest, first, last, embedding, head), path)
from p2pshard_node.engine.gguf_weights import open_weights  # noqa: F401, its imports belong to the base
import p2pshard_node.worker.process  # noqa: F401
before = peak_bytes(os.getpid())
stage = StageModel.load(
    TensorSource.open(path), layers=(first, last), embedding=embedding, head=head, dtype=ask["dtype"],
    blocks=ask["blocks"], block_size=16, chunk_tokens=ask["chunk"],
)
loaded = peak_bytes(os.getpid())

def step(start, rows, length, output):
    per = ask["blocks"] // rows
    batch = StepBatch(
        tuple(Row(i, start, length, tuple(range(i * per, (i + 1) * per)), output) for i in range(rows)),
        np.arange(rows * length, dtype=np.int32) % 90,
    )
    size = (rows * length, stage.hidden_size)
    hidden = np.random.default_rng(0).normal(size=size).astype(np.float32)
    return stage.forward(batch, None if embedding else hidden)

context, chunk = ask["blocks"] * 16, ask["chunk"]
step(0, 1, chunk, "sample")
step(context - chunk, 1, chunk, "sample")
step(context - 1, 1, 1, "sample")
if ask["blocks"] >= 32:
    step(0, 32, 1, "sample")
print(json.dumps({
    "before": before, "loaded": loaded, "peak": peak_bytes(os.getpid()),
    "weights": stage.weight_bytes, "kv": stage.kv_bytes,
}))
"""


def measure(model: Path, data: Path, **ask: object) -> dict[str, int]:
    """Load one stage in a process of its own, run its largest steps, and tell its bytes."""
    text = json.dumps({"model": str(model), "data": str(data), **ask})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, text], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(
    model: Path, data: Path, *, dtype: str, first: int, last: int, context: int, chunk: int = 256
) -> tuple[dict[str, int], int]:
    """Check weights and KV; return what was measured and the planned peak above the base."""
    manifest = build_model(model).manifest
    profile = profile_model(manifest, dtype)
    last = layer_count(manifest) - 1 if last < 0 else last
    head = last == profile.layers - 1
    blocks = blocks_for(context, 1)
    data.mkdir(parents=True, exist_ok=True)
    got = measure(
        model,
        data,
        dtype=dtype,
        first=first,
        last=last,
        embedding=first == 0,
        head=head,
        blocks=blocks,
        chunk=chunk,
    )
    weights = profile.weight_bytes(first, last)
    assert abs(got["weights"] - weights) <= weights / 100, (got, weights)
    assert got["kv"] == kv_bytes(profile, first, last, blocks)
    workspace = workspace_bytes(profile, context, chunk, head=head) + profile.padding_bytes(first, last)
    return got, weights + got["kv"] + workspace


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_tiny_model_on_one_stage(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = write_tiny_llama(tmp_path / "model", layers=3, tied=tied)
    got, planned = compare(folder, tmp_path / "data", dtype=dtype, first=0, last=-1, context=512, chunk=64)
    assert got["peak"] - got["before"] <= planned, (got, planned)


@pytest.mark.slow
def test_a_tiny_model_cut_in_the_middle(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", layers=5, tied=True)
    for first, last in ((0, 1), (2, 3), (4, 4)):
        compare(folder, tmp_path / "data", dtype="float32", first=first, last=last, context=512, chunk=64)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "dtype", "first", "last", "context"),
    [
        pytest.param("smollm2-135m-instruct", "int8", 0, 9, 8192, marks=pytest.mark.slow),
        ("smollm2-135m-instruct", "int4", 0, 9, 8192),
        pytest.param("smollm2-135m-instruct", "bfloat16", 20, -1, 8192, marks=pytest.mark.slow),
        pytest.param("smollm2-135m-instruct", "float32", 0, -1, 2048, marks=pytest.mark.slow),
        pytest.param("gemma3-270m", "int8", 9, -1, 8192, marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b-instruct", "int8", 0, 9, 8192, marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b-instruct", "int8", 20, -1, 8192, marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b-instruct", "int4", 0, -1, 4096, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_real_stage_stays_within_its_plan(
    tmp_path: Path, name: str, dtype: str, first: int, last: int, context: int
) -> None:
    got, planned = compare(
        model_path(name), tmp_path / "data", dtype=dtype, first=first, last=last, context=context
    )
    print(
        {k: v // MB for k, v in got.items()},
        "planned MB",
        planned // MB,
        "used",
        (got["peak"] - got["before"]) // MB,
    )
    assert got["peak"] - got["before"] <= planned, (got, planned)
