"""A stage's modules: the whole model on the meta device, with all that belongs to other stages taken out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from p2pshard.errors import InvalidRequest, UnsupportedModel
from p2pshard_node.engine import compat
from p2pshard_node.engine.attention import ATTENTION, STEP
from p2pshard_node.engine.kv import KvShape
from p2pshard_node.engine.refuse import check_config

__all__ = ["Foreign", "Part", "StageModules", "build", "finish"]


@dataclass(frozen=True)
class Part:
    """Which part of a model a stage holds."""

    first: int
    last: int
    """Decoder layers, both inclusive."""
    embedding: bool
    head: bool

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)


class Foreign(nn.Module):
    """Stands where a module of another stage was; passes its first argument on."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class WantedRows(nn.Module):
    """The final norm of the columns whose logits are wanted, instead of all."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        take = getattr(STEP.get(), "take", None)
        wanted = hidden_BTD if take is None else hidden_BTD.index_select(1, take)
        return cast(torch.Tensor, self.norm(wanted))


@dataclass
class StageModules:
    """The pruned model and what is known about it."""

    model: Any
    """``...ForCausalLM``; parameters on meta until loaded."""
    base: Any
    """The decoder inside it, with ``layers``, ``embed_tokens`` and ``norm``."""
    part: Part
    dtype: torch.dtype
    """Of the hidden state inside the stage, of keys and of values."""
    known: dict[str, torch.Tensor]
    """State dict (on meta) of the whole model before anything was taken out."""
    kv: dict[int, KvShape] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    """Sliding windows of layers whose attention call does not name them."""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Named arguments of each layer's attention call; tensors on meta."""

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def tied(self) -> bool:
        return bool(getattr(self.config, "tie_word_embeddings", False))


def build(config: Mapping[str, Any], part: Part, dtype: torch.dtype) -> StageModules:
    """Build, prune and dry-run on meta. Raises `UnsupportedModel` with the reason; reads no weights."""
    check_config(config)
    model: Any = compat.build_on_meta(config, ATTENTION, dtype)
    base = model.base_model
    name = model.config.model_type
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(
        isinstance(getattr(owner, attribute, None), nn.Module)
        for owner, attribute in ((base, "embed_tokens"), (base, "norm"), (model, "lm_head"))
    ):
        raise UnsupportedModel(
            f"{name} is not supported: it is not an embedding, a list of layers, a norm and a head",
            architecture=name,
        )
    if not 0 <= part.first <= part.last < len(layers):
        raise InvalidRequest(f"layers {part.first}-{part.last} of a model of {len(layers)} layers")
    for index, layer in enumerate(layers):  # of the whole model, so that every stage says the same
        for inner in layer.modules():
            if isinstance(inner, (nn.Conv1d, nn.RNNBase)):
                raise UnsupportedModel(
                    f"{name} is not supported: layer {index} has a {type(inner).__name__}, "
                    "whose state is not kept between steps",
                    architecture=name,
                )
    known = dict(model.state_dict())
    for index in range(len(layers)):
        if index not in part.layers:
            layers[index] = Foreign()
    if part.embedding:
        base.embed_tokens.padding_idx = None
    else:
        base.embed_tokens = Foreign()
    if not part.head:
        base.norm, model.lm_head = Foreign(), Foreign()
    modules = StageModules(model, base, part, dtype, known)
    _dry_run(modules)
    return modules


# -- dry run --------------------------------------------------------------------------------------
#: Arguments of an attention call that we honour, or that say nothing about the result.
_KNOWN = frozenset(
    [
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "cache_position",
        "cache",
        "past_key_values",
    ]
)


class _Recorder:
    """Notes the shapes and arguments of every attention call; computes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, KvShape, dict[str, Any]]] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        shape = KvShape(key.shape[1], key.shape[-1], value.shape[-1])
        how["causal"] = (
            how.get("is_causal") if how.get("is_causal") is not None else getattr(module, "is_causal", True)
        )
        how["groups"] = key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
        self.calls.append((getattr(module, "layer_idx", None), shape, how))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _dry_run(modules: StageModules) -> None:
    """One token through the stage on meta: exactly one of our attention calls in each layer, with arguments
    we know."""
    name, part = modules.config.model_type, modules.part

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name} is not supported: {reason}", architecture=name)

    recorder = _Recorder()
    hidden = torch.empty(1, 1, modules.config.hidden_size, dtype=modules.dtype, device="meta")
    given = (
        {"input_ids": torch.zeros(1, 1, dtype=torch.long, device="meta")}
        if part.embedding
        else {"inputs_embeds": hidden}
    )
    token = STEP.set(recorder)
    try:
        positions = torch.zeros(1, 1, dtype=torch.long, device="meta")
        with compat.shape_only_experts(modules.model):
            out = modules.base(**given, position_ids=positions, use_cache=False).last_hidden_state
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
        raise refuse(
            f"its layers do not run one stage at a time ({type(error).__name__}: {error})"
        ) from error
    finally:
        STEP.reset(token)
    if out.shape != hidden.shape:
        raise refuse(f"a stage turns a hidden state of {tuple(hidden.shape)} into {tuple(out.shape)}")
    if [layer for layer, _, _ in recorder.calls] != list(part.layers):
        calls = [layer for layer, _, _ in recorder.calls]
        raise refuse(f"layers {part.first}-{part.last} make attention calls for layers {calls}, not one each")
    kinds = getattr(modules.config, "layer_types", None)
    for layer, shape, how in recorder.calls:
        strange = sorted(
            k for k, v in how.items() if k not in _KNOWN | {"causal", "groups"} and v is not None
        )
        if strange:
            raise refuse(f"the attention of layer {layer} takes {', '.join(strange)}")
        if not how["causal"] or not how["groups"]:
            raise refuse(
                f"the attention of layer {layer} is not causal, or its heads do not share keys evenly"
            )
        if kinds and kinds[layer] == "sliding_attention" and not how.get("sliding_window"):
            modules.windows[layer] = int(modules.config.sliding_window)
        modules.kv[layer] = shape
        modules.calls[layer] = how


# -- after loading --------------------------------------------------------------------------------
def finish(modules: StageModules, device: str) -> None:
    """Make a loaded stage ready: buffers computed, entry checked, norm of the wanted rows only, wrappers off.

    Raises `UnsupportedModel` when something is added to, or scales, what a later stage is given.
    """
    compat.initialise_buffers(modules.model, device)
    if not modules.part.embedding:
        _check_entry(modules, device)
    if modules.part.head:
        modules.base.norm = WantedRows(modules.base.norm)
    for index in modules.part.layers:
        compat.strip_wrappers(modules.base.layers[index])


def _check_entry(modules: StageModules, device: str) -> None:
    base = modules.base
    if hasattr(base, "embedding_multiplier"):
        base.embedding_multiplier = (
            1.0  # Granite scales its embeddings inside the decoder: done on the first stage
        )
    own_layers, own_norm = base.layers, base.norm
    base.layers = nn.ModuleList(Foreign() for _ in own_layers)
    base.norm = Foreign()
    try:
        size = 3 * modules.config.hidden_size
        hidden = torch.linspace(-2, 2, size, dtype=modules.dtype, device=device).view(1, 3, -1)
        positions = torch.tensor([[5, 6, 7]], device=device)
        out = base(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    finally:
        base.layers, base.norm = own_layers, own_norm
    if not torch.equal(out, hidden):
        name = modules.config.model_type
        raise UnsupportedModel(
            f"{name} is not supported: it changes the hidden state before its layers, "
            "which a later stage would do again",
            architecture=name,
        )
