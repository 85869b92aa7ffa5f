"""Weights of a source as torch tensors, whatever the files' format.

Safetensors: as the file names them. GGUF: under the names of transformers' parameters, with llama.cpp's
changes undone: rotary rows of queries and keys are in another order for Llama's relatives, Gemma's norms have
one added, experts' gate and up projections are two tensors. Blocks are dequantised some rows at a time,
straight into the target, so that a 151,936 x 1,536 embedding costs its own bytes and a few MB, not a second
copy.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import torch

from p2pshard.errors import InvalidRequest, ModelCorrupt, UnsupportedModel
from p2pshard.models.dtypes import READABLE_GGUF
from p2pshard.models.groups import LAYOUTS, GroupLayout, grouped_as, has_groups
from p2pshard.models.manifest import TensorEntry
from p2pshard_node.engine.groups.repack import GroupRows, repack
from p2pshard_node.engine.source import TensorSource

__all__ = ["Weights", "open_weights"]

_CHUNK_VALUES = 1 << 20
"""Values dequantised at a time: about 16 MB with numpy's temporaries."""

Rows = tuple[int, int] | None
"""First row and the one after the last, of the first axis; None: all."""


class Weights(ABC):
    """Tensors by name."""

    @abstractmethod
    def names(self) -> list[str]:
        """All that the source has."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `ModelCorrupt` for a name that is not there."""

    @abstractmethod
    def load(self, name: str, dtype: torch.dtype, rows: Rows = None) -> torch.Tensor:
        """A new tensor on the CPU, of the whole or of some rows.

        Raises:
            ModelCorrupt: not there, or the file is short.
            InvalidRequest: rows outside the tensor.
        """


def open_weights(source: TensorSource) -> Weights:
    """The weights of a source. Raises `UnsupportedModel` for a GGUF tensor that has no place in the model."""
    if source.manifest.format == "gguf":
        return _GgufWeights(source)
    return _SafetensorsWeights(source)


def _rows(rows: Rows, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    if rows is None:
        return 0, shape[0] if shape else 1
    if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
        raise InvalidRequest(f"rows {rows[0]} to {rows[1]} of tensor {name!r} of shape {shape}")
    return rows


# -- safetensors ----------------------------------------------------------------------------------
_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _SafetensorsWeights(Weights):
    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> list[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.entry(name).shape

    def load(self, name: str, dtype: torch.dtype, rows: Rows = None) -> torch.Tensor:
        entry = self._source.entry(name)
        stored = _TORCH.get(entry.dtype)
        if stored is None:
            raise UnsupportedModel(f"tensor {name!r} is stored as {entry.dtype}, which is not read here")
        first, end = _rows(rows, entry.shape, name)
        shape = (end - first, *entry.shape[1:]) if entry.shape else ()
        out = torch.empty(shape, dtype=dtype)
        flat = out.view(-1)
        begin = first * (math.prod(entry.shape[1:]) if entry.shape else 1)
        for at in range(0, flat.numel(), _CHUNK_VALUES):
            count = min(_CHUNK_VALUES, flat.numel() - at)
            data = self._source.read_range(name, (begin + at) * stored.itemsize, count * stored.itemsize)
            flat[at : at + count] = torch.frombuffer(data, dtype=stored)
        return out


# -- GGUF -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Part:
    """One GGUF tensor that a parameter is made of."""

    name: str
    heads: int = 0
    """Above 0: rows lie as llama.cpp rotates them, with so many heads."""
    minus_one: bool = False


_DENSE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_down_exps": "mlp.experts.down_proj"}
_LAYERS: dict[str, dict[str, str]] = {
    "llama": _DENSE | _PRE_NORMS,
    "mistral": _DENSE | _PRE_NORMS,
    "smollm3": _DENSE | _PRE_NORMS,
    "granite": _DENSE | _PRE_NORMS,
    "qwen2": _DENSE | _PRE_NORMS,
    "qwen3": _DENSE | _PRE_NORMS | _QK_NORMS,
    "qwen3_moe": _DENSE | _PRE_NORMS | _QK_NORMS | _EXPERTS,
    "olmo2": _DENSE
    | _QK_NORMS
    | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": _PRE_NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "gemma2": _DENSE | _GEMMA_NORMS,
    "gemma3_text": _DENSE | _GEMMA_NORMS | _QK_NORMS,
}
"""By ``model_type``: a GGUF tensor of a layer → the module of the layer."""
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROTATED = frozenset({"llama", "mistral", "smollm3", "granite"})
_MINUS_ONE = frozenset({"gemma2", "gemma3_text"})
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GATE, _UP = "ffn_gate_exps", "ffn_up_exps"


class _GgufWeights(Weights):
    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._config = source.manifest.config
        self._kind = str(self._config.get("model_type"))
        if self._kind not in _LAYERS:
            raise UnsupportedModel(
                f"GGUF weights of {self._kind!r} are not supported", architecture=self._kind
            )
        self._parts: dict[str, tuple[_Part, ...]] = {}
        present = set(source.names)
        for name in source.names:
            if name.startswith("rope_"):
                continue  # in the configuration already
            target, parts = self._place(name, present)
            self._parts[target] = parts

    def _place(self, name: str, present: set[str]) -> tuple[str, tuple[_Part, ...]]:
        """The parameter that a tensor belongs to, and all that it is made of."""
        match = _LAYER_TENSOR.fullmatch(name)
        base, _, suffix = name.rpartition(".")
        if match is None:
            if base not in _OUTSIDE:
                raise self._no_place(name)
            return f"{_OUTSIDE[base]}.{suffix}", (self._part(name, base),)
        layer, base, suffix = match.groups()
        if base in (_GATE, _UP) and self._kind == "qwen3_moe":
            pair = tuple(_Part(f"blk.{layer}.{half}.weight") for half in (_GATE, _UP))
            if missing := [p.name for p in pair if p.name not in present]:
                raise ModelCorrupt(f"tensor {missing[0]!r} is missing beside {name!r}")
            return f"model.layers.{layer}.mlp.experts.gate_up_proj", pair
        module = _LAYERS[self._kind].get(base)
        if module is None:
            raise self._no_place(name)
        target = f"model.layers.{layer}.{module}"
        # a stack of experts is a parameter itself, not the weight of a module
        return (target if base.endswith("_exps") else f"{target}.{suffix}"), (self._part(name, base),)

    def _part(self, name: str, base: str) -> _Part:
        heads = 0
        if self._kind in _ROTATED and base in ("attn_q", "attn_k"):
            heads = self._config["num_attention_heads" if base == "attn_q" else "num_key_value_heads"]
        return _Part(name, heads, self._kind in _MINUS_ONE and base.endswith("norm"))

    def _no_place(self, name: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"tensor {name!r} of a GGUF file has no place in a {self._kind} model", tensor=name
        )

    def names(self) -> list[str]:
        return list(self._parts)

    def _find(self, name: str) -> tuple[_Part, ...]:
        parts = self._parts.get(name)
        if parts is None:
            raise ModelCorrupt(f"no tensor of the GGUF file gives the parameter {name!r}")
        return parts

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._find(name)
        shape = self._source.entry(parts[0].name).shape
        if len(parts) == 1:
            return shape
        other = self._source.entry(parts[1].name).shape
        if len(shape) != 3 or shape != other:
            raise ModelCorrupt(f"experts' gate and up projections have the shapes {shape} and {other}")
        return (shape[0], 2 * shape[1], shape[2])

    def load(self, name: str, dtype: torch.dtype, rows: Rows = None) -> torch.Tensor:
        shape, parts = self.shape(name), self._find(name)
        first, end = _rows(rows, shape, name)
        out = torch.empty((end - first, *shape[1:]), dtype=dtype)
        if len(parts) == 2:  # gate rows, then up rows, of each expert
            for index, part in enumerate(parts):
                half = out.narrow(1, index * (shape[1] // 2), shape[1] // 2)
                self._fill(part, first, half)
            return out
        self._fill(parts[0], first, out)
        return out

    def layout(self, name: str, *, outer: bool) -> GroupLayout | None:
        """How ``int4`` stores a matrix; see `p2pshard.models.groups.grouped_as`."""
        parts = self._find(name)
        entry = self._source.entry(parts[0].name)
        dtype = entry.dtype if len(parts) == 1 else ""
        return grouped_as(dtype, entry.shape[-1], outer=outer, grouped_file=has_groups(self._source.manifest))

    def groups(self, name: str, first: int, end: int) -> GroupRows | None:
        """Rows [first, end) of a matrix in the file's own groups; None where it has none of ours.

        Raises `ModelCorrupt` when a scale is not a finite number.
        """
        part, *others = self._find(name)
        entry = self._source.entry(part.name)
        if others or len(entry.shape) != 2 or entry.dtype not in LAYOUTS:
            return None
        _rows((first, end), entry.shape, name)
        if not part.heads:
            data = self._raw(entry, first, end)
        else:  # rows in transformers' order, which is another within each head
            order = _row_order(entry.shape[0], part.heads)[first:end].numpy()
            size = entry.shape[0] // part.heads
            low, high = order.min() // size * size, (order.max() // size + 1) * size
            data = self._raw(entry, int(low), int(high))[order - low]
        made = repack(entry.dtype, data)
        heads = () if made is None else (made.scale_RB, made.low_RB)
        if not all(h is None or bool(np.isfinite(h).all()) for h in heads):
            raise ModelCorrupt(f"tensor {part.name!r} has a scale that is not a finite number")
        return made

    def _raw(self, entry: TensorEntry, first: int, end: int) -> np.ndarray:
        """uint8 [rows, row bytes] as they lie in the file."""
        size = entry.nbytes // entry.shape[0]
        data = self._source.read_range(entry.name, first * size, (end - first) * size)
        return np.frombuffer(data, np.uint8).reshape(end - first, size)

    def _fill(self, part: _Part, first: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows of the first axis from ``first`` on."""
        entry = self._source.entry(part.name)
        width = entry.shape[-1]
        per_row = math.prod(entry.shape[1:-1]) if len(entry.shape) > 1 else 1
        if len(entry.shape) == 1:  # a vector: its values are its rows
            out.copy_(self._vector(part, entry)[first : first + out.shape[0]])
        elif part.heads:
            self._unrotate(part, entry, first, out)
        else:
            begin = first * per_row
            target = out.view(-1, width) if out.is_contiguous() else None
            for at, values in self._dequantised(entry, begin, out.shape[0] * per_row):
                if target is not None:
                    target[at : at + len(values)] = torch.from_numpy(values)
                else:
                    for offset, row in enumerate(values):  # half of a stack of experts
                        out[divmod(at + offset, per_row)] = torch.from_numpy(row)

    def _vector(self, part: _Part, entry: TensorEntry) -> torch.Tensor:
        _, values = next(self._dequantised(entry, 0, 1))
        vector = torch.from_numpy(values.reshape(-1))
        if part.heads:
            vector = vector[_row_order(len(vector), part.heads)]
        return vector - 1 if part.minus_one else vector

    def _unrotate(self, part: _Part, entry: TensorEntry, first: int, out: torch.Tensor) -> None:
        """Rows in transformers' order; whole heads are read, since a row's place is within its head."""
        size = entry.shape[0] // part.heads
        order = _row_order(entry.shape[0], part.heads)
        wanted = order[first : first + out.shape[0]]
        for head in range(int(wanted.min()) // size, int(wanted.max()) // size + 1) if len(wanted) else ():
            for at, values in self._dequantised(entry, head * size, size):
                start = head * size + at
                here = ((wanted >= start) & (wanted < start + len(values))).nonzero().view(-1)
                if len(here):
                    out[here] = torch.from_numpy(values)[wanted[here] - start].to(out.dtype)

    def _dequantised(self, entry: TensorEntry, first: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """``(position, float32 values [rows, width])`` for ``count`` rows of the last axis from ``first``."""
        width = entry.shape[-1]
        storage = READABLE_GGUF[entry.dtype]
        row_bytes = width // storage.block * storage.nbytes
        step = max(1, _CHUNK_VALUES // width)
        convert = _converter(entry.dtype)
        for at in range(0, count, step):
            rows = min(step, count - at)
            data = self._source.read_range(entry.name, (first + at) * row_bytes, rows * row_bytes)
            yield at, convert(np.frombuffer(data, np.uint8).reshape(rows, row_bytes))


def _row_order(rows: int, heads: int) -> torch.Tensor:
    """For each row as transformers has it, the row of the file: halves of a head instead of pairs."""
    if rows % (2 * heads):
        raise ModelCorrupt(f"{rows} rows do not divide into {heads} heads of pairs")
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _converter(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Bytes [rows, row bytes] → float32 [rows, width]."""
    if dtype == "F32":
        return lambda data: data.view("<f4")
    if dtype == "F16":
        return lambda data: data.view("<f2").astype(np.float32)
    if dtype == "BF16":
        return lambda data: (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    kind = gguf.GGMLQuantizationType[dtype]
    return lambda data: gguf.quants.dequantize(data, kind)
