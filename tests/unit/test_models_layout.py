"""Which stage needs which tensor, and what a reference means."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pshard.errors import InvalidRequest
from p2pshard.models.layout import Place, layer_of, needed_tensors, tied_head
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.models.reference import parse_reference


@pytest.mark.parametrize(
    ("format", "name", "place"),
    [
        ("gguf", "token_embd.weight", "embedding"),
        ("gguf", "blk.17.attn_q.bias", 17),
        ("gguf", "output_norm.weight", "norm"),
        ("gguf", "output.weight", "head"),
        ("gguf", "rope_freqs.weight", None),
        ("gguf", "strange.weight", "shared"),
        ("safetensors", "model.embed_tokens.weight", "embedding"),
        ("safetensors", "model.layers.3.mlp.experts.12.down_proj.weight", 3),
        ("safetensors", "model.language_model.layers.40.input_layernorm.weight", 40),
        ("safetensors", "language_model.model.embed_tokens.weight", "embedding"),
        ("safetensors", "language_model.lm_head.weight", "head"),
        ("safetensors", "model.norm.weight", "norm"),
        ("safetensors", "transformer.h.2.attn.c_attn.bias", 2),
        ("safetensors", "transformer.wte.weight", "embedding"),
        ("safetensors", "transformer.ln_f.bias", "norm"),
        ("safetensors", "lm_head.weight", "head"),
        ("safetensors", "model.decoder.layers.5.fc1.weight", 5),
        ("safetensors", "model.vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", None),
        ("safetensors", "visual.blocks.3.attn.qkv.weight", None),
        ("safetensors", "model.audio_tower.layers.0.weight", None),
        ("safetensors", "multi_modal_projector.linear_1.weight", None),
        ("safetensors", "mtp.layers.0.mlp.up_proj.weight", None),
        ("safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("safetensors", "model.layers.0.self_attn.q_norm.weight", 0),
    ],
)
def test_layer_of(format: str, name: str, place: Place) -> None:
    assert layer_of(name, format) == place


def manifest(names: list[str], layers: int = 3, format: str = "gguf", **config: object) -> Manifest:
    tensors = tuple(TensorEntry(n, "F32", (1,), 4, "0" * 64) for n in names)
    return Manifest(format, {"num_hidden_layers": layers, **config}, tensors, "")


NAMES = [
    "token_embd.weight",
    *(f"blk.{i}.{w}.weight" for i in range(3) for w in ("a", "b")),
    "output_norm.weight",
]


def test_every_tensor_lies_on_one_stage_of_a_split() -> None:
    whole = manifest([*NAMES, "output.weight"])
    assert not tied_head(whole)
    stages = [(0, 0, True, False), (1, 1, False, False), (2, 2, False, True)]
    found = [t.name for stage in stages for t in needed_tensors(whole, *stage)]
    assert sorted(found) == sorted([*NAMES, "output.weight"])


def test_a_tied_head_needs_the_embedding() -> None:
    tied = manifest(NAMES)
    assert tied_head(tied)
    assert [t.name for t in needed_tensors(tied, 2, 2, False, True)] == [
        "token_embd.weight",
        "blk.2.a.weight",
        "blk.2.b.weight",
        "output_norm.weight",
    ]
    assert [t.name for t in needed_tensors(tied, 1, 1, False, False)] == ["blk.1.a.weight", "blk.1.b.weight"]


def test_prediction_layers_behind_the_last_are_left_out() -> None:
    model = manifest([f"model.layers.{i}.w" for i in range(4)], layers=3, format="safetensors")
    assert [t.name for t in needed_tensors(model, 0, 2, True, True)] == [
        f"model.layers.{i}.w" for i in range(3)
    ]


@pytest.mark.parametrize("layers", [(0, 3), (-1, 0), (2, 1)])
def test_layers_outside_the_model(layers: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="of a model with 3"):
        needed_tensors(manifest(NAMES), *layers, True, True)


def test_references(tmp_path: Path) -> None:
    assert parse_reference("smollm2-135m-instruct").path is None
    file = parse_reference("./m-00001-of-00003.gguf", base=tmp_path)
    assert (file.name, file.path, file.text) == ("m", tmp_path / "m-00001-of-00003.gguf", str(file.path))
    assert parse_reference("m.gguf", base=tmp_path).path == tmp_path / "m.gguf"
    assert parse_reference("../x/", base=tmp_path).path == tmp_path.parent / "x"
    assert parse_reference(str(tmp_path / "a.b")).name == "a.b"


@pytest.mark.parametrize("text", ["", "./m.gguf", "a b", "-x", "x" * 200, "a\0b", "$(x)", "é"])
def test_references_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_reference(text)
