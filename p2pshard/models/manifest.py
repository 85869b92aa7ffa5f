"""The manifest: what a model *is*, independent of where its files lie.

Two nodes that hold the same manifest digest run the same weights, tokenizer and configuration.
Paths never appear in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from p2pshard.errors import ModelCorrupt
from p2pshard.json_text import parse_json

__all__ = ["Manifest", "TensorEntry"]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the model's files."""

    name: str
    """As the file names it."""
    dtype: str
    """``F32``, ``F16``, ``BF16``, ``Q4_0``, ``Q6_K`` and so on, in the file's format."""
    shape: tuple[int, ...]
    """Row-major, outermost first (a GGUF file stores the reverse)."""
    nbytes: int
    sha256: str
    """Of the tensor's bytes as they lie in the file."""


@dataclass(frozen=True)
class Manifest:
    """A model by content."""

    format: str
    """``safetensors`` or ``gguf``: how tensor names and bytes are to be read."""
    config: dict[str, Any]
    """A transformers configuration (``model_type`` and so on); of the text part when multimodal."""
    tensors: tuple[TensorEntry, ...]
    tokenizer: str
    """sha256 of tokenizer.json; empty when the model has none."""
    chat_template: str = ""
    tokens: dict[str, Any] = field(default_factory=dict)
    """``eos_ids`` (list), ``bos_id``, ``add_bos`` (bool), ``bos_token``, ``eos_token``, ``pad_token``."""
    blobs: dict[str, int] = field(default_factory=dict)
    """Other content by sha256 → bytes (the tokenizer)."""

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def to_bytes(self) -> bytes:
        """Canonical form: what the digest is taken of and what is sent."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of `to_bytes`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises `ModelCorrupt` for anything that is not a manifest."""
        try:
            value: Mapping[str, Any] = parse_json(data)
            tensors = tuple(TensorEntry(**{**t, "shape": tuple(t["shape"])}) for t in value["tensors"])
            return cls(**{**value, "tensors": tensors})
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ModelCorrupt(f"not a model manifest: {error!r}") from error

    @property
    def tensor_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)
