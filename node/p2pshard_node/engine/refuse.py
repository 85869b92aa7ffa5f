"""What this engine does not run, and why: decided from the configuration, before any weight is read.

A stage keeps nothing between steps but the keys and values of our own attention calls. Whatever mixes tokens
by another way (a recurrence, a convolution, attention that bypasses the interface) would be silently wrong
when a prompt comes in chunks; whatever needs more than the hidden state from the stage before cannot be cut.
`p2pshard_node.engine.build` and `p2pshard_node.engine.numerics` refuse by structure and by result what has
no name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pshard.errors import UnsupportedModel

__all__ = ["check_config"]

_POSITIONS = "it adds position embeddings before its first layer, which a later stage would add again"
_BYPASS = "its attention does not go through the interface that reads our key and value pool"
_RECURRENT = (
    "it has layers with a recurrent or convolution state, and only keys and values are kept between steps"
)
_PER_LAYER = "its layers need the token ids (per-layer embeddings), which only the first stage has"

_REASONS = {
    name: reason
    for reason, names in {
        _POSITIONS: "biogpt ctrl gpt2 gpt_bigcode gpt_neo openai-gpt opt xglm",
        _BYPASS: "bloom codegen falcon gptj mpt",
        _RECURRENT: "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba "
        "mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text "
        "qwen3_next recurrent_gemma rwkv xlstm zamba zamba2",
        _PER_LAYER: "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    }.items()
    for name in names.split()
}

_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
#: Their frequencies depend on the longest sequence of the batch, so one request would change another's
#: answer.
_BATCH_ROPES = ("dynamic", "longrope")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel`, naming the architecture and the reason, for a transformers configuration we
    cannot run."""
    name = config.get("model_type")
    if not name:
        raise UnsupportedModel("the configuration has no model_type")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = (
            quantisation.get("quant_method", "unknown")
            if isinstance(quantisation, Mapping)
            else str(quantisation)
        )
        raise UnsupportedModel(
            f"checkpoints quantised with {str(method).upper()} are not read; "
            "use an unquantised one or a GGUF file",
            quantisation=str(method),
        )
    if name in _REASONS:
        raise UnsupportedModel(f"{name} is not supported: {_REASONS[name]}", architecture=name)
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name} is not supported: it is not a decoder alone", architecture=name)
    others = sorted(set(config.get("layer_types") or ()) - set(_ATTENTION_LAYERS))
    if others:
        raise UnsupportedModel(
            f"{name} is not supported: layers of type {', '.join(others)}", architecture=name
        )
    for rope in _ropes(config):
        if rope in _BATCH_ROPES:
            raise UnsupportedModel(
                f"{name} with {rope} rotary embeddings is not supported: "
                "they depend on the longest sequence of a step",
                architecture=name,
            )


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Kinds of rotary embedding named anywhere under the two keys that hold them (one, or one a layer
    type)."""
    kinds: set[str] = set()
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if not isinstance(value, Mapping):
            continue
        for part in (value, *(v for v in value.values() if isinstance(v, Mapping))):
            kind = part.get("rope_type") or part.get("type")
            if isinstance(kind, str):
                kinds.add(kind)
    return kinds
