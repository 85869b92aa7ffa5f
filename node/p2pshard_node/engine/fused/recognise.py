"""Whether a loaded stage can run on the fused kernels: its structure is read, then both ways are compared.

Every layer is run on the hidden states that the plain modules gave it, on random input. A difference beyond the
rounding of activations, of any layer, embedding or head, leaves the stage to its plain modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from p2pshard_node.engine.build import StageModules
from p2pshard_node.engine.embedding import QuantEmbedding
from p2pshard_node.engine.fused.layers import (
    DOWN,
    GATE,
    LAYER,
    MATRICES,
    NORMS,
    OUT,
    QUERY,
)
from p2pshard_node.engine.fused.norm import NORM
from p2pshard_node.engine.fused.product import MATRIX
from p2pshard_node.engine.fused.runner import Embedding, FusedStage, Head
from p2pshard_node.engine.fused.structure import (
    LayerParts,
    NormParts,
    Unrecognised,
    describe,
    norm_parts,
)
from p2pshard_node.engine.kv import KvPool
from p2pshard_node.engine.packed import PackedLinear
from p2pshard_node.engine.placement import Placement

__all__ = ["PROBE", "recognise"]

PROBE = 24
"""Tokens of the comparison; fewer in a pool that holds fewer."""
#: Largest difference that one layer's change of the hidden state may have, relative to that change. A rounding of
#: an activation that flips moves it by about 1e-3; another structure by half or more.
TOLERANCE = 2e-2

#: ``plain(values) -> logits or hidden states``: a step of one sequence from position 0, in blocks 0, 1, ... of the
#: pool; token ids [T] with the embedding, else float32 [T, D]; logits [T, V] with the head.
Plain = Callable[[np.ndarray], np.ndarray]


@dataclass
class _Seen:
    """What the plain modules did on the probe."""

    before: dict[int, np.ndarray] = field(default_factory=dict)
    """Hidden states that a layer was given, [T, D]."""
    after: dict[int, np.ndarray] = field(default_factory=dict)
    rotations: dict[int, tuple[np.ndarray, np.ndarray] | None] = field(default_factory=dict)
    """cos and sin [T, R] that a layer was given."""
    result: np.ndarray = field(default_factory=lambda: np.empty(0))


def recognise(modules: StageModules, pool: KvPool, plain: Plain) -> FusedStage:
    """The stage on fused kernels, compared with its plain modules. Raises `Unrecognised`."""
    if modules.dtype != torch.float32:
        raise Unrecognised("the fused kernels compute in float32")
    parts = {index: describe(modules.base.layers[index]) for index in modules.part.layers}
    count = min(PROBE, pool.blocks * pool.block_size)
    random = np.random.default_rng(11)
    given: np.ndarray
    if modules.part.embedding:
        given = random.integers(0, modules.config.vocab_size, count)
    else:
        given = random.standard_normal((count, modules.config.hidden_size), dtype=np.float32)
    seen = _observe(modules, plain, given)
    stage = _assemble(modules, pool, parts, seen)
    used = -(-count // pool.block_size)
    placement = Placement(np.array([[0, count, 0, 0]]), np.arange(used), count)
    _choose_rotations(stage, modules, seen, placement)
    for i, index in enumerate(modules.part.layers):
        error = _difference(stage, i, seen, index, placement)
        if not error <= TOLERANCE:
            raise Unrecognised(f"layer {index} differs from its module by {error:.1e} of its change")
    if modules.part.embedding:
        stage.embedding = _embedding(modules, given, seen)
    if modules.part.head:
        stage.head = _head(modules, stage, seen)
    return stage


# -- what the plain modules do --------------------------------------------------------------------
def _observe(modules: StageModules, plain: Plain, given: np.ndarray) -> _Seen:
    seen = _Seen()

    def before(index: int) -> Any:
        def hook(module: Any, arguments: Any, named: Any) -> None:
            hidden = arguments[0] if arguments else named["hidden_states"]
            seen.before[index] = hidden[0].numpy().copy()
            rotation = named.get("position_embeddings")
            seen.rotations[index] = (
                None if rotation is None else (rotation[0][0].numpy().copy(), rotation[1][0].numpy().copy())
            )

        return hook

    def after(index: int) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen.after[index] = hidden[0].numpy().copy()

        return hook

    handles = []
    for index in modules.part.layers:
        layer = modules.base.layers[index]
        handles.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
        handles.append(layer.register_forward_hook(after(index)))
    try:
        seen.result = plain(given)
    finally:
        for handle in handles:
            handle.remove()
    return seen


# -- tables ---------------------------------------------------------------------------------------
def _assemble(modules: StageModules, pool: KvPool, parts: dict[int, LayerParts], seen: _Seen) -> FusedStage:
    count = len(parts)
    layers, owners = np.zeros(count, LAYER), []
    matrices, norms = np.zeros((count, len(MATRICES)), MATRIX), np.zeros((count, len(NORMS)), NORM)
    for i, (index, part) in enumerate(parts.items()):
        shape, how = modules.kv[index], modules.calls[index]
        if shape.key_width != shape.value_width or how.get("s_aux") is not None:
            raise Unrecognised("keys and values differ in width, or attention has sinks")
        width = shape.key_width
        heads = part.attention_out.in_features // width
        lines = sum(linear.out_features for linear in part.attention_in)
        inner = part.mlp_out.in_features
        if (
            width % 16
            or lines != (heads + 2 * shape.heads) * width
            or heads % shape.heads
            or part.attention_out.in_features != heads * width
            or sum(linear.out_features for linear in part.mlp_in) != 2 * inner
            or any(norm is not None and lines % len(norm.weight) for norm in part.norms[4:])
        ):
            raise Unrecognised(f"layer {index} has heads or widths that do not fit together")
        scale = how.get("scaling")
        layer = layers[i]
        layer["keys"], layer["values"] = pool.keys[index].data_ptr(), pool.values[index].data_ptr()
        layer["heads"], layer["shared"], layer["width"], layer["inner"] = heads, shape.heads, width, inner
        layer["activation"], layer["parallel"] = part.activation, part.parallel
        layer["residual"], layer["rope"] = part.residual, -1
        layer["scale"] = width**-0.5 if scale is None else scale
        layer["softcap"] = how.get("softcap") or 0.0
        layer["window"] = how.get("sliding_window") or modules.windows.get(index, 0)
        for first, linears in (
            (QUERY, part.attention_in),
            (OUT, (part.attention_out,)),
            (GATE, part.mlp_in),
            (DOWN, (part.mlp_out,)),
        ):
            for j, linear in enumerate(linears):
                matrices[i, first + j] = linear.matrix[0]
            if len({int(form) for form in matrices["form"][i, first : first + len(linears)]}) > 1:
                raise Unrecognised(f"matrices of layer {index} take one input in several forms")
        for j, norm in enumerate(part.norms):
            if norm is not None:
                norms[i, j] = _norm(norm)
        owners.append(part)
    frequencies, scalings = _frequencies(modules, seen)
    return FusedStage(
        pool, layers, matrices, norms, frequencies, scalings, int(modules.config.hidden_size), owners
    )


def _norm(norm: NormParts) -> tuple[int, int, int, int, float]:
    bias = 0 if norm.bias is None else norm.bias.data_ptr()
    return norm.weight.data_ptr(), bias, len(norm.weight), norm.kind, norm.eps


# -- rotations ------------------------------------------------------------------------------------
def _frequencies(modules: StageModules, seen: _Seen) -> tuple[np.ndarray, np.ndarray]:
    """float32 [F, half] and [F]: all that the model's rotary modules hold; one of zeros if there are none."""
    found: list[tuple[np.ndarray, float]] = []
    for owner in modules.base.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                scaling = getattr(owner, name.replace("inv_freq", "attention_scaling"), 1.0)
                found.append((buffer.float().numpy().copy(), float(scaling)))
    halves = {len(f) for f, _ in found}
    if len(halves) > 1:
        raise Unrecognised("rotary embeddings of several widths")
    if not found:
        return np.zeros((1, 16), np.float32), np.ones(1, np.float32)
    return np.stack([f for f, _ in found]), np.array([s for _, s in found], np.float32)


def _choose_rotations(stage: FusedStage, modules: StageModules, seen: _Seen, placement: Placement) -> None:
    """Give every layer the rotation that its module was given, in the form in which it uses it."""
    positions = np.arange(placement.tokens, dtype=np.float32)
    tables = [
        (np.cos(positions[:, None] * f) * s, np.sin(positions[:, None] * f) * s)
        for f, s in zip(stage.frequencies, stage.scalings, strict=True)
    ]
    form: int | None = None
    for i, index in enumerate(modules.part.layers):
        rotation = seen.rotations[index]
        if rotation is None:
            continue
        half = rotation[0].shape[1] // 2
        kinds = [
            kind
            for kind, (cos, sin) in enumerate(tables)
            if cos.shape[1] == half
            and any(
                np.allclose(cos, r_cos, atol=1e-4) and np.allclose(sin, r_sin, atol=1e-4)
                for r_cos, r_sin in (
                    (rotation[0][:, :half], rotation[1][:, :half]),
                    (rotation[0][:, ::2], rotation[1][:, ::2]),
                )
            )
        ]
        if not kinds or 2 * half > stage.layers[i]["width"]:
            raise Unrecognised(f"the rotary embedding of layer {index} is not one of position x frequency")
        # one form for all layers of a model, and none on layers that do not rotate
        forms = [(kinds[0], form), (-1, 0)] if form is not None else [(kinds[0], 0), (kinds[0], 1), (-1, 0)]
        errors = []
        for rope, interleaved in forms:
            stage.layers[i]["rope"], stage.layers[i]["interleaved"] = rope, interleaved
            errors.append(_difference(stage, i, seen, index, placement))
            if errors[-1] <= TOLERANCE:
                form = interleaved if rope >= 0 else form
                break
        else:
            raise Unrecognised(f"layer {index} differs from its module by {min(errors):.1e} of its change")


def _difference(stage: FusedStage, i: int, seen: _Seen, index: int, placement: Placement) -> float:
    hidden = seen.before[index].copy()
    finite = stage.run_layers(placement, hidden, slice(i, i + 1))
    want = seen.after[index]
    change = float(np.linalg.norm(want - seen.before[index]))
    return float(np.linalg.norm(hidden - want)) / max(change, 1e-30) if finite else float("inf")


# -- ends -----------------------------------------------------------------------------------------
def _embedding(modules: StageModules, given: np.ndarray, seen: _Seen) -> Embedding:
    module = modules.base.embed_tokens
    if not isinstance(module, QuantEmbedding):
        raise Unrecognised("an embedding in another form")
    rows = module.table.take(given)
    want = seen.before[modules.part.first]
    inner: Any = module.embedding
    names = ((inner, "embed_scale"), (inner, "scalar_embed_scale"), (modules.base, "embedding_multiplier"))
    factors = [1.0, *(float(getattr(owner, name)) for owner, name in names if hasattr(owner, name))]
    for factor in factors:
        if np.allclose(rows * np.float32(factor), want, rtol=1e-6, atol=0):
            return Embedding(module.table, factor)
    raise Unrecognised("the embedding is more than a scaled row of its table")


def _head(modules: StageModules, stage: FusedStage, seen: _Seen) -> Head:
    linear, norm = modules.model.lm_head, norm_parts(modules.base.norm.norm)
    if not isinstance(linear, PackedLinear):
        raise Unrecognised("a head that is not quantised")
    table = np.zeros(1, NORM)
    table[0] = _norm(norm)
    stage.own(norm, linear)
    config = modules.config
    factors = [1.0]
    if getattr(config, "logits_scaling", None):
        factors.append(1.0 / config.logits_scaling)
    if getattr(config, "logit_scale", None):
        factors.append(float(config.logit_scale))
    caps = [0.0, *([float(c)] if (c := getattr(config, "final_logit_softcapping", None)) else [])]
    last = seen.after[modules.part.last]
    for factor in reversed(factors):
        for cap in reversed(caps):
            stage.head = Head(table, linear.matrix, factor, cap)
            got, finite = stage.logits(last, np.arange(len(last)))
            error = float(np.linalg.norm(got - seen.result) / np.linalg.norm(seen.result))
            if finite and error <= TOLERANCE:
                return stage.head
    raise Unrecognised(f"the head differs from its module by {error:.1e} of its logits")
