"""Published models through the whole loading path, against transformers reading the same file."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.engine.stage import StageModel
from p2pshard_node.models.store import ModelStore

from p2pshard.models.layout import needed_tensors
from tests.unit.engine_helpers import run

pytestmark = pytest.mark.model


def model_file(name: str) -> Path:
    folder = os.environ.get("P2PSHARD_MODELS_DIR") or Path(platformdirs.user_data_dir("p2pshard")) / "models"
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in {folder}")
    return path


def stages_of(path: Path, folder: Path, starts: list[int], dtype: str) -> tuple[list[StageModel], list[int]]:
    """Stages that begin at layers 0 and `starts`, each from a source of its own, and the bytes each read."""
    store = ModelStore(folder / "data", [path.parent])
    manifest = store.resolve(str(path), local_client=True).manifest
    count = int(manifest.config["num_hidden_layers"])
    edges = [0, *starts, count]
    stages, read = [], []
    for first, end in pairwise(edges):
        embedding, head = first == 0, end == count
        needed = needed_tensors(manifest, first, end - 1, embedding, head)
        store.write_source(manifest, needed, folder / f"{first}.json")
        source = TensorSource.open(folder / f"{first}.json")
        stages.append(
            StageModel.load(
                source, layers=(first, end - 1), embedding=embedding, head=head, dtype=dtype,
                blocks=4, block_size=16, chunk_tokens=64,
            )
        )  # fmt: skip
        assert source.bytes_read <= sum(entry.nbytes for entry in needed)
        read.append(source.bytes_read)
    return stages, read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "starts", "prompt"),
    [
        ("smollm2-135m-instruct.gguf", [10, 20], [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]),
        ("gemma3-270m.gguf", [5], [2, 818, 5279, 529, 7001, 563, 506, 3207, 532, 1061, 9, 77]),
    ],
)
def test_three_stages_equal_transformers(
    name: str, starts: list[int], prompt: list[int], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = model_file(name)
    stages, _ = stages_of(path, tmp_path, starts, "float32")
    got = run(stages, prompt, 5, (0, 1, 2, 3))
    del stages
    whole = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        want = whole.eval()(torch.tensor([prompt]), use_cache=False).logits[0].numpy()[[4, 9, 11]]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * float(np.abs(want).max()))
    assert (got.argmax(1) == want.argmax(1)).all()


@pytest.mark.slow
def test_int8_and_bfloat16_stay_near_float32(tmp_path: Path) -> None:
    path = model_file("smollm2-135m-instruct.gguf")
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    logits = {}
    for dtype in ("float32", "bfloat16", "int8"):
        stages, read = stages_of(path, tmp_path, [15], dtype)
        logits[dtype] = run(stages, prompt, 12, (0, 1, 2, 3))[0]
        assert len(read) == 2
    # without what all logits have in common, which no probability depends on
    centred = {dtype: values - values.mean() for dtype, values in logits.items()}
    norm = np.linalg.norm(centred["float32"])
    assert np.linalg.norm(centred["bfloat16"] - centred["float32"]) < 0.05 * norm
    assert np.linalg.norm(centred["int8"] - centred["float32"]) < 0.2 * norm
    assert len({int(v.argmax()) for v in logits.values()}) == 1
