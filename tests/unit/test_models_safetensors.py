"""Hugging Face folders: the index, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2pshard.errors import ModelCorrupt, P2PShardError, UnsupportedModel
from p2pshard.models.safetensors import read_folder, text_config

NAMES = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]


def write_folder(folder: Path, *, files: int = 1, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama", "num_hidden_layers": 1}))
    arrays = {name: np.full((4, i + 1), i, np.float32) for i, name in enumerate(NAMES)}
    if files == 1:
        save_file(arrays, folder / "model.safetensors")
        return folder
    weights = {}
    for i, name in enumerate(NAMES):
        file = f"model-{i + 1:05d}-of-{len(NAMES):05d}.safetensors"
        save_file({name: arrays[name]}, folder / file)
        weights[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def header(path: Path, value: Any, data: bytes = b"") -> None:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize("files", [1, 3])
def test_reads_every_tensor_where_it_lies(tmp_path: Path, files: int) -> None:
    model = read_folder(write_folder(tmp_path, files=files))
    assert {t.name for t in model.tensors} == set(NAMES)
    for tensor in model.tensors:
        data = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        values = np.frombuffer(data, "<f4").reshape(tensor.shape)
        assert (values == NAMES.index(tensor.name)).all()


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files=3)
    second = folder / "model-00002-of-00003.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    with pytest.raises(ModelCorrupt, match=r"model-00002-of-00003.*truncated"):
        read_folder(folder)
    second.unlink()
    with pytest.raises(ModelCorrupt, match=r"model-00002-of-00003\.safetensors: missing"):
        read_folder(folder)


def test_pickle_files_are_never_read(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelCorrupt, match=r"pytorch_model\.bin is a pickle"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m", files=3)
    save_file({NAMES[0]: np.zeros(1, np.float32)}, tmp_path / "other.safetensors")
    index = {"weight_map": {NAMES[0]: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorrupt, match="not in the folder"):
        read_folder(folder)


def test_links_stay_in_the_folder_or_in_the_blobs_of_its_cache(tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside") / "model.safetensors"
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    os.symlink(outside, folder / "model.safetensors")
    with pytest.raises(ModelCorrupt, match="link that leaves"):
        read_folder(folder)

    cached = write_folder(tmp_path / "models--a--b" / "snapshots" / "rev")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for name in ("model.safetensors", "config.json"):
        (cached / name).rename(blobs / name)
        os.symlink(Path("../../blobs") / name, cached / name)
    assert len(read_folder(cached).tensors) == 3


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "mxfp4", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path, method: str, nested: bool) -> None:
    inner: dict[str, Any] = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    folder = write_folder(tmp_path, config={"model_type": "x", "text_config": inner} if nested else inner)
    with pytest.raises(UnsupportedModel, match=method.upper()):
        read_folder(folder)


@pytest.mark.parametrize(
    ("dtype", "size", "words"),
    [("F8_E4M3", 1, "FP8"), ("I32", 4, "GPTQ"), ("U8", 1, "MXFP4"), ("F4", 1, "FP4"), ("Z9", 1, "Z9")],
)
def test_quantised_tensors_are_refused_by_name(tmp_path: Path, dtype: str, size: int, words: str) -> None:
    folder = write_folder(tmp_path)
    item = {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}
    header(folder / "model.safetensors", {NAMES[1]: item}, bytes(2 * size))
    with pytest.raises(UnsupportedModel, match=words):
        read_folder(folder)


def test_scales_of_fp8_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    save_file({NAMES[1] + "_scale_inv": np.zeros(2, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="FP8"):
        read_folder(folder)


def test_only_the_text_part_counts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    arrays = {
        "model.language_model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
        "model.vision_tower.encoder.layers.0.weight": np.zeros(3, np.float32),
        "vision_model.embeddings.position_ids": np.zeros(3, np.int64),
        "multi_modal_projector.weight": np.zeros(3, np.float32),
    }
    save_file(arrays, folder / "model.safetensors")
    assert [t.name for t in read_folder(folder).tensors] == [
        "model.language_model.layers.0.mlp.up_proj.weight"
    ]


def test_text_config_of_a_multimodal_model() -> None:
    inner = {"model_type": "gemma3_text", "eos_token_id": 7}
    outer = {"model_type": "gemma3", "text_config": inner, "eos_token_id": 1, "tie_word_embeddings": True}
    assert text_config(outer) == {"model_type": "gemma3_text", "eos_token_id": 7, "tie_word_embeddings": True}


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"[" * 100_000,
        b'{"a": 1, "a": 1}',
        b"\xff\xff",
        [],
        {"a": 1},
        {"a": {**GOOD, "shape": [3]}},
        {"a": {**GOOD, "shape": [-2]}},
        {"a": {**GOOD, "shape": [2.0]}},
        {"a": {**GOOD, "shape": [2**40, 2**40]}},
        {"a": {**GOOD, "data_offsets": [0, 8, 9]}},
        {"a": {**GOOD, "data_offsets": [-8, 0]}},
        {"a": {**GOOD, "data_offsets": [2**61, 2**61 + 8]}},
        {"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}},
    ],
)
def test_malformed_headers(tmp_path: Path, value: Any) -> None:
    folder = write_folder(tmp_path)
    header(folder / "model.safetensors", value, bytes(16))
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        read_folder(folder)


def test_header_length_beyond_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(100))
    with pytest.raises(ModelCorrupt, match="truncated"):
        read_folder(folder)


def test_mutated_headers_give_typed_errors_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(2)
    refused = 0
    for _ in range(1500):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(size)
            if chance.random() < 0.7:
                mutated[at] = chance.choice(b'0123456789{}[]":,-eF \x00\xff')
            else:
                del mutated[at : at + chance.randint(1, 9)]
        path.write_bytes(mutated)
        try:
            read_folder(folder)
        except P2PShardError as error:
            assert isinstance(error, ModelCorrupt | UnsupportedModel), error
            refused += 1
    assert refused > 500
