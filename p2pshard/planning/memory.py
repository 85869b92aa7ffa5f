"""How many bytes a model needs, from its manifest alone: nothing of the weights is read.

Weights. Float dtypes: every value of a tensor times the dtype's size; an embedding and a head that are one
tensor are stored once on a stage that has both. ``int8``: each linear matrix and the embedding table one byte a
value and four a row; norms, biases, routers and expert stacks float32. ``int4``: linear matrices and the
embedding table in the file's own groups, or in ours, to the byte (`p2pshard.models.groups`); what has no groups
as in ``int8``.

KV. Blocks x block size x (key width + value width) x the size of a value, in each layer, whether or not the
layer has a sliding window: all layers follow one block table. ``int8`` and ``int4`` compute, and keep KV, in
float32.

Workspace. What a step needs beside those, at the full context and the largest step, or what loading needs
if that is more. It is an estimate from above; the engine's block sizes that bound it are named below.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from p2pshard.errors import InvalidRequest, ModelCorrupt
from p2pshard.models.groups import LAYOUTS, grouped_as, has_groups
from p2pshard.models.layout import layer_count, layer_of, tied_head
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.profiles import ModelProfile
from p2pshard.planning.settings import DTYPES

__all__ = [
    "BLOCK_SIZE",
    "CHUNK_TOKENS",
    "MAX_LOGIT_ROWS",
    "blocks_for",
    "kv_bytes",
    "profile_model",
    "resolve_dtype",
    "smaller_dtypes",
    "workspace_bytes",
]

BLOCK_SIZE = 16
"""Tokens per KV block."""
CHUNK_TOKENS = (256, 128, 64, 32)
"""Most tokens in one step: the first, or the next ones when memory is tight."""
MAX_LOGIT_ROWS = 32
"""Most sequences that get logits in one step."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4, "int4": 4}
"""Of computed values and KV."""
_BY_SIZE = ("float32", "bfloat16", "int8", "int4")
_LOAD_BYTES = 64_000_000
"""The engine converts large matrices in row blocks whose temporaries stay below this."""
_SLACK_BYTES = 24_000_000
"""Frames in flight, thread stacks, and what the allocator keeps between steps."""
_KERNEL_BYTES = 28_000_000
"""Compiled code of quantised layers and its loader, measured."""
_QUERY_BLOCK = 128
_MAX_SCORES = 1 << 21
"""Queries and scores that the engine's attention handles at once."""
_INT8_PANEL = (64, 16)
"""Rows and columns to whose multiples int8 matrices are filled up."""
_ROUTERS = ("ffn_gate_inp.", "mlp.gate.", "block_sparse_moe.gate.", "router.", "feed_forward.gate.")
_EXPERTS = (".experts.", "_exps.")
_KEYS = ("attn_k.weight", "k_proj.weight")
_VALUES = ("attn_v.weight", "v_proj.weight")


def resolve_dtype(manifest: Manifest, dtype: str) -> str:
    """``auto`` made definite; another dtype as it is.

    Safetensors: the type that most bytes have. GGUF: ``int4``, the file's own groups, when most bytes are in
    groups of 4 to 6 bits; ``int8`` when they are quantised otherwise; of unquantised files float32 for F32 and
    bfloat16 for BF16 and F16.
    """
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}", field="dtype")
    if dtype != "auto":
        return dtype
    stored: Counter[str] = Counter()
    for tensor in manifest.tensors:
        if len(tensor.shape) >= 2 and layer_of(tensor.name, manifest.format) is not None:
            stored[tensor.dtype] += tensor.nbytes
    if not stored:
        raise ModelCorrupt("the model has no weight matrix")
    if manifest.format == "gguf":
        most = stored.most_common(1)[0][0]
        layout = LAYOUTS.get(most)
        if layout is not None and layout.bits < 8:
            return "int4"
        return {"F32": "float32", "F16": "bfloat16", "BF16": "bfloat16"}.get(most, "int8")
    floats = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return floats.get(stored.most_common(1)[0][0], "float32")


def smaller_dtypes(dtype: str) -> tuple[str, ...]:
    """Dtypes in which weights take less memory than in ``dtype``, largest first."""
    at = _BY_SIZE.index("bfloat16" if dtype == "float16" else dtype)
    return _BY_SIZE[at + 1 :]


def profile_model(manifest: Manifest, dtype: str, name: str = "") -> ModelProfile:
    """Bytes of a model in memory with ``dtype`` (``auto``: see `resolve_dtype`).

    Raises:
        InvalidRequest: an unknown dtype, or a configuration without the number of layers.
        ModelCorrupt: a layer without tensors, or a configuration without the sizes that KV needs.
    """
    dtype = resolve_dtype(manifest, dtype)
    config = manifest.config
    count = layer_count(manifest)
    sizes = _Sizes(dtype, has_groups(manifest))
    weights, padding = [0] * count, [0] * count
    tensors: list[dict[str, TensorEntry]] = [{} for _ in range(count)]
    parts: Counter[str] = Counter()
    tables: list[TensorEntry] = []
    for tensor in manifest.tensors:
        place = layer_of(tensor.name, manifest.format)
        if isinstance(place, int):
            if place < count:  # beyond: blocks for multi-token prediction, which no stage loads
                weights[place] += sizes.of(tensor)
                padding[place] += sizes.padding(tensor)
                tensors[place][tensor.name] = tensor
        elif place == "embedding":
            parts[place] += sizes.of_table(tensor)
            tables.append(tensor)
        elif place is not None:
            parts[place] += sizes.of(tensor, outer=place == "head")
    missing = [index for index, found in enumerate(tensors) if not found]
    if missing:
        raise ModelCorrupt(
            f"the model's configuration has {count} layers; its files hold nothing of layer {missing[0]}"
        )
    if not tables:
        raise ModelCorrupt("the model's files hold no token embedding")

    table = max(tables, key=lambda t: math.prod(t.shape))
    tied = tied_head(manifest) or config.get("tie_word_embeddings") is True
    projection = sizes.of(table, outer=True) if tied else parts["head"]
    widths = [_kv_width(config, found.values()) for found in tensors]
    itemsize = _ITEMSIZE[dtype]
    heads = _size(config, "num_attention_heads", "n_head")
    queries = (_queries(config, found.values(), heads) for found in tensors)
    return ModelProfile(
        name=name,
        manifest=manifest.digest,
        dtype=dtype,
        layer_bytes=tuple(weights),
        kv_token_bytes=tuple(width * itemsize for width in widths),
        layer_padding_bytes=tuple(padding),
        embedding_bytes=parts["embedding"],
        head_bytes=projection + parts["norm"],
        shared_saving_bytes=projection if tied else 0,
        common_bytes=parts["shared"],
        hidden=_size(config, "hidden_size", "n_embd", "d_model"),
        vocabulary=table.shape[0],
        max_context=_size(config, "max_position_embeddings", "n_positions", "n_ctx"),
        heads=heads,
        query_width=max(queries),
        kv_width=max(widths),
        intermediate=_intermediate(config),
        compute_itemsize=itemsize,
        runtime_bytes=_SLACK_BYTES + (_KERNEL_BYTES if dtype in ("int8", "int4") else 0),
    )


def blocks_for(context: int, concurrency: int) -> int:
    """KV blocks that hold ``concurrency`` full contexts."""
    return -(-context // BLOCK_SIZE) * concurrency


def kv_bytes(model: ModelProfile, first: int, last: int, blocks: int) -> int:
    """The KV pool of layers ``first`` to ``last`` inclusive."""
    return blocks * BLOCK_SIZE * sum(model.kv_token_bytes[first : last + 1])


def workspace_bytes(model: ModelProfile, context: int, chunk_tokens: int, *, head: bool) -> int:
    """What a stage needs beside weights and KV; zero for a profile without sizes (a planner's test)."""
    size, tokens = model.compute_itemsize, chunk_tokens
    residual = 8 * tokens * model.hidden * 4
    projections = tokens * (3 * model.query_width + 2 * model.kv_width) * size
    mlp = 3 * tokens * model.intermediate * size
    gathered = context * model.kv_width * size
    masks = 2 * min(tokens, _QUERY_BLOCK) * context * 4 if model.heads else 0
    scores = (
        3
        * 4
        * min(model.heads * min(tokens, _QUERY_BLOCK) * context, max(_MAX_SCORES, model.heads * context))
    )
    logits = 3 * min(tokens, MAX_LOGIT_ROWS) * model.vocabulary * 4 if head else 0
    step = residual + max(projections + gathered + masks + scores, mlp) + logits
    if not model.runtime_bytes:
        return step
    return max(step, _LOAD_BYTES) + model.runtime_bytes


@dataclass(frozen=True)
class _Sizes:
    """Bytes of tensors in memory."""

    dtype: str
    grouped_file: bool
    """See `p2pshard.models.groups.grouped_as`."""

    def of(self, tensor: TensorEntry, *, outer: bool = False) -> int:
        """``outer``: of the head."""
        values = math.prod(tensor.shape)
        if self.dtype not in ("int8", "int4"):
            return values * _ITEMSIZE[self.dtype]
        if not _is_linear(tensor):
            return values * 4
        grouped = self._grouped(tensor, outer)
        return values + 4 * tensor.shape[0] if grouped is None else grouped

    def of_table(self, tensor: TensorEntry) -> int:
        """Of the token embedding."""
        values = math.prod(tensor.shape)
        if self.dtype not in ("int8", "int4"):
            return values * _ITEMSIZE[self.dtype]
        if len(tensor.shape) != 2:
            return values * 4
        grouped = self._grouped(tensor, True)
        return values + 4 * tensor.shape[0] if grouped is None else grouped

    def padding(self, tensor: TensorEntry) -> int:
        """int8 matrices are filled up to whole panels."""
        if self.dtype not in ("int8", "int4") or not _is_linear(tensor) or self._grouped(tensor, False):
            return 0
        rows, columns = (-(-n // m) * m for n, m in zip(tensor.shape, _INT8_PANEL, strict=True))
        return rows * (columns + 4) - tensor.shape[0] * (tensor.shape[1] + 4)

    def _grouped(self, tensor: TensorEntry, outer: bool) -> int | None:
        """None: not in groups."""
        if self.dtype != "int4":
            return None
        rows, columns = tensor.shape
        layout = grouped_as(tensor.dtype, columns, outer=outer, grouped_file=self.grouped_file)
        return None if layout is None else layout.nbytes(rows, columns)


def _is_linear(tensor: TensorEntry) -> bool:
    """A matrix that ``int8`` and ``int4`` store as such."""
    matrix = len(tensor.shape) == 2 and tensor.name.endswith("weight")
    return matrix and not any(part in tensor.name for part in (*_ROUTERS, *_EXPERTS))


def _size(config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelCorrupt(f"the model's configuration does not say its {keys[0]}")


def _rows(tensors: Iterable[TensorEntry], names: tuple[str, ...]) -> int:
    return next((t.shape[0] for t in tensors if t.name.endswith(names) and len(t.shape) == 2), 0)


def _head_width(config: dict[str, Any]) -> int:
    width = config.get("head_dim")
    if isinstance(width, int) and width > 0:
        return width
    return _size(config, "hidden_size", "n_embd", "d_model") // _size(config, "num_attention_heads", "n_head")


def _kv_width(config: dict[str, Any], tensors: Iterable[TensorEntry]) -> int:
    """Values of one token's keys and values: what the projections give, else what the configuration says."""
    tensors = tuple(tensors)
    if config.get(
        "kv_lora_rank"
    ):  # multi-head latent attention: keys and values are expanded before attention
        per_head = (
            _size(config, "qk_nope_head_dim")
            + _size(config, "qk_rope_head_dim")
            + _size(config, "v_head_dim")
        )
        return _size(config, "num_attention_heads") * per_head
    keys, values = _rows(tensors, _KEYS), _rows(tensors, _VALUES)
    if keys and values:
        return keys + values
    groups = config.get("num_key_value_heads")
    groups = (
        groups if isinstance(groups, int) and groups > 0 else _size(config, "num_attention_heads", "n_head")
    )
    return 2 * groups * _head_width(config)


def _queries(config: dict[str, Any], tensors: Iterable[TensorEntry], heads: int) -> int:
    if config.get("kv_lora_rank"):
        return heads * (_size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim"))
    return _rows(tensors, ("attn_q.weight", "q_proj.weight")) or heads * _head_width(config)


def _intermediate(config: dict[str, Any]) -> int:
    """Of a token: the dense MLP, or all experts it visits (and the shared ones) if they are wider."""
    dense = config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 0
    dense = max(dense) if isinstance(dense, list) else dense
    expert = config.get("moe_intermediate_size") or dense
    visited = config.get("num_experts_per_tok") or config.get("experts_per_token") or 0
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert
    values = (dense, visited * expert + shared)
    return max(v for v in values if isinstance(v, int)) or 4 * _size(
        config, "hidden_size", "n_embd", "d_model"
    )
