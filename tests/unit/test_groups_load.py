"""``int4`` from a file to logits: what is read, what is held, and the same bits from one process and from three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from p2pshard_node.engine.embedding import QuantEmbedding
from p2pshard_node.engine.fused.product import WIDE_GROUPS
from p2pshard_node.engine.gguf_weights import open_weights
from p2pshard_node.engine.groups.linear import GroupLinear
from p2pshard_node.engine.quant import Int8Linear
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.engine.stage import Row, StageModel
from p2pshard_node.models.builder import build_model
from p2pshard_node.models.store import ModelStore

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.layout import needed_tensors
from p2pshard.planning.memory import profile_model
from tests.unit.engine_helpers import (
    LLAMA,
    DirectoryWeights,
    expected,
    load,
    reference,
    run,
    split,
    step,
    tokens,
)
from tests.unit.gguf_files import TINY_LLAMA, rotate_rows, tiny_llama_tensors, write_gguf

Q = gguf.GGMLQuantizationType


def folder_of(path: Path, **changes: Any) -> tuple[dict[str, Any], torch.nn.Module, DirectoryWeights]:
    config = {**LLAMA, **changes}
    model = reference(config)
    model.save_pretrained(path)
    return config, model, DirectoryWeights(path)


def modules_of(stage: StageModel, kind: type) -> list[str]:
    return [name for name, module in stage._modules.model.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_give_the_bits_of_one_process(tmp_path: Path, tied: bool) -> None:
    config, model, weights = folder_of(tmp_path, tie_word_embeddings=tied)
    ids = tokens(23)
    (stage,) = split(weights, config, [], dtype="int4")
    whole = run([stage], ids, 5)
    for starts in ([3], [1, 4]):
        np.testing.assert_array_equal(run(split(weights, config, starts, dtype="int4"), ids, 5), whole)
    # and those of plain modules with the same weights, up to the rounding of activations
    with torch.no_grad():
        for name, module in stage._modules.model.named_modules():
            if isinstance(module, GroupLinear | QuantEmbedding):
                matrix = module.table
                values = torch.from_numpy(matrix.take(np.arange(matrix.rows)))
                model.get_submodule(name).weight.copy_(values)
    want = expected(model, ids)[[4, 9, 14, 19, 22]]
    assert np.abs(whole - want).max() < 0.1 * np.abs(want).max()


def test_linears_are_grouped_and_a_tied_table_is_held_once(tmp_path: Path) -> None:
    config, _, weights = folder_of(tmp_path, tie_word_embeddings=True)
    (stage,) = split(weights, config, [], dtype="int4")
    model = stage._modules.model
    assert len(modules_of(stage, GroupLinear)) == 6 * 7 + 1
    assert not modules_of(stage, torch.nn.Linear) and not modules_of(stage, Int8Linear)
    table = model.model.embed_tokens
    assert isinstance(table, QuantEmbedding) and model.lm_head.table is table.table
    assert table.table.layout.name == "Q8_0"
    assert model.model.layers[2].mlp.down_proj.table.layout.name == "Q4_1"
    assert all(p.dtype == torch.float32 for p in model.parameters())
    wide = {
        n.rpartition(".")[2]
        for n in modules_of(stage, GroupLinear)
        if model.get_submodule(n).form == WIDE_GROUPS
    }
    assert wide == {"q_proj", "k_proj", "v_proj", "down_proj", "lm_head"}, "two int8 an activation, by role"
    assert "int4" not in stage.kernels and "groups" in stage.kernels


def test_rows_that_do_not_divide_into_groups_become_int8(tmp_path: Path) -> None:
    config, _, weights = folder_of(tmp_path, intermediate_size=72, num_hidden_layers=2)
    stage = load(weights, config, (0, 1), 2, dtype="int4")
    assert modules_of(stage, Int8Linear) == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    config, _, weights = folder_of(
        tmp_path / "b", hidden_size=40, num_hidden_layers=2, tie_word_embeddings=True
    )
    stage = load(weights, config, (0, 1), 2, dtype="int4")
    table = stage._modules.base.embed_tokens.table
    assert isinstance(table, Int8Linear) and stage._modules.model.lm_head is table
    logits = step([stage], [Row(1, 0, 3, tuple(range(32)), "logits")], [1, 2, 3])
    assert np.isfinite(logits).all()


def test_other_devices_are_refused(tmp_path: Path) -> None:
    config, _, weights = folder_of(tmp_path)
    with pytest.raises(UnsupportedModel, match="int4 runs on processors only, not on meta"):
        load(weights, config, (0, 5), 6, dtype="int4", device="meta")


# -- GGUF -----------------------------------------------------------------------------------------
WIDE = {**TINY_LLAMA, "embedding_length": 256, "feed_forward_length": 512}


def gguf_file(path: Path, kinds: dict[str, gguf.GGMLQuantizationType]) -> Path:
    """Two layers of width 64; `kinds` by the last part of a tensor's name."""
    tensors = tiny_llama_tensors()
    tensors = {k: v if "norm" in k else v * np.float32(0.2) for k, v in tensors.items()}
    for layer in range(2):
        for name, heads in (("attn_q", 4), ("attn_k", 2)):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = rotate_rows(tensors[key], heads)
    types = {n: kinds[k] for n in tensors for k in kinds if n.removesuffix(".weight").endswith(k)}
    return write_gguf(path, tensors, TINY_LLAMA, types=types)


def source_of(path: Path, data: Path) -> TensorSource:
    store = ModelStore(data, [path.parent])
    manifest = store.resolve(str(path), local_client=True).manifest
    place = data / "source.json"
    store.write_source(manifest, needed_tensors(manifest, 0, 1, True, True), place)
    return TensorSource.open(place)


def stage_of(source: TensorSource, dtype: str) -> StageModel:
    return StageModel.load(
        source, layers=(0, 1), embedding=True, head=True, dtype=dtype, blocks=8, block_size=4, chunk_tokens=16
    )


KINDS = {
    "token_embd": Q.Q8_0,
    "attn_q": Q.Q4_0,
    "attn_k": Q.Q4_1,
    "attn_v": Q.Q5_0,
    "attn_output": Q.Q5_1,
    "ffn_gate": Q.Q4_1,
    "ffn_up": Q.F16,
    "ffn_down": Q.Q8_0,
}


def test_a_files_own_groups_are_kept_value_for_value(tmp_path: Path) -> None:
    """Rows of queries and keys lie in another order in the file, and each comes to its place."""
    source = source_of(gguf_file(tmp_path / "m.gguf", KINDS), tmp_path / "data")
    stage = stage_of(source, "int4")
    weights = open_weights(source)
    kept = 0
    for name, module in stage._modules.model.named_modules():
        if isinstance(module, GroupLinear):
            matrix = module.table
            target = "model.embed_tokens.weight" if name == "lm_head" else f"{name}.weight"
            want = weights.load(target, torch.float32).numpy()
            got = matrix.take(np.arange(matrix.rows))
            if name.endswith("up_proj"):  # left in floats by the file's author: 8 bits
                assert matrix.layout.name == "Q8_0"
                assert 0 < np.abs(got - want).max() <= np.abs(want).max() / 200
            else:
                np.testing.assert_array_equal(got, want)
                kept += 1
    assert kept == 2 * 6 + 1
    exact = stage_of(source, "float32")
    rows, ids = [Row(1, 0, 6, tuple(range(8)), "logits")], [1, 40, 3, 200, 5, 6]
    got, want = step([stage], rows, ids), step([exact], rows, ids)
    assert np.abs(got - want).max() < 0.03 * np.abs(want).max()


def test_bytes_are_planned_exactly_and_read_once(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", KINDS)
    manifest = build_model(path).manifest
    source = source_of(path, tmp_path / "data")
    stage = stage_of(source, "int4")
    profile = profile_model(manifest, "int4")
    assert stage.weight_bytes == profile.weight_bytes(0, 1)
    assert source.bytes_read <= manifest.tensor_bytes


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", KINDS)
    reader = gguf.GGUFReader(str(path))
    (tensor,) = (t for t in reader.tensors if t.name == "blk.1.attn_v.weight")
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(ModelCorrupt, match=r"blk\.1\.attn_v\.weight.*not a finite"):
        stage_of(source_of(path, tmp_path / "data"), "int4")
