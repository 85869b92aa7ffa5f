"""Every architecture: cut in two and three, fed in chunks, it equals plain transformers; or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from p2pshard_node.engine import build as build_module
from p2pshard_node.engine.stage import StageModel

from p2pshard.errors import UnsupportedModel
from tests.unit.engine_helpers import LLAMA, DirectoryWeights, close, expected, reference, run, split, tokens

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
BASE: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}

EXACT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {},
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": {},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
}

REFUSED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4},
    "opt": {"ffn_dim": 64},
    "falcon": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3_next": {**MOE, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {},
    "lfm2": {"full_attn_idxs": [1]},
    "gemma4_text": {},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
}


def made(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, "model_type": name, **changes}


def save(model: Any, folder: Any) -> DirectoryWeights:
    """Through a checkpoint, so that names and experts are as published models have them."""
    model.save_pretrained(folder)
    return DirectoryWeights(folder)


@pytest.mark.parametrize("name", EXACT)
def test_cut_and_chunked_equals_whole(name: str, tmp_path: Any) -> None:
    config = made(name, EXACT[name])
    whole = reference(config)
    config = {**whole.config.to_dict(), "num_hidden_layers": 4}
    weights = save(whole, tmp_path)
    ids = tokens(19)
    want = expected(whole, ids)
    for starts in ([2], [1, 3]):
        stages = split(weights, config, starts)
        assert all(
            stage.numerics in ("invariant", "tolerant") and len(stage.fingerprint) == 64 for stage in stages
        )
        for chunk in (19, 7, 1):
            ends = [min(i + chunk, 19) - 1 for i in range(0, 19, chunk)]
            close(run(stages, ids, chunk), want[ends])


class Unread:
    """Weights that must not be opened."""

    def __call__(self) -> Any:
        raise AssertionError("weights were opened")


def refusal(config: dict[str, Any], weights: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        StageModel.from_weights(
            weights, config, layers=(1, 1), embedding=False, head=True,
            dtype="float32", blocks=8, block_size=4, chunk_tokens=16,
        )  # fmt: skip
    return caught.value.message


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_weights_are_read(name: str) -> None:
    config = {**BASE, "num_hidden_layers": 2, "model_type": name, **REFUSED[name]}
    if name == "falcon":
        del config["head_dim"]
    message = refusal(config, Unread())
    assert name in message and "not supported" in message and len(message) > len(name) + 40


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_structure_without_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that no list knows is refused too, and still before its weights are read."""
    monkeypatch.setattr(build_module, "check_config", lambda config: None)
    config = {**BASE, "num_hidden_layers": 2, "model_type": name, **REFUSED[name]}
    if name == "falcon":
        del config["head_dim"]
    assert name in refusal(config, Unread())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        *(
            ({"quantization_config": {"quant_method": method}}, method.upper())
            for method in ("awq", "gptq", "fp8", "mxfp4", "bitsandbytes")
        ),
        ({"model_type": "a_new_thing"}, "a_new_thing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_refused_by_configuration(changes: dict[str, Any], word: str) -> None:
    assert word in refusal({**BASE, **changes}, Unread())
