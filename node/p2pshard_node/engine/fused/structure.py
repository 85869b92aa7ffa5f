"""What a decoder layer is made of, read from its modules: no list of names of models.

`describe` only reads shapes and roles; that the parts are wired as it says is proved by running both (see
`recognise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pshard_node.engine.fused.gate import GELU_TANH, SILU
from p2pshard_node.engine.fused.norm import LAYER_NORM, RMS
from p2pshard_node.engine.fused.vectors import LANES
from p2pshard_node.engine.packed import PackedLinear

__all__ = ["LayerParts", "NormParts", "Unrecognised", "describe", "norm_parts"]


class Unrecognised(Exception):
    """The layers are run as plain modules; the text says why."""


@dataclass(frozen=True)
class NormParts:
    kind: int
    weight: torch.Tensor
    """float32 [N], what the normalised value is multiplied by."""
    bias: torch.Tensor | None
    eps: float


@dataclass(frozen=True)
class LayerParts:
    attention_in: tuple[PackedLinear, ...]
    """Query, key and value, or all in one."""
    attention_out: PackedLinear
    mlp_in: tuple[PackedLinear, ...]
    """Gate and up, or both in one."""
    mlp_out: PackedLinear
    norms: tuple[NormParts | None, ...]
    """In the order of `p2pshard_node.engine.fused.layers.NORMS`."""
    parallel: bool
    activation: int
    residual: float


#: Names of a layer's norms → their places before and after attention and MLP.
_WIRINGS: dict[frozenset[str], tuple[str, str, str, str]] = {
    frozenset(name for name in places if name): places
    for places in (
        ("input_layernorm", "", "post_attention_layernorm", ""),
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        ("input_layernorm", "", "", ""),
    )
}


def describe(layer: nn.Module) -> LayerParts:
    """Raises `Unrecognised` for anything that has no place in a `LayerParts`."""
    children = _children(layer)
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    if attention is None or mlp is None:
        raise Unrecognised(f"{type(layer).__name__} is not an attention and an MLP")
    places = _WIRINGS.get(frozenset(children))
    if places is None:
        raise Unrecognised(f"{type(layer).__name__} has {', '.join(sorted(children))}")
    norms = [norm_parts(children[name]) if name else None for name in places]
    parts = _children(attention)
    query_norm, key_norm = parts.pop("q_norm", None), parts.pop("k_norm", None)
    norms += [norm_parts(n) if n is not None else None for n in (query_norm, key_norm)]
    linears = _linears(attention, parts, (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), "o_proj")
    inner = _children(mlp)
    act = next((inner.pop(n) for n in ("act_fn", "activation_fn") if n in inner), None)
    activation = _activation(act)
    gated = _linears(mlp, inner, (("gate_proj", "up_proj"), ("gate_up_proj",)), "down_proj")
    if any(size % LANES for linear in (*linears, *gated) for size in _sizes(linear)):
        raise Unrecognised("a width is not a multiple of 16")
    return LayerParts(
        attention_in=tuple(linears[:-1]),
        attention_out=linears[-1],
        mlp_in=tuple(gated[:-1]),
        mlp_out=gated[-1],
        norms=tuple(norms),
        parallel=places == ("input_layernorm", "", "", ""),
        activation=activation,
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Children that do something in evaluation."""
    return {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    }


def _sizes(linear: PackedLinear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _linears(
    owner: nn.Module, parts: dict[str, nn.Module], ways: tuple[tuple[str, ...], ...], last: str
) -> list[PackedLinear]:
    for names in ways:
        if set(parts) == {*names, last}:
            linears = [parts[name] for name in (*names, last)]
            if all(isinstance(linear, PackedLinear) for linear in linears):
                return linears  # type: ignore[return-value]
    raise Unrecognised(f"{type(owner).__name__} has {', '.join(sorted(parts)) or 'no layers'}")


def norm_parts(norm: nn.Module) -> NormParts:
    """Which norm a module is, by what it does to random numbers. Raises `Unrecognised`."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is None or weight.ndim != 1 or len(weight) % LANES or list(norm.children()):
        raise Unrecognised(f"{type(norm).__name__} is not a norm of one weight")
    eps = next((float(getattr(norm, n)) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), 0.0)
    # small numbers, so that eps counts
    x = torch.from_numpy(np.random.default_rng(5).normal(0.02, 0.01, (3, len(weight))).astype(np.float32))
    with torch.inference_mode():
        want = norm(x).float()
        w = weight.detach().float()
        rms = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
        centred = x - x.mean(1, keepdim=True)
        layer = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + eps)
        b = bias.detach().float() if bias is not None else torch.zeros_like(w)
        for kind, value, scale in ((RMS, rms, w), (RMS, rms, 1 + w), (LAYER_NORM, layer, w)):
            if torch.allclose(value * scale + b, want, rtol=1e-4, atol=1e-5):
                return NormParts(kind, scale.contiguous(), b.contiguous() if bias is not None else None, eps)
    raise Unrecognised(f"{type(norm).__name__} is neither RMSNorm nor LayerNorm")


def _activation(act: Any) -> int:
    if act is None:
        raise Unrecognised("an MLP without an activation module")
    x = torch.linspace(-6, 6, 97)
    with torch.inference_mode():
        want = act(x)
        if torch.allclose(want, nn.functional.silu(x), atol=1e-5):
            return SILU
        if torch.allclose(want, nn.functional.gelu(x, approximate="tanh"), atol=1e-5):
            return GELU_TANH
    raise Unrecognised(f"an activation of {type(act).__name__}")
