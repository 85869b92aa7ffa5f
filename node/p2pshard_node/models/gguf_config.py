"""GGUF metadata → a transformers configuration. Pure but for two small tensors of rope factors.

Everything that a file states about a model's shape is set even where it equals the configuration class's
default: those defaults are one checkpoint's. What a file states and we would not honour is refused by name.
Conventions are llama.cpp's (``convert_hf_to_gguf.py`` and ``src/models``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.gguf import GgufModel

__all__ = ["ARCHITECTURES", "gguf_config"]

ReadFloats = Callable[[str], np.ndarray]
"""Name of an F32 tensor → its values, flat."""


class _Keys:
    """Typed access to one architecture's keys."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.where = str(model.paths[0])
        self.prefix = model.architecture
        self.shapes = {t.name: t.shape for t in model.tensors}

    def get(self, key: str) -> Any:
        return self.model.metadata.get(f"{self.prefix}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelCorrupt(f"{self.where}: {self.prefix}.{key} is {value!r}; a number was expected")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # written once per layer, the same for all
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.where}: {self.prefix}.{key} differs between layers: not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ModelCorrupt(
                f"{self.where}: {self.prefix}.{key} is {value!r}; a positive integer is expected"
            )
        return value

    def refuse(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {what}, which is not supported")


def _common(keys: _Keys, model_type: str, *, head_dim: bool) -> dict[str, Any]:
    """What all architectures here have; ``head_dim`` where the configuration states it."""
    embedding = keys.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelCorrupt(f"{keys.where}: no token_embd.weight in it")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if embedding[1] != hidden:
        raise ModelCorrupt(f"{keys.where}: token_embd.weight has rows of {embedding[1]}, not {hidden}")
    key_length = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", key_length) != key_length:
        raise keys.refuse(f"{keys.prefix} with different key and value lengths")
    config = {
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.shapes,
    }
    if head_dim:
        config["head_dim"] = key_length
    return config


def _rope(keys: _Keys, read: ReadFloats, head_dim: int, default_theta: float = 10_000.0) -> dict[str, Any]:
    """``rope_parameters``, with scaling from keys or from the table of Llama 3."""
    theta = keys.number("rope.freq_base", default_theta)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotary = keys.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        rope["partial_rotary_factor"] = rotary / head_dim
    kind = keys.get("rope.scaling.type")
    linear = keys.number("rope.scale_linear", 1.0)
    if kind in (None, "none") and linear != 1.0:
        kind, factor = "linear", linear
    elif kind not in (None, "none"):
        factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if (attention := keys.number("rope.scaling.attn_factor", 1.0)) != 1.0:
            rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    elif kind not in (None, "none"):
        raise keys.refuse(f"rope scaling of type {kind!r} in a {keys.prefix} model")
    if "rope_freqs.weight" in keys.shapes:
        if rope["rope_type"] != "default":
            raise keys.refuse("a table of rope factors together with another rope scaling")
        rope |= _llama3_scaling(keys, read, theta, rotary)
    return rope


def _llama3_scaling(keys: _Keys, read: ReadFloats, theta: float, rotary: int) -> dict[str, Any]:
    """Recover Llama 3's rope parameters, which a GGUF file stores as the resulting factors.

    All published Llama 3.1 to 3.3 models share three of the four; the table must agree with what they give.
    """
    table = read("rope_freqs.weight").astype(np.float64)
    factor, low, high, original = float(table.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
        raise keys.refuse("a table of rope factors (rope_freqs) that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _biases(keys: _Keys) -> set[str]:
    return {n.split(".")[2] for n in keys.shapes if n.startswith("blk.0.") and n.endswith(".bias")}


def _llama(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    """Llama, and Mistral, which llama.cpp writes as Llama (told apart by its window)."""
    if keys.integer("expert_count", 1) > 1:
        raise keys.refuse("a mixture of experts in the GGUF architecture 'llama' (Mixtral)")
    config = _common(keys, "llama", head_dim=True)
    biases = _biases(keys)
    attention = {"attn_q", "attn_k", "attn_v", "attn_output"}
    if biases and biases != attention:
        raise keys.refuse(f"biases on {', '.join(sorted(biases))} in a llama model")
    config |= {
        "hidden_act": "silu",
        "attention_bias": bool(biases),
        "mlp_bias": False,
        "rope_parameters": _rope(keys, read, config["head_dim"]),
    }
    if keys.get("attention.sliding_window") is not None:
        if biases:
            raise keys.refuse("a sliding window with attention biases in a llama model")
        config |= {"model_type": "mistral", "sliding_window": keys.integer("attention.sliding_window")}
    return config


def _qwen2(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "qwen2", head_dim=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    if keys.integer("attention.key_length", head_dim) != head_dim:
        raise keys.refuse("a head size other than hidden size / heads in a qwen2 model")
    return config | {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(keys, read, head_dim),
    }


def _qwen3(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "qwen3", head_dim=True)
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_parameters": _rope(keys, read, config["head_dim"], 1_000_000.0),
    }


def _qwen3moe(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    return _qwen3(keys, read) | {
        "model_type": "qwen3_moe",
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's graph always normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _smollm3(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "smollm3", head_dim=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "rope_parameters": _rope(keys, read, head_dim, 2_000_000.0),
    }


def _granite(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "granite", head_dim=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    if _biases(keys):
        raise keys.refuse("biases in a granite model")
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", head_dim**-0.5),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "rope_parameters": _rope(keys, read, head_dim),
    }


def _olmo2(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    if keys.get("attention.sliding_window") is not None:
        raise keys.refuse("a sliding window in an olmo2 file (OLMo 3)")
    config = _common(keys, "olmo2", head_dim=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": _rope(keys, read, head_dim, 500_000.0),
    }


def _phi3(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "phi3", head_dim=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10_000.0)}
    rope["partial_rotary_factor"] = keys.integer("rope.dimension_count", head_dim) / head_dim
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope_factors_long.weight" in keys.shapes:
        rope |= {
            "rope_type": "longrope",
            "long_factor": [float(x) for x in read("rope_factors_long.weight")],
            "short_factor": [float(x) for x in read("rope_factors_short.weight")],
            "original_max_position_embeddings": original,
        }
        if keys.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    config |= {"hidden_act": "silu", "original_max_position_embeddings": original, "rope_parameters": rope}
    window = keys.get("attention.sliding_window")
    # 0 and windows that reach beyond the context both mean none
    config["sliding_window"] = window if isinstance(window, int) and 0 < window < 2**31 else None
    return config


def _gemma2(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "gemma2", head_dim=True)
    # As llama.cpp: the 27B model (46 layers) scales by its hidden size per head, the others by the head size.
    scale = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale if config["num_hidden_layers"] == 46 else config["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "rope_parameters": _rope(keys, read, config["head_dim"]),
    }


def _gemma3(keys: _Keys, read: ReadFloats) -> dict[str, Any]:
    config = _common(keys, "gemma3_text", head_dim=True)
    layers, pattern = config["num_hidden_layers"], keys.integer("attention.sliding_window_pattern", 6)
    scale = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale if layers == 62 else config["head_dim"],  # 62: the 27B model
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if i % pattern else "full_attention" for i in range(1, layers + 1)
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(keys, read, config["head_dim"], 1_000_000.0),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }


ARCHITECTURES: dict[str, Callable[[_Keys, ReadFloats], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""By ``general.architecture``."""


def gguf_config(model: GgufModel, read: ReadFloats) -> dict[str, Any]:
    """A transformers configuration for a GGUF model, without token ids.

    Args:
        model: the file's index.
        read: reads a small F32 tensor of rope factors.

    Raises:
        UnsupportedModel: an architecture, or a variant of one, that is not supported; by name.
        ModelCorrupt: a key that is missing or cannot be.
    """
    architecture = model.architecture
    if (kind := model.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{model.paths[0]}: holds an {kind!r}, not a language model")
    build = ARCHITECTURES.get(architecture)
    if build is None:
        raise UnsupportedModel(
            f"{model.paths[0]}: the GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}",
            architecture=architecture,
        )
    return build(_Keys(model), read)
