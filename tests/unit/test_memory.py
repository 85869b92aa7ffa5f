"""Bytes of a model from its manifest, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2pshard.errors import InvalidRequest, ModelCorrupt
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.memory import (
    blocks_for,
    kv_bytes,
    profile_model,
    resolve_dtype,
    smaller_dtypes,
    workspace_bytes,
)
from p2pshard.planning.plan import Epoch
from p2pshard.planning.planner import plan_model, plan_reply
from p2pshard.planning.profiles import NodeBudget
from p2pshard.planning.settings import Settings

D, V, F, KV = 64, 300, 128, 32
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 4096,
}
LINEAR = {"q_proj": (D, D), "k_proj": (KV, D), "v_proj": (KV, D), "o_proj": (D, D)}
MLP = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
LAYER_LINEAR = 2 * D * D + 2 * KV * D + 3 * F * D
LAYER_ROWS = 2 * D + 2 * KV + 2 * F + D
LAYER_NORMS = 2 * D


def manifest(dtype: str = "BF16", tied: bool = False, **config: Any) -> Manifest:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    for i in range(2):
        shapes |= {f"model.layers.{i}.self_attn.{n}.weight": s for n, s in LINEAR.items()}
        shapes |= {f"model.layers.{i}.mlp.{n}.weight": s for n, s in MLP.items()}
        shapes |= {
            f"model.layers.{i}.{n}.weight": (D,) for n in ("input_layernorm", "post_attention_layernorm")
        }
    return of("safetensors", dtype, shapes, {**CONFIG, "tie_word_embeddings": tied, **config})


def of(format: str, dtype: str, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> Manifest:
    def size(shape: tuple[int, ...]) -> int:
        return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)

    tensors = tuple(
        TensorEntry(n, "F32" if len(s) == 1 else dtype, s, size(s), "0" * 64) for n, s in shapes.items()
    )
    return Manifest(format, config, tensors, "")


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_float_weights_are_values_times_size(dtype: str, size: int) -> None:
    profile = profile_model(manifest(), dtype)
    assert profile.layer_bytes == ((LAYER_LINEAR + LAYER_NORMS) * size,) * 2
    assert (profile.embedding_bytes, profile.head_bytes) == (V * D * size, (V * D + D) * size)
    assert profile.shared_saving_bytes == 0 and profile.common_bytes == 0
    assert profile.kv_token_bytes == (2 * KV * size,) * 2


def test_a_tied_head_is_stored_once_on_one_stage_and_twice_on_two() -> None:
    profile = profile_model(manifest(tied=True), "float32")
    layers = 2 * (LAYER_LINEAR + LAYER_NORMS) * 4
    assert profile.weight_bytes(0, 1) == layers + (V * D + D) * 4
    assert profile.weight_bytes(0, 0) + profile.weight_bytes(1, 1) == layers + (2 * V * D + D) * 4


def test_int8_counts_rows_and_holds_a_tied_table_once() -> None:
    for tied in (False, True):
        profile = profile_model(manifest(tied=tied), "int8")
        assert profile.layer_bytes == (LAYER_LINEAR + 4 * LAYER_ROWS + 4 * LAYER_NORMS,) * 2
        assert profile.embedding_bytes == V * D + 4 * V
        assert profile.head_bytes == V * D + 4 * V + 4 * D
        assert profile.shared_saving_bytes == (V * D + 4 * V if tied else 0)
        assert profile.kv_token_bytes == (2 * KV * 4,) * 2


def test_int4_counts_the_files_groups_or_ours() -> None:
    """In bytes per 32 weights: 20 of four bits with scale and minimum, 34 of eight bits with a scale."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 512), "output_norm.weight": (512,)}
    shapes |= {
        "blk.0.attn_k.weight": (64, 512),
        "blk.0.attn_v.weight": (64, 512),
        "blk.0.ffn_up.weight": (160, 512),
    }
    config = {**CONFIG, "num_hidden_layers": 1, "hidden_size": 512}

    def bytes_of(dtype: str) -> tuple[int, int, int, int]:
        found = profile_model(of("gguf", dtype, shapes, config), "int4")
        return found.layer_bytes[0], found.embedding_bytes, found.head_bytes, found.shared_saving_bytes

    layer, table = 288 * 512 // 32, 320 * 512 // 32
    assert bytes_of("F16") == (layer * 20, table * 34, table * 34 + 4 * 512, table * 34)
    assert bytes_of("Q4_0") == (layer * 18, table * 18, table * 18 + 4 * 512, table * 18)
    # eight groups share two float16 and have two bytes each
    assert bytes_of("Q4_K") == (layer * 37 // 2, table * 37 // 2, table * 37 // 2 + 4 * 512, table * 37 // 2)
    # rows of 100 do not divide into groups: int8
    shapes = {name: (*shape[:-1], 100) for name, shape in shapes.items()}
    found = profile_model(of("gguf", "F16", shapes, config), "int4")
    assert found.layer_bytes == (288 * 104,) and found.embedding_bytes == 320 * 104
    assert found.head_bytes == 320 * 104 + 400 and found.shared_saving_bytes == 320 * 104


def test_what_the_author_of_a_grouped_file_left_in_floats_keeps_eight_bits() -> None:
    shapes = {
        "token_embd.weight": (320, 512),
        "blk.0.attn_k.weight": (64, 512),
        "blk.0.attn_v.weight": (64, 512),
    }
    config = {**CONFIG, "num_hidden_layers": 1, "hidden_size": 512}
    grouped, floats = (of("gguf", dtype, shapes, config) for dtype in ("Q4_K", "F16"))
    mixed = replace(grouped, tensors=(*grouped.tensors[:2], floats.tensors[2]))
    layer = 64 * 512 // 32
    assert profile_model(mixed, "int4").layer_bytes == (layer * 37 // 2 + layer * 34,)


def test_int8_keeps_routers_and_experts_in_float32() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes |= {
        "model.layers.0.mlp.gate.weight": (8, D),
        "model.layers.0.mlp.experts.7.up_proj.weight": (F, D),
        "model.layers.0.self_attn.k_proj.weight": (KV, D),
        "model.layers.0.self_attn.v_proj.weight": (KV, D),
    }
    config = {**CONFIG, "num_hidden_layers": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 100}
    profile = profile_model(of("safetensors", "BF16", shapes, config), "int8")
    assert profile.layer_bytes == (4 * 8 * D + 4 * F * D + 2 * (KV * D + 4 * KV),)
    assert profile.intermediate == 300


def test_gguf_names_count_alike() -> None:
    shapes = {"token_embd.weight": (V, D), "output_norm.weight": (D,), "rope_freqs.weight": (8,)}
    for i in range(2):
        names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
        shapes |= {f"blk.{i}.{g}.weight": LINEAR[h] for g, h in names.items()}
        shapes |= {f"blk.{i}.ffn_{n.removesuffix('_proj')}.weight": s for n, s in MLP.items()}
        shapes |= {f"blk.{i}.{n}.weight": (D,) for n in ("attn_norm", "ffn_norm")}
    for dtype in ("float32", "bfloat16", "int8"):
        a = profile_model(of("gguf", "Q4_K", shapes, CONFIG), dtype)
        b = profile_model(manifest(tied=True), dtype)
        assert (a.layer_bytes, a.embedding_bytes, a.head_bytes) == (
            b.layer_bytes,
            b.embedding_bytes,
            b.head_bytes,
        )
        assert a.kv_token_bytes == b.kv_token_bytes and a.shared_saving_bytes == b.shared_saving_bytes


def test_latent_attention_keeps_expanded_keys_and_values() -> None:
    config = {"kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20}
    assert profile_model(manifest(**config), "float32").kv_token_bytes == (4 * (24 + 8 + 20) * 4,) * 2


@pytest.mark.parametrize(
    ("format", "stored", "expected"),
    [
        ("safetensors", "F32", "float32"),
        ("safetensors", "BF16", "bfloat16"),
        ("safetensors", "F16", "float16"),
        ("safetensors", "F64", "float32"),
        ("gguf", "F32", "float32"),
        ("gguf", "F16", "bfloat16"),
        ("gguf", "BF16", "bfloat16"),
        ("gguf", "Q4_K", "int4"),
        ("gguf", "Q6_K", "int4"),
        ("gguf", "Q2_K", "int8"),
        ("gguf", "Q8_0", "int8"),
    ],
)
def test_auto_follows_the_file(format: str, stored: str, expected: str) -> None:
    shapes = {t.name: t.shape for t in manifest().tensors}
    if format == "gguf":
        shapes = {"token_embd.weight": (V, D), "blk.0.attn_q.weight": (D, D)}
    assert resolve_dtype(of(format, stored, shapes, CONFIG), "auto") == expected
    assert resolve_dtype(of(format, stored, shapes, CONFIG), "float16") == "float16"


def test_dtypes_that_are_smaller() -> None:
    assert smaller_dtypes("float32") == ("bfloat16", "int8", "int4")
    assert smaller_dtypes("float16") == smaller_dtypes("bfloat16") == ("int8", "int4")
    assert smaller_dtypes("int8") == ("int4",)
    assert smaller_dtypes("int4") == ()
    with pytest.raises(InvalidRequest, match="fp4"):
        resolve_dtype(manifest(), "fp4")


def test_kv_is_whole_blocks_for_every_full_context() -> None:
    profile = profile_model(manifest(), "float32")
    assert blocks_for(1, 1) == 1 and blocks_for(16, 3) == 3 and blocks_for(17, 3) == 6
    assert kv_bytes(profile, 0, 1, blocks_for(100, 2)) == 2 * 7 * 16 * 2 * KV * 4 * 2


def test_workspace_grows_with_context_step_and_head() -> None:
    profile = profile_model(manifest(), "float32")
    small = workspace_bytes(profile, 1024, 32, head=False)
    assert workspace_bytes(profile, 1 << 20, 32, head=False) > small
    assert workspace_bytes(profile, 1 << 20, 256, head=False) > workspace_bytes(
        profile, 1 << 20, 32, head=False
    )
    assert workspace_bytes(profile, 1 << 20, 32, head=True) - workspace_bytes(
        profile, 1 << 20, 32, head=False
    ) == (3 * 32 * V * 4)


def test_files_that_do_not_match_their_configuration_are_refused() -> None:
    with pytest.raises(ModelCorrupt, match="nothing of layer 2"):
        profile_model(manifest(num_hidden_layers=3), "float32")
    with pytest.raises(ModelCorrupt, match="hidden_size"):
        profile_model(manifest(hidden_size=None), "float32")
    with pytest.raises(InvalidRequest, match="how many layers"):
        profile_model(manifest(num_hidden_layers=None), "float32")
    only_layers = {"model.layers.0.mlp.up_proj.weight": (F, D)}
    with pytest.raises(ModelCorrupt, match="no token embedding"):
        profile_model(of("safetensors", "F32", only_layers, {**CONFIG, "num_hidden_layers": 1}), "float32")


def test_the_reply_of_a_plan_that_fits_and_of_one_that_does_not() -> None:
    model = manifest()
    roomy = [NodeBudget("a", "alpha", budget_bytes=10**9, base_bytes=10**8)]
    reply = plan_reply(roomy, model, "tiny", [], Settings(), Epoch(3, "a"))
    assert reply["fits"] and reply["shortfall_bytes"] == 0 and reply["suggestions"] == []
    plan = plan_model(roomy, model, "tiny", [], Settings(), Epoch(3, "a"))
    assert reply["plan"] == plan.to_json()
    assert (plan.model, plan.manifest, plan.dtype, plan.context) == ("tiny", model.digest, "bfloat16", 4096)
    tight = [NodeBudget("a", "alpha", budget_bytes=10**8 + 10**6, base_bytes=10**8)]
    reply = plan_reply(tight, model, "tiny", [], Settings(), Epoch(3, "a"))
    assert not reply["fits"] and reply["plan"] is None and reply["shortfall_bytes"] > 0
    more = [
        NodeBudget(
            "a", "alpha", budget_bytes=tight[0].budget_bytes + reply["shortfall_bytes"], base_bytes=10**8
        )
    ]
    assert plan_reply(more, model, "tiny", [], Settings(), Epoch(3, "a"))["fits"]
    assert reply["terms"][0]["node"] == "alpha" and "alpha" not in reply["message"]
