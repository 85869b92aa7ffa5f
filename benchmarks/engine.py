"""Tokens per second of one stage that holds a whole model: decoding at several numbers of streams, and prefill.

    taskset -c 0 python benchmarks/engine.py MODEL.gguf --dtype int8 --streams 1,4,8 --prompt 64 --prefill 512

Medians over the steps; one thread unless --threads says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.engine.stage import Row, StageModel, StepBatch
from p2pshard_node.models.store import ModelStore
from p2pshard_node.platform import peak_bytes

from p2pshard.models.layout import layer_count, needed_tensors

BLOCK = 16


def whole_model(path: Path, dtype: str, tokens: int) -> StageModel:
    """All layers of the model in `path`, with a pool of at least `tokens`."""
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(Path(folder), [path.parent])
        manifest = store.resolve(str(path), local_client=True).manifest
        last = layer_count(manifest) - 1
        listing = Path(folder) / "source.json"
        store.write_source(manifest, needed_tensors(manifest, 0, last, True, True), listing)
        with TensorSource.open(listing) as source:
            return StageModel.load(
                source,
                layers=(0, last),
                embedding=True,
                head=True,
                dtype=dtype,
                blocks=-(-tokens // BLOCK),
                block_size=BLOCK,
                chunk_tokens=256,
            )


def decode(model: StageModel, streams: int, prompt: int, steps: int) -> float:
    """Tokens per second of greedy decoding behind prompts of `prompt` tokens."""
    per_stream = -(-(prompt + steps) // BLOCK)
    tables = [tuple(range(s * per_stream, (s + 1) * per_stream)) for s in range(streams)]
    ids = np.random.default_rng(0).integers(0, model.vocab_size, prompt).astype(np.int32)
    rows = tuple(Row(s, 0, prompt, table, "sample") for s, table in enumerate(tables))
    following = model.forward(StepBatch(rows, np.tile(ids, streams)), None).argmax(1)
    times = []
    for position in range(prompt, prompt + steps):
        rows = tuple(Row(s, position, 1, table, "sample") for s, table in enumerate(tables))
        begun = time.perf_counter()
        following = model.forward(StepBatch(rows, following.astype(np.int32)), None).argmax(1)
        times.append(time.perf_counter() - begun)
    return streams / statistics.median(times)


def prefill(model: StageModel, length: int, chunk: int, repeats: int) -> float:
    """Tokens per second of a prompt of `length`, in chunks."""
    ids = np.random.default_rng(1).integers(0, model.vocab_size, length).astype(np.int32)
    table = tuple(range(-(-length // BLOCK)))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for start in range(0, length, chunk):
            part = ids[start : start + chunk]
            output = "sample" if start + chunk >= length else "none"
            model.forward(StepBatch((Row(0, start, len(part), table, output),), part), None)
        times.append(time.perf_counter() - begun)
    return length / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    streams = [int(n) for n in arguments.streams.split(",")]
    begun = time.perf_counter()
    need = max(max(streams) * (arguments.prompt + arguments.steps + BLOCK), arguments.prefill)
    model = whole_model(arguments.model, arguments.dtype, need)
    result: dict[str, object] = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "kernels": model.kernels,
        "numerics": model.numerics,
        "load_s": round(time.perf_counter() - begun, 1),
    }
    for count in streams:
        result[f"decode_{count}"] = round(decode(model, count, arguments.prompt, arguments.steps), 1)
    if arguments.prefill:
        speed = prefill(model, arguments.prefill, arguments.chunk, arguments.repeats)
        result[f"prefill_{arguments.prefill}"] = round(speed, 1)
    result["weight_mb"] = round(model.weight_bytes / 1e6)
    result["peak_mb"] = round((peak_bytes(os.getpid()) or 0) / 1e6)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
