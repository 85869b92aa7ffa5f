"""Which part of a model each tensor belongs to, by its name. Pure.

Understands the names of GGUF files and those of Hugging Face checkpoints of decoder models, of the text part
alone where a checkpoint has others (vision and audio towers, multi-token-prediction blocks).
"""

from __future__ import annotations

import re

from p2pshard.errors import InvalidRequest
from p2pshard.models.manifest import Manifest, TensorEntry

__all__ = ["Place", "layer_count", "layer_of", "needed_tensors", "tied_head"]

Place = int | str | None
"""A layer's number, ``embedding``, ``head``, ``norm``, ``shared``, or None: not of the text decoder."""

_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\..+")
_GGUF_PLACES = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding",
    "token_types": "embedding",
    "position_embd": "embedding",
    "per_layer_token_embd": "embedding",
    "output": "head",
    "output_norm": "norm",
}

_HF_OTHER = re.compile(
    r"(?:^|\.)(?:vision_\w+|visual|audio_\w+|image_\w+|multi_modal_projector|mm_projector|connector|mtp|"
    r"embed_vision|embed_audio|vqmodel|encoder)\."
)
_HF_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,6})\..+")
_HF_BUFFER = re.compile(r"(?:rotary_emb\.inv_freq|\.masked_bias|position_ids)$")
_HF_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|embed_tokens_per_layer|wte|wpe|word_embeddings|word_embeddings_layernorm|embed_in|"
    r"embed_positions|embedding_norm|tok_embeddings)\.\w+$"
)
_HF_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.\w+$")
_HF_NORM = re.compile(r"(?:^|\.)(?:norm|norm_f|final_norm|final_layernorm|final_layer_norm|ln_f)\.\w+$")


def layer_of(name: str, format: str) -> Place:
    """Where a tensor belongs (`Place`); ``format`` is the manifest's.

    ``shared`` is what every stage needs because its place is not known.
    """
    if format == "gguf":
        if match := _GGUF_LAYER.fullmatch(name):
            return int(match[1])
        if name.startswith("rope_"):
            return None  # tables of rope factors: folded into the configuration
        return _GGUF_PLACES.get(name.rsplit(".", 1)[0], "shared")
    if _HF_OTHER.search(name) or _HF_BUFFER.search(name):
        return None
    if match := _HF_LAYER.search(name):
        return int(match[1])
    if _HF_EMBEDDING.search(name):
        return "embedding"
    if _HF_HEAD.search(name):
        return "head"
    if _HF_NORM.search(name):
        return "norm"
    return "shared"


def layer_count(manifest: Manifest) -> int:
    """Decoder layers, from the configuration. Raises `InvalidRequest` when it does not say."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        value = manifest.config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidRequest("the model's configuration does not say how many layers it has")


def tied_head(manifest: Manifest) -> bool:
    """The output projection is the embedding: the files hold no other."""
    return not any(layer_of(t.name, manifest.format) == "head" for t in manifest.tensors)


def needed_tensors(
    manifest: Manifest, first: int, last: int, embedding: bool, head: bool
) -> tuple[TensorEntry, ...]:
    """Tensors of a stage with layers ``first`` to ``last`` (inclusive), in the manifest's order.

    A head includes the final norm, and the embedding where it is tied to it.
    """
    count = layer_count(manifest)
    if not 0 <= first <= last < count:
        raise InvalidRequest(f"layers {first}-{last} of a model with {count}")
    wanted = {"shared"}
    if embedding:
        wanted.add("embedding")
    if head:
        wanted |= {"head", "norm"}
        # A file may hold a head although its configuration ties it: then both are there to be compared.
        if tied_head(manifest) or manifest.config.get("tie_word_embeddings") is True:
            wanted.add("embedding")
    result = []
    for tensor in manifest.tensors:
        place = layer_of(tensor.name, manifest.format)
        if place in wanted if isinstance(place, str) else place is not None and first <= place <= last:
            result.append(tensor)
    return tuple(result)
