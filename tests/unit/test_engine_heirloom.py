"""A stage that follows another in its process: the bits of one loaded anew, and nothing read twice."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from p2pshard_node.engine.stage import Row, StageModel, StepBatch

from tests.unit.engine_helpers import LLAMA, DirectoryWeights, reference, run, tokens
from tests.unit.engine_helpers import load as load_stage

COUNT = LLAMA["num_hidden_layers"]
IDS = tokens(21)


Model = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Model]:
    """By whether embedding and head are one tensor."""
    made = {}
    for tied in (False, True):
        config = {**LLAMA, "tie_word_embeddings": tied}
        path = tmp_path_factory.mktemp("model")
        reference(config).save_pretrained(path)
        made[tied] = config, path
    return made


@cache
def golden(dtype: str) -> Any:
    """As a worker does: once for a process."""
    return StageModel.rehearse(dtype)


def load(*arguments: Any, dtype: str, **changes: Any) -> StageModel:
    return load_stage(*arguments, dtype=dtype, golden=golden(dtype), **changes)


def outputs(stage: StageModel, chunk: int) -> np.ndarray:
    """What the stage makes of a sequence that comes in chunks: hidden states, or logits of each chunk's last token."""
    part, size = stage._modules.part, LLAMA["hidden_size"]
    hidden = np.random.default_rng(3).standard_normal((len(IDS), size), dtype=np.float32)
    found = []
    for start in range(0, len(IDS), chunk):
        ids = np.array(IDS[start : start + chunk], np.int32)
        row = Row(1, start, len(ids), tuple(range(40)), "logits")
        given = None if part.embedding else hidden[start : start + chunk]
        found.append(stage.forward(StepBatch((row,), ids), given))
    return np.concatenate(found)


def layers_of(weights: DirectoryWeights) -> set[int]:
    return {int(n.split(".")[2]) for n in weights.read if ".layers." in n}


@pytest.mark.parametrize(
    ("before", "after", "dtype", "tied"),
    [
        ((0, 2), (0, 4), "int8", True),  # a first stage takes more
        ((2, 3), (2, 5), "int8", True),  # a middle one becomes the last
        ((2, 3), (2, 5), "int4", False),
        ((2, 3), (0, 3), "int8", False),  # or the first
        ((3, 5), (2, 5), "int4", True),
        ((2, 4), (3, 3), "int8", False),  # or gives away on both sides
        ((0, 2), (0, 5), "int8", True),  # or all is its own now
        ((0, 2), (0, 5), "int4", True),
        ((0, 2), (0, 5), "float32", False),
        ((0, 5), (0, 2), "int4", True),
        ((0, 5), (3, 5), "float32", False),
        ((0, 1), (4, 5), "int8", True),  # nothing in common
    ],
)
def test_what_both_have_is_kept_and_the_rest_is_read(
    before: tuple[int, int], after: tuple[int, int], dtype: str, tied: bool, models: dict[bool, Model]
) -> None:
    config, path = models[tied]
    weights = DirectoryWeights(path)
    old = load(weights, config, before, COUNT, dtype=dtype)
    weights.read.clear()
    # other sizes of the pool too, as the next plan may have them
    new = load(weights, config, after, COUNT, dtype=dtype, follows=old, blocks=40, block_size=8)
    assert layers_of(weights) == set(range(after[0], after[1] + 1)) - set(range(before[0], before[1] + 1))
    fresh = load(DirectoryWeights(path), config, after, COUNT, dtype=dtype, blocks=40, block_size=8)
    assert (new.weight_bytes, new.kv_bytes, new.kernels) == (
        fresh.weight_bytes,
        fresh.kv_bytes,
        fresh.kernels,
    )
    assert (new.numerics, new.fingerprint) == (fresh.numerics, fresh.fingerprint)
    for chunk in (5, 21):
        np.testing.assert_array_equal(outputs(new, chunk), outputs(fresh, chunk))


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_read_only_where_they_change_hands(
    tied: bool, models: dict[bool, Model]
) -> None:
    config, path = models[tied]
    weights = DirectoryWeights(path)
    ends = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    old = load(weights, config, (0, 1), COUNT, dtype="int8")
    weights.read.clear()
    load(weights, config, (0, 3), COUNT, dtype="int8", follows=old)
    assert not ends & set(weights.read)
    old = load(weights, config, (3, 5), COUNT, dtype="int8")
    weights.read.clear()
    load(weights, config, (1, 5), COUNT, dtype="int8", follows=old)
    assert not ends & set(weights.read)


@pytest.mark.parametrize("tied", [True])
def test_a_chain_of_successors(tied: bool, models: dict[bool, Model]) -> None:
    config, path = models[tied]
    weights = DirectoryWeights(path)
    stage = load(weights, config, (0, 1), COUNT, dtype="int8")
    for last in (3, 2, 5):
        stage = load(weights, config, (0, last), COUNT, dtype="int8", follows=stage)
    whole = load(DirectoryWeights(path), config, (0, 5), COUNT, dtype="int8")
    np.testing.assert_array_equal(run([stage], IDS, 7), run([whole], IDS, 7))


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_that_is_loaded_beside_another_shares_with_it_and_leaves_it_as_it_was(
    dtype: str, tied: bool, models: dict[bool, Model]
) -> None:
    config, path = models[tied]
    weights = DirectoryWeights(path)
    old = load(weights, config, (0, 3), COUNT, dtype=dtype, blocks=40, block_size=16)
    before = outputs(old, 5)
    weights.read.clear()
    new = load(weights, config, (0, 5), COUNT, dtype=dtype, follows=old, beside=True, blocks=40, block_size=8)
    assert layers_of(weights) == {4, 5}
    fresh = load(DirectoryWeights(path), config, (0, 5), COUNT, dtype=dtype, blocks=40, block_size=8)
    for _ in range(2):  # in turn: neither writes where the other reads
        np.testing.assert_array_equal(outputs(old, 5), before)
        np.testing.assert_array_equal(outputs(new, 5), outputs(fresh, 5))
    del old
    np.testing.assert_array_equal(outputs(new, 21), outputs(fresh, 21))
