"""Every call of torch or transformers that is private, deprecated or otherwise not promised lives here alone.

Written against transformers 5.20 to 5.24 and torch 2.9 to 2.13. When an upgrade breaks the engine, this is
the file to read.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from p2pshard.errors import UnsupportedModel

__all__ = [
    "Fusion",
    "NamePlan",
    "build_on_meta",
    "float32_names",
    "fuse",
    "initialise_buffers",
    "map_names",
    "register_attention",
    "shape_only_experts",
    "strip_wrappers",
]


_FROM_CONFIG: Callable[..., Any] = AutoModelForCausalLM.from_config


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `function` selectable as ``attn_implementation=name``. No mask function goes with it: the mask is
    None."""
    AttentionInterface.register(name, function)


def build_on_meta(config: Mapping[str, Any], attention: str, dtype: torch.dtype) -> Any:
    """The causal language model of a configuration, without memory for any weight.

    Code that a repository brings along (``auto_map``) is never run. Raises `UnsupportedModel`.
    """
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"architecture {model_type!r} is not known to the installed transformers")
    values = {k: v for k, v in config.items() if k not in ("auto_map", "model_type", "transformers_version")}
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(values)
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"transformers refuses the configuration of {model_type!r}: {error}"
        ) from error
    try:
        with torch.device("meta"):
            model = _FROM_CONFIG(parsed, attn_implementation=attention, dtype=dtype)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        raise UnsupportedModel(
            f"transformers cannot build {model_type!r} as a causal language model: {error}"
        ) from error
    return model.eval().requires_grad_(False)


@contextmanager
def shape_only_experts(model: Any) -> Iterator[None]:
    """Mixtures of experts run on the meta device within: their default kernel has no float32 form there."""
    able = model._can_set_experts_implementation()
    before = model.config._experts_implementation
    if able:
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        if able:
            model.set_experts_implementation(before)


def float32_names(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of parameter names that the architecture keeps in float32 under a 16-bit `dtype`."""
    kept: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return tuple(sorted(kept))


def initialise_buffers(model: Any, device: str) -> None:
    """Compute what no file holds (rotary frequencies); every parameter and persistent buffer is there
    already."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True
    model._move_missing_keys_from_meta_to_device(set(), {"": device}, None, None)
    with torch.no_grad():
        model.initialize_weights()


def strip_wrappers(module: nn.Module) -> None:
    """Call the modules' own ``forward``, without the wrappers that only warn of old argument names."""
    for child in module.modules():
        function = inspect.unwrap(type(child).forward, stop=lambda f: not _only_renames(f))
        if function is not type(child).forward:
            child.forward = types.MethodType(function, child)


def _only_renames(function: Callable[..., Any]) -> bool:
    return getattr(function, "__code__", None) is not None and function.__code__.co_name == "wrapped_func"


# -- checkpoint names -----------------------------------------------------------------------------
@dataclass
class Fusion:
    """Tensors of a file that become one parameter or more (experts stacked, gate and up joined)."""

    target: str
    converter: WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name in the file, the converter's pattern that took it), in the order of the files' names."""


@dataclass
class NamePlan:
    direct: dict[str, str] = field(default_factory=dict)
    """Parameter → the file's name for it."""
    fused: list[Fusion] = field(default_factory=list)


def map_names(model: Any, names: Iterable[str], known: dict[str, torch.Tensor]) -> NamePlan:
    """Where each of the files' names goes; `known`: the state dict of the whole model. Names of other parts
    are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    plan, fusions = NamePlan(), {}
    for name in sorted(names, key=_natural):
        # the text part of a multimodal checkpoint lies under a prefix of its own
        bare = name.replace("language_model.", "")
        target, pattern = rename_source_key(bare, renamings, converters, prefix, known)
        if target not in known and bare in known:
            target, pattern = bare, None
        if target not in known:
            continue
        if pattern is None:
            plan.direct[target] = name
            continue
        if target not in fusions:
            fusions[target] = Fusion(target, deepcopy(by_pattern[pattern]))
        fusions[target].sources.append((name, pattern))
    plan.fused = list(fusions.values())
    return plan


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]


def fuse(fusion: Fusion, model: Any, load: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameter → tensor, made of what `load` gives for the file's names."""
    converter: Any = fusion.converter
    for name, pattern in fusion.sources:
        converter.add_tensor(fusion.target, name, pattern, partial(load, name))
    made = converter.convert(fusion.target, model=model, config=model.config)
    return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}
