"""Tiny random models, their weights by name, and several stages run as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from p2pshard_node.engine.stage import Row, StageModel, StepBatch
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

torch.set_num_threads(1)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def reference(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A random model of plain transformers, in float32 with its eager attention."""
    torch.manual_seed(seed)
    values = {k: v for k, v in config.items() if k != "model_type"}
    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(values)
    model = AutoModelForCausalLM.from_config(parsed, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # large enough that every layer decides; norms and sinks away from their initial zeros and ones
            if parameter.ndim >= 2:
                parameter.normal_(0, 1.6 / parameter.shape[-1] ** 0.5)
            elif "norm" in name or "sinks" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.requires_grad_(False)


class DirectoryWeights:
    """The tensors of a Hugging Face directory, counting what is read."""

    def __init__(self, folder: Path) -> None:
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self.read: dict[str, int] = {}

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def load(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        part = self._files[name].get_slice(name)
        tensor = part[...] if rows is None else part[rows[0] : rows[1]]
        self.read[name] = self.read.get(name, 0) + tensor.nbytes
        return tensor.to(dtype)


def load(
    weights: Any, config: dict[str, Any], layers: tuple[int, int], count: int, **changes: Any
) -> StageModel:
    """Layers [first, last] of `count`, with the embedding and head where they belong."""
    settings: dict[str, Any] = {
        "layers": layers,
        "embedding": layers[0] == 0,
        "head": layers[1] == count - 1,
        "dtype": "float32",
        "blocks": 32,
        "block_size": 4,
        "chunk_tokens": 64,
    }
    return StageModel.from_weights(lambda: weights, config, **{**settings, **changes})


def split(weights: Any, config: dict[str, Any], starts: Sequence[int], **changes: Any) -> list[StageModel]:
    """Stages that begin at layers 0 and `starts`."""
    count = int(config["num_hidden_layers"])
    edges = [0, *starts, count]
    return [load(weights, config, (a, b - 1), count, **changes) for a, b in pairwise(edges)]


def step(stages: Sequence[StageModel], rows: Sequence[Row], ids: Sequence[int]) -> np.ndarray:
    """One step through all the stages: logits [R, V]."""
    batch = StepBatch(tuple(rows), np.array(ids, dtype=np.int32))
    hidden = None
    for stage in stages:
        hidden = stage.forward(batch, hidden)
        assert hidden.dtype == np.float32
    return hidden


def run(
    stages: Sequence[StageModel], ids: Sequence[int], chunk: int, blocks: tuple[int, ...] = tuple(range(32))
) -> np.ndarray:
    """Logits of the last token of each chunk, [ceil(T / chunk), V]."""
    rows = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows.append(step(stages, [Row(1, start, len(part), blocks, "logits")], part)[0])
    return np.stack(rows)


def expected(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """Logits of every token by the model whole, [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Within 1e-5 of the logits' own scale."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, float(np.abs(want).max())))


def tokens(count: int, vocabulary: int = 97, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
