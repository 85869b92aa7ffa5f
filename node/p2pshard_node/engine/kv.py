"""The keys and values of every sequence, in one pool a layer, allocated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["KvPool", "KvShape"]


@dataclass(frozen=True)
class KvShape:
    """What one token leaves behind in one layer."""

    heads: int
    key_width: int
    value_width: int
    """Differs from `key_width` with multi-head latent attention."""

    @property
    def elements(self) -> int:
        return self.heads * (self.key_width + self.value_width)


class KvPool:
    """`blocks` blocks of `block_size` tokens a layer; slot = block x block_size + offset.

    ``keys[layer]``: [slots, heads, key_width], ``values[layer]``: [slots, heads, value_width], in the
    compute dtype.
    """

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        slots = blocks * block_size

        def allocate(heads: int, width: int) -> torch.Tensor:
            # filled, so that the pages are ours from now on and a long sequence later finds its memory
            return torch.empty(slots, heads, width, dtype=dtype, device=device).zero_()

        self.keys = {layer: allocate(s.heads, s.key_width) for layer, s in shapes.items()}
        self.values = {layer: allocate(s.heads, s.value_width) for layer, s in shapes.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pool in (self.keys, self.values) for t in pool.values())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each, in order, on every layer."""
        for pool in (self.keys, self.values):
            for tensor in pool.values():
                blocks = tensor.view(self.blocks, self.block_size, *tensor.shape[1:])
                for source, target in pairs:
                    blocks[target].copy_(blocks[source])
