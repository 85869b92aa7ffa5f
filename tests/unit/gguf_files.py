"""GGUF files for tests, written by the ``gguf`` package, as llama.cpp would write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from p2pshard_node.models.gguf_tokenizer import _alphabet


def add_tokenizer(writer: gguf.GGUFWriter, *, pre: str = "qwen2") -> int:
    """A byte-level vocabulary of 256 bytes, a few merges and three control tokens; its size."""
    tokens = [*_alphabet(), "he", "ll", "hell", "<|im_start|>", "<|im_end|>", "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 259 + [3, 3, 4])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    writer.add_chat_template("{{ messages[0].content }}")
    return len(tokens)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    *,
    architecture: str = "llama",
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    split: tuple[int, int, int] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a file of float32, or of what ``types`` says; ``split``: part, parts, tensors in all."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        key = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tokenizer:
        add_tokenizer(writer)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(
                name, gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TINY_LLAMA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def tiny_llama_tensors(seed: int = 0, vocab: int = 262) -> dict[str, np.ndarray]:
    """Random tensors for `TINY_LLAMA`, with a tied head."""
    random = np.random.default_rng(seed)
    out = {"token_embd.weight": random.normal(size=(vocab, 64)), "output_norm.weight": random.normal(size=64)}
    shapes = {
        "attn_norm": (64,),
        "ffn_norm": (64,),
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
    }
    for layer in range(2):
        for name, shape in shapes.items():
            out[f"blk.{layer}.{name}.weight"] = random.normal(size=shape)
    return {name: array.astype(np.float32) for name, array in out.items()}


def rotate_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to queries and keys of Llama's relatives (``LlamaModel.permute``)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )
