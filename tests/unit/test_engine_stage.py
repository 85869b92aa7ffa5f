"""A split model gives the numbers of the whole, whatever the cut, the chunks, the batch and the blocks."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from p2pshard_node.engine import quant
from p2pshard_node.engine.quant import Int8Linear, check_exact
from p2pshard_node.engine.stage import Row, StageModel, StepBatch

from p2pshard.errors import Internal, InvalidRequest, ModelCorrupt, ProtocolError, UnsupportedModel
from tests.unit.engine_helpers import (
    LLAMA,
    DirectoryWeights,
    close,
    expected,
    load,
    reference,
    run,
    split,
    step,
    tokens,
)

ALL_BLOCKS = tuple(range(32))


@pytest.fixture(scope="module")
def whole() -> Any:
    return reference(LLAMA)


@pytest.fixture(scope="module")
def folder(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    whole.save_pretrained(path)
    return path


def greedy(stages: list[StageModel], prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    logits = step(stages, [Row(1, 0, len(ids), ALL_BLOCKS, "sample")], ids)
    while True:
        ids.append(int(logits[0].argmax()))
        if len(ids) == len(prompt) + count:
            return ids[len(prompt) :]
        logits = step(stages, [Row(1, len(ids) - 1, 1, ALL_BLOCKS, "sample")], ids[-1:])


def greedy_whole(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(expected(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


CUTS = [[c] for c in range(1, 6)] + [[2, 4], [1, 3, 5], [1, 2, 3, 4]]


@pytest.mark.parametrize("starts", CUTS, ids=str)
def test_every_cut_and_up_to_five_stages(starts: list[int], whole: Any, folder: Path) -> None:
    stages = split(DirectoryWeights(folder), LLAMA, starts)
    ids = tokens(20)
    close(run(stages, ids, 1), expected(whole, ids))
    assert greedy(stages, ids, 12) == greedy_whole(whole, ids, 12)


@pytest.mark.parametrize("chunk", [1, 3, 7, 150])
def test_chunked_prefill(chunk: int, whole: Any, folder: Path) -> None:
    stages = split(DirectoryWeights(folder), LLAMA, [3], blocks=40)
    ids = tokens(150)  # more than one block of queries
    ends = [min(i + chunk, 150) - 1 for i in range(0, 150, chunk)]
    close(run(stages, ids, chunk, tuple(range(40))), expected(whole, ids)[ends])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("starts", [[], [2]], ids=str)
def test_tied_and_untied_from_several_files(tied: bool, starts: list[int], tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    model = reference(config)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    stages = split(DirectoryWeights(tmp_path), config, starts)
    ids = tokens(9)
    close(run(stages, ids, 9), expected(model, ids)[-1:])
    table = 97 * 32 * 4
    parameters = sum(p.numel() * 4 for p in model.parameters())
    copies = 1 if tied and starts else 0  # a tied table lies on the first and on the last stage
    assert sum(stage.weight_bytes for stage in stages) == parameters + copies * table
    assert sum(stage.kv_bytes for stage in stages) == 6 * 32 * 4 * 2 * (8 + 8) * 4


def test_ragged_batch_with_scattered_blocks(whole: Any, folder: Path) -> None:
    """Prompts of different lengths, decoding beside prefill, block tables in any order: each as if alone."""
    stages = split(DirectoryWeights(folder), LLAMA, [2, 4])
    prompts = [tokens(n, seed=n) for n in (1, 5, 11, 16)]
    tables = [(7,), (3, 1), (20, 19, 30, 0), (10, 11, 12, 13, 14)]
    wants = [expected(whole, p) for p in prompts]
    rows = [Row(i, 0, len(p), t, "sample") for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    logits = step(stages, rows, [*chain(*prompts)])
    close(logits, np.stack([w[-1] for w in wants]))

    # next step: sequence 0 and 2 go on, a new one is prefilled without output, 3 decodes
    more = [[5], [9], tokens(6, seed=9), [3]]
    rows = [
        Row(0, 1, 1, (7,), "sample"),
        Row(2, 11, 1, (20, 19, 30), "logits"),
        Row(4, 0, 6, (8, 2), "none"),
        Row(3, 16, 1, (10, 11, 12, 13, 14), "sample"),
    ]
    logits = step(stages, rows, [*chain(*more)])
    histories = [prompts[0] + [5], prompts[2] + [9], prompts[3] + [3]]
    close(logits, np.stack([expected(whole, h)[-1] for h in histories]))
    # a step without any output gives no logits, and the chunk it left behind is used
    assert step(stages, [Row(5, 0, 2, (25,), "none")], [1, 2]).shape == (0, 97)
    logits = step(stages, [Row(4, 6, 1, (8, 2), "sample")], [4])
    close(logits, expected(whole, [*more[2], 4])[-1:])


def test_copied_blocks_continue_another_sequence(whole: Any, folder: Path) -> None:
    stages = split(DirectoryWeights(folder), LLAMA, [3])
    ids = tokens(6)
    step(stages, [Row(1, 0, 6, (4, 5), "none")], ids)
    for stage in stages:
        stage.copy_blocks([(4, 9), (5, 2)])
    logits = step(stages, [Row(2, 6, 1, (9, 2), "sample")], [7])
    close(logits, expected(whole, [*ids, 7])[-1:])


def test_one_block_pool(whole: Any, folder: Path) -> None:
    stages = split(DirectoryWeights(folder), LLAMA, [3], blocks=1, block_size=3, chunk_tokens=1)
    ids = tokens(3)
    close(run(stages, ids, 1, (0,)), expected(whole, ids))


def test_reads_only_its_own_layers(folder: Path) -> None:
    weights = DirectoryWeights(folder)
    load(weights, LLAMA, (2, 3), 6)
    sizes = {name: int(np.prod(weights.shape(name))) * 4 for name in weights.names()}
    own = {n: s for n, s in sizes.items() if n.startswith(("model.layers.2.", "model.layers.3."))}
    assert weights.read == own
    head = DirectoryWeights(folder)
    load(head, LLAMA, (5, 5), 6)
    assert {n for n in head.read if "layers" not in n} == {"model.norm.weight", "lm_head.weight"}


def test_text_part_of_a_multimodal_checkpoint(whole: Any, folder: Path) -> None:
    class Prefixed(DirectoryWeights):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self._files = {"language_model." + n: f for n, f in self._files.items()}

        def names(self) -> list[str]:
            return ["vision_tower.patch.weight", *self._files]

        def shape(self, name: str) -> tuple[int, ...]:
            bare = name.removeprefix("language_model.")
            return tuple(self._files[name].get_slice(bare).get_shape())

        def load(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
            tensor = self._files[name].get_tensor(name.removeprefix("language_model."))
            return (tensor if rows is None else tensor[rows[0] : rows[1]]).to(dtype)

    ids = tokens(5)
    close(run(split(Prefixed(folder), LLAMA, [3]), ids, 5), expected(whole, ids)[-1:])


# -- dtypes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.01), ("int8", 0.08), ("int4", 0.6)]
)
def test_coarser_dtypes_stay_near_and_agree_across_cuts(
    dtype: str, tolerance: float, whole: Any, folder: Path
) -> None:
    ids = tokens(12)
    want = expected(whole, ids)
    results = []
    for starts in ([], [3], [2, 4]):
        stages = split(DirectoryWeights(folder), LLAMA, starts, dtype=dtype)
        results.append(run(stages, ids, 12))
    distance = np.linalg.norm(results[0] - want[-1:]) / np.linalg.norm(want[-1:])
    assert distance < tolerance
    for other in results[1:]:  # the wire carries the hidden state whole, so a cut changes nothing
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("tied", [True, False])
def test_int8_bytes(tied: bool, tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    reference(config).save_pretrained(tmp_path)
    stage = load(DirectoryWeights(tmp_path), config, (0, 5), 6, dtype="int8")
    d, f, kv, v, layers = 32, 64, 16, 97, 6
    linears = [(d, d), (kv, d), (kv, d), (d, d), (f, d), (f, d), (d, f)]
    per_layer = sum(n * k + 4 * n for n, k in linears) + 2 * d * 4
    assert stage.weight_bytes == layers * per_layer + d * 4 + (1 if tied else 2) * (v * d + 4 * v)
    assert stage.kv_bytes == layers * 32 * 4 * 2 * 16 * 4
    assert "w8a8" in stage.kernels


# -- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_state_between_tokens_is_found_by_running(
    dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the structure tells: the layer looks at the token before, and chunks lose it."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    with pytest.raises(UnsupportedModel, match=r"llama is not supported: chunks of \d tokens? differ"):
        load(DirectoryWeights(folder), LLAMA, (0, 2), 6, dtype=dtype)


def test_changes_on_entry_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that adds something before its layers would add it on every stage."""
    from transformers.models.llama.modeling_llama import LlamaModel

    plain = LlamaModel.forward

    def shifted(self: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return plain(self, inputs_embeds=inputs_embeds + 1, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="changes the hidden state before its layers"):
        load(DirectoryWeights(folder), LLAMA, (1, 2), 6)


def test_missing_and_misshapen_tensors(folder: Path) -> None:
    class Fewer(DirectoryWeights):
        def names(self) -> list[str]:
            return [n for n in super().names() if "layers.2.mlp" not in n]

    with pytest.raises(ModelCorrupt, match=r"3 tensors are missing .*layers\.2\.mlp"):
        load(Fewer(folder), LLAMA, (0, 2), 6)
    with pytest.raises(ModelCorrupt, match="has shape"):
        load(DirectoryWeights(folder), {**LLAMA, "intermediate_size": 48}, (0, 2), 6)


def test_wrong_settings(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="int3"):
        load(DirectoryWeights(folder), LLAMA, (0, 2), 6, dtype="int3")
    with pytest.raises(InvalidRequest, match="layers 4-6 of a model of 6"):
        load(DirectoryWeights(folder), LLAMA, (4, 6), 6)
    with pytest.raises(InvalidRequest, match="0 blocks"):
        load(DirectoryWeights(folder), LLAMA, (0, 2), 6, blocks=0)


@pytest.mark.parametrize(
    ("rows", "ids", "word"),
    [
        ([Row(1, 0, 2, (0,), "none")], [1], "token ids"),
        ([], [], "token ids"),
        ([Row(1, 0, 5, (0,), "none")], [1] * 5, "blocks"),
        ([Row(1, 0, 0, (0,), "none")], [], "blocks"),
        ([Row(1, -1, 1, (0,), "none")], [1], "blocks"),
        ([Row(1, 0, 1, (32,), "none")], [1], "outside the pool"),
        ([Row(1, 0, 1, (-1,), "none")], [1], "outside the pool"),
        ([Row(1, 0, 1, (0,), "none")], [97], "vocabulary"),
        ([Row(1, 0, 1, (0,), "none")], [-1], "vocabulary"),
    ],
)
def test_steps_that_contradict_the_pool(rows: list[Row], ids: list[int], word: str, folder: Path) -> None:
    stage = load(DirectoryWeights(folder), LLAMA, (0, 0), 6)
    with pytest.raises(ProtocolError, match=word):
        stage.forward(StepBatch(tuple(rows), np.array(ids, dtype=np.int32)), None)


def test_hidden_states_that_do_not_belong(folder: Path) -> None:
    first, last = split(DirectoryWeights(folder), LLAMA, [3])
    batch = StepBatch((Row(1, 0, 1, (0,), "none"),), np.array([1], dtype=np.int32))
    with pytest.raises(ProtocolError):
        first.forward(batch, np.zeros((1, 32), np.float32))
    for hidden in (None, np.zeros((2, 32), np.float32), np.zeros((1, 31), np.float32)):
        with pytest.raises(ProtocolError):
            last.forward(batch, hidden)
    with pytest.raises(ProtocolError):
        last.copy_blocks([(0, 32)])


def test_progress_reaches_its_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(
        DirectoryWeights(folder), LLAMA, (0, 5), 6, progress=lambda _, done, total: seen.append((done, total))
    )
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_fingerprint_is_of_the_kernels(folder: Path) -> None:
    """Equal on two parts of a model, different for another dtype."""
    first, last = split(DirectoryWeights(folder), LLAMA, [3])
    assert first.fingerprint == last.fingerprint
    other = load(DirectoryWeights(folder), LLAMA, (0, 0), 6, dtype="bfloat16")
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize("two_rows", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(37, 48), (1, 5), (64, 64), (201, 130), (128, 2048)])
def test_int8_linear_is_its_formula_bit_for_bit(rows: int, columns: int, two_rows: bool) -> None:
    """Whatever the widths and however many tokens, and within its rounding of the float product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    bias = torch.nn.Parameter(torch.randn(rows, generator=generator), requires_grad=False)
    layer = Int8Linear(lambda a, b: weight[a:b], rows, columns, bias, two_rows=two_rows)
    for count in (1, 2, 3, 5, 66):
        x = torch.randn(count, columns, generator=generator)
        assert torch.equal(layer(x), layer.reference(x))
    want = torch.nn.functional.linear(x, weight, bias)
    assert (layer(x) - want).norm() / want.norm() < (0.012 if two_rows else 0.017)
    assert layer(x.view(2, 33, columns)).shape == (2, 33, rows)
    assert layer(x[:0]).shape == (0, rows)
    assert layer.nbytes == rows * columns + rows * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int8_refuses_weights_that_are_not_finite_by_name(bad: float, tmp_path: Path) -> None:
    model = reference(LLAMA)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[5, 7] = bad
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelCorrupt, match=r"layers\.3\.mlp\.down_proj\.weight: a weight is not finite"):
        load(DirectoryWeights(tmp_path), LLAMA, (0, 5), 6, dtype="int8")


def test_int8_linear_is_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(201, 130, generator=torch.Generator().manual_seed(0))
    whole = Int8Linear(lambda a, b: weight[a:b], 201, 130, None)
    monkeypatch.setattr(quant, "BLOCK_ELEMENTS", 1)
    asked: list[tuple[int, int]] = []

    def rows(first: int, end: int) -> torch.Tensor:
        asked.append((first, end))
        return weight[first:end]

    parts = Int8Linear(rows, 201, 130, None)
    assert asked == [(0, 64), (64, 128), (128, 192), (192, 201)]
    assert torch.equal(parts.weight(), whole.weight())
    stored, scales = quant.quantise_rows(weight)
    assert torch.equal(whole.weight(), stored)
    assert (weight - stored * scales[:, None]).abs().max() <= scales.max() / 2


def test_numbers_that_are_not_finite_stay_so() -> None:
    layer = Int8Linear(lambda a, b: torch.ones(b - a, 16), 3, 16, None)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(2, 16)
        x[1, 7] = bad
        assert not torch.isfinite(layer(x)).any()


def test_a_product_that_is_not_exact_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_exact()
    plain = Int8Linear.forward

    def saturating(self: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        """Sums stop at 16 bits, as those of byte pairs do on some processors."""
        return plain(self, x).clamp(-32767 / 127, 32767 / 127)

    monkeypatch.setattr(Int8Linear, "forward", saturating)
    with pytest.raises(Internal, match="not exact"):
        check_exact.__wrapped__()
