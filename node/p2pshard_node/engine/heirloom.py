"""What a stage takes over from the one before it in the same process: nothing that is in memory is read again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from p2pshard_node.engine.build import Foreign, Part, StageModules

__all__ = ["Heirloom"]


@dataclass
class Heirloom:
    """Loaded modules of an earlier part of the same model, in the same dtype, that the next part has too."""

    layers: dict[int, nn.Module] = field(default_factory=dict)
    embedding: nn.Module | None = None
    norm: nn.Module | None = None
    head: nn.Module | None = None

    @classmethod
    def of(cls, old: StageModules, part: Part, *, shared: bool = False) -> Heirloom:
        """Take them out of ``old``, which is of no use afterwards; ``shared``: leave them there too.

        Where embedding and head are one tensor, they are kept only when both parts have the same of the two.
        """
        had, base, model = old.part, old.base, old.model
        found = cls({i: base.layers[i] for i in part.layers if i in had.layers})
        alike = not old.tied or (had.embedding, had.head) == (part.embedding, part.head)
        if had.embedding and part.embedding and alike:
            found.embedding = base.embed_tokens
        if had.head and part.head and alike:
            found.norm, found.head = base.norm, model.lm_head
        if shared:
            return found
        for index in had.layers:
            base.layers[index] = Foreign()
        base.embed_tokens, base.norm, model.lm_head = Foreign(), Foreign(), Foreign()
        return found

    def make_way(self, modules: StageModules) -> None:
        """Take the empty modules out that are not to be filled, before weights are loaded."""
        self._put(modules, {i: Foreign() for i in self.layers}, Foreign(), Foreign(), Foreign())

    def put_into(self, modules: StageModules) -> None:
        """Put the loaded ones in their place, once all else is loaded and finished."""
        self._put(modules, self.layers, self.embedding, self.norm, self.head)

    def _put(
        self, modules: StageModules, layers: dict[int, Any], embedding: Any, norm: Any, head: Any
    ) -> None:
        for index, layer in layers.items():
            modules.base.layers[index] = layer
        if self.embedding is not None:
            modules.base.embed_tokens = embedding
        if self.head is not None:
            modules.base.norm, modules.model.lm_head = norm, head
