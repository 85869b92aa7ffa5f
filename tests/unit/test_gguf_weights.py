"""A random model, converted to GGUF as llama.cpp converts it, is the same model when it is read back.

The conversions here (rotary order, norms plus one, stacked experts, key names) are written from llama.cpp's
``convert_hf_to_gguf.py``, independently of the code under test; transformers judges by logits.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from p2pshard_node.engine.gguf_weights import Weights, open_weights
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.models.gguf_config import gguf_config
from p2pshard_node.models.store import ModelStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from p2pshard.errors import InvalidRequest, ModelCorrupt, UnsupportedModel
from p2pshard.models.dtypes import READABLE_GGUF
from p2pshard.models.gguf import read_gguf
from tests.unit.gguf_files import TINY_LLAMA, add_tokenizer, rotate_rows, tiny_llama_tensors, write_gguf

SIZES = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
KEYS = {
    "block_count": 3,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FOUR_NORMS = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_table(rope: dict[str, Any], width: int) -> np.ndarray:
    """``rope_freqs`` as llama.cpp computes it (``generate_extra_tensors``)."""
    factors = []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / width)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, Case] = {  # GGUF architecture, model_type, configuration, keys
    "llama": ("llama", "llama", {"rope_parameters": ROPE}, {"rope.freq_base": 10000.0}),
    "llama, head size of its own": (
        "llama",
        "llama",
        {"head_dim": 32, "rope_parameters": ROPE, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    ),
    "llama 3 rope": ("llama", "llama", {"rope_parameters": LLAMA3}, {"rope.freq_base": 500000.0}),
    "llama, biases, linear rope": (
        "llama",
        "llama",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mistral": (
        "llama",
        "mistral",
        {"sliding_window": 8, "rope_parameters": ROPE},
        {"attention.sliding_window": 8},
    ),
    "qwen2, yarn": (
        "qwen2",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 32, "rope_parameters": {**ROPE, "rope_theta": 1e6}},
        {"rope.freq_base": 1e6, "attention.key_length": 32, "attention.value_length": 32},
    ),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "rope_parameters": {**ROPE, "rope_theta": 1e6},
        },
        {
            "rope.freq_base": 1e6,
            "attention.key_length": 16,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
    ),
    "smollm3": (
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 5, "rope_parameters": {**ROPE, "rope_theta": 2e6}},
        {"block_count": 5, "rope.freq_base": 2e6},
    ),
    "granite": (
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
            "rope_parameters": ROPE,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.125, "logit_scale": 8.0},
    ),
    "olmo2": ("olmo2", "olmo2", {"rope_parameters": {**ROPE, "rope_theta": 5e5}}, {"rope.freq_base": 5e5}),
    "phi3": (
        "phi3",
        "phi3",
        {"rope_parameters": ROPE, "sliding_window": 9},
        {"rope.dimension_count": 16, "attention.sliding_window": 9},
    ),
    "phi3, long rope": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
                "short_factor": [1.0, 1.0, 1.25, 1.25, 1.5, 1.5, 2.0, 2.0],
            },
        },
        {"rope.dimension_count": 16, "rope.scaling.original_context_length": 32},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "rope_parameters": ROPE},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "block_count": 7,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}


def convert(state: dict[str, torch.Tensor], case: Case, config: Any) -> dict[str, np.ndarray]:
    """Tensors of a GGUF file from a state dict."""
    architecture, kind, _, _ = case
    names = FOUR_NORMS if kind.startswith(("gemma", "olmo2")) else LAYER
    out: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                out["output.weight"] = array
        elif name == "model.embed_tokens.weight":
            out["token_embd.weight"] = array
        elif name == "model.norm.weight":
            out["output_norm.weight"] = array
        else:
            _, _, layer, rest = name.split(".", 3)
            block = f"blk.{layer}"
            if rest == "mlp.experts.gate_up_proj":
                out[f"{block}.ffn_gate_exps.weight"], out[f"{block}.ffn_up_exps.weight"] = np.split(
                    array, 2, axis=1
                )
            elif rest == "mlp.experts.down_proj":
                out[f"{block}.ffn_down_exps.weight"] = array
            else:
                module, _, suffix = rest.rpartition(".")
                if architecture in ("llama", "smollm3", "granite") and module.endswith(("q_proj", "k_proj")):
                    heads = (
                        config.num_attention_heads
                        if module.endswith("q_proj")
                        else config.num_key_value_heads
                    )
                    array = rotate_rows(array, heads)
                out[f"{block}.{names[module]}.{suffix}"] = array
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_table(rope, config.head_dim)
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            out[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return out


def opened(tmp_path: Path, path: Path) -> tuple[Any, Weights, TensorSource]:
    store = ModelStore(tmp_path / "node", [])
    manifest = store.resolve(str(path), local_client=True).manifest
    store.write_source(manifest, manifest.tensors, tmp_path / "source.json")
    source = TensorSource.open(tmp_path / "source.json")
    return manifest, open_weights(source), source


@pytest.mark.parametrize("name", CASES)
def test_same_logits_after_the_round_trip(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[name]
    architecture, kind, changes, keys = case
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    original = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for (
            parameter
        ) in original.parameters():  # norms, too, and large enough that every part shows in the logits
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
    state = original.state_dict()
    path = write_gguf(
        tmp_path / "m.gguf", convert(state, case, config), {**KEYS, **keys}, architecture=architecture
    )

    manifest, weights, source = opened(tmp_path, path)
    config = AutoConfig.for_model(**manifest.config)
    assert config.model_type == kind
    again = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    loaded = {n: weights.load(n, torch.float32) for n in weights.names()}
    for n, tensor in loaded.items():
        assert weights.shape(n) == tensor.shape
        torch.testing.assert_close(tensor, state[n], rtol=0, atol=1e-6, msg=n)
        if tensor.dim() > 1:
            assert torch.equal(weights.load(n, torch.float32, rows=(1, 4)), tensor[1:4]), n
    missing, unexpected = again.load_state_dict(loaded, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    again.tie_weights()
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    assert source.bytes_read > 0


@pytest.mark.filterwarnings("ignore:invalid value")  # random bytes hold scales that are infinite or NaN
@pytest.mark.parametrize("kind", READABLE_GGUF)
def test_every_quantisation_is_dequantised_as_ggml_does(tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    storage = READABLE_GGUF[kind]
    random = np.random.default_rng(3)
    rows, width = 40, 256
    raw = random.integers(0, 256, (rows, width // storage.block * storage.nbytes), dtype=np.uint8)
    if kind in ("F32", "F16", "BF16"):
        raw = gguf.quants.quantize(random.normal(size=(rows, width)).astype(np.float32), number).view(
            np.uint8
        )
    expected = gguf.quants.dequantize(raw.reshape(rows, -1), number).reshape(rows, width)

    tensors = tiny_llama_tensors() | {"blk.0.ffn_down.weight": np.zeros((1, 1), np.float32)}
    writer_path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(str(writer_path), "llama")
    for key, value in TINY_LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    add_tokenizer(writer)
    for name, array in tensors.items():
        if name == "blk.0.ffn_down.weight":
            writer.add_tensor(name, raw, raw_dtype=number, raw_shape=raw.shape)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, weights, _ = opened(tmp_path, writer_path)
    found = weights.load("model.layers.0.mlp.down_proj.weight", torch.float32).numpy()
    assert np.array_equal(found, expected, equal_nan=True)


def test_a_stage_reads_the_bytes_of_its_tensors_and_no_more(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_tensors(), TINY_LLAMA)
    manifest, weights, source = opened(tmp_path, path)
    entry = next(t for t in manifest.tensors if t.name == "blk.1.attn_v.weight")
    weights.load("model.layers.1.self_attn.v_proj.weight", torch.bfloat16)
    assert source.bytes_read == entry.nbytes
    weights.load("model.layers.1.self_attn.v_proj.weight", torch.bfloat16, rows=(3, 7))
    assert source.bytes_read == entry.nbytes + 4 * 64 * 4


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_tensors(), TINY_LLAMA)
    _, weights, _ = opened(tmp_path, path)
    with pytest.raises(ModelCorrupt, match=r"model\.layers\.9"):
        weights.load("model.layers.9.mlp.up_proj.weight", torch.float32)
    with pytest.raises(InvalidRequest, match="rows 3 to 999"):
        weights.load("model.embed_tokens.weight", torch.float32, rows=(3, 999))


def test_loading_takes_little_more_than_the_result(tmp_path: Path) -> None:
    """68 MB of blocks become 128 MB of bfloat16 with less than 64 MB beside them."""
    tensors = tiny_llama_tensors()
    tensors["token_embd.weight"] = np.ones((1_000_000, 64), np.float32)
    types = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", tensors, TINY_LLAMA, types=types)
    _, weights, _ = opened(tmp_path, path)
    tracemalloc.start()  # sees numpy's and Python's memory; the tensor itself is torch's
    tensor = weights.load("model.embed_tokens.weight", torch.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tensor == 1).all()
    assert peak < 64 * 2**20


def _config(tmp_path: Path, architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    tensors: dict[str, np.ndarray] = changes.pop("tensors", None) or tiny_llama_tensors()
    path = write_gguf(tmp_path / "c.gguf", tensors, {**TINY_LLAMA, **changes}, architecture=architecture)
    model = read_gguf(path)

    def read(name: str) -> np.ndarray:
        return tensors[name]

    return gguf_config(model, read)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: _config(p, "mamba2"), "architecture 'mamba2'"),
        (lambda p: _config(p, "clip"), "architecture 'clip'"),
        (lambda p: _config(p, **{"general.type": "adapter"}), "'adapter'"),
        (lambda p: _config(p, expert_count=8), "mixture of experts"),
        (lambda p: _config(p, **{"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}), "'spiral'"),
        (lambda p: _config(p, **{"attention.head_count_kv": [2, 1]}), "differs between layers"),
        (
            lambda p: _config(
                p, tensors=tiny_llama_tensors() | {"rope_freqs.weight": np.full(8, 3, np.float32)}
            ),
            "rope_freqs",
        ),
        (
            lambda p: _config(
                p, tensors=tiny_llama_tensors() | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
            ),
            "biases on attn_q",
        ),
    ],
)
def test_what_we_do_not_honour_is_refused_by_name(
    tmp_path: Path, build: Callable[[Path], Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build(tmp_path)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match=r"llama\.embedding_length"):
        _config(tmp_path, embedding_length="wide")


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors() | {"blk.0.mystery.weight": np.zeros(4, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.mystery"):
        opened(tmp_path, write_gguf(tmp_path / "m.gguf", tensors, TINY_LLAMA))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_real_files_load_as_transformers_loads_them(tmp_path: Path, name: str) -> None:
    from tests.unit.text_models import model_path

    torch.set_num_threads(1)
    path = model_path(name)
    manifest, weights, _ = opened(tmp_path, path)
    config = AutoConfig.for_model(**manifest.config)
    other = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ignored = {
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "unk_token_id",
    }  # ids: tested with the tokenizer
    ignored |= {"_name_or_path", "_model_name_or_path"}
    assert {k: v for k, v in config.to_dict().items() if k not in ignored} == {
        k: v for k, v in other.items() if k not in ignored
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(weights.names()) == set(theirs)
    for n in weights.names():
        assert torch.equal(weights.load(n, torch.float32), theirs[n]), n
