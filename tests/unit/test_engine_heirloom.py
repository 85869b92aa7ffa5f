"""A stage that follows another in its process: the bits of one loaded anew, and nothing read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.engine_helpers import LLAMA, DirectoryWeights, load, reference, run, tokens

COUNT = LLAMA["num_hidden_layers"]
IDS = tokens(21)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    config = {**LLAMA, "tie_word_embeddings": request.param}
    path = tmp_path_factory.mktemp("model")
    reference(config).save_pretrained(path)
    return config, path


def layers_of(weights: DirectoryWeights) -> set[int]:
    return {int(n.split(".")[2]) for n in weights.read if ".layers." in n}


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        ((0, 2), (0, 4), "int8"),  # a first stage takes more
        ((2, 3), (2, 5), "int8"),  # a middle one becomes the last
        ((2, 3), (2, 5), "int4"),
        ((2, 3), (0, 3), "int8"),  # or the first
        ((3, 5), (2, 5), "int4"),
        ((2, 4), (3, 3), "int8"),  # or gives away on both sides
        ((0, 2), (0, 5), "int8"),  # or all is its own now
        ((0, 2), (0, 5), "int4"),
        ((0, 2), (0, 5), "float32"),
        ((0, 5), (0, 2), "int4"),
        ((0, 5), (3, 5), "float32"),
        ((0, 1), (4, 5), "int8"),  # nothing in common
    ],
)
def test_what_both_have_is_kept_and_the_rest_is_read(
    before: tuple[int, int], after: tuple[int, int], dtype: str, folder: tuple[dict[str, Any], Path]
) -> None:
    config, path = folder
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
    rest = [
        load(DirectoryWeights(path), config, part, COUNT, dtype=dtype, blocks=40, block_size=8)
        for part in ((0, after[0] - 1), (after[1] + 1, COUNT - 1))
        if part[0] <= part[1]
    ]
    first, last = rest[: after[0] > 0], rest[after[0] > 0 :]
    blocks = tuple(range(40))
    got, want = (run([*first, stage, *last], IDS, 5, blocks) for stage in (new, fresh))
    np.testing.assert_array_equal(got, want)


def test_embedding_and_head_are_read_only_where_they_change_hands(
    folder: tuple[dict[str, Any], Path],
) -> None:
    config, path = folder
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


def test_a_chain_of_successors(folder: tuple[dict[str, Any], Path]) -> None:
    config, path = folder
    weights = DirectoryWeights(path)
    stage = load(weights, config, (0, 1), COUNT, dtype="int8")
    for last in (3, 2, 5, 4, 5):
        stage = load(weights, config, (0, last), COUNT, dtype="int8", follows=stage)
    whole = load(DirectoryWeights(path), config, (0, 5), COUNT, dtype="int8")
    np.testing.assert_array_equal(run([stage], IDS, 7), run([whole], IDS, 7))
