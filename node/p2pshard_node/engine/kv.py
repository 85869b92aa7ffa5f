"""The keys and values of every sequence, in one pool a layer, allocated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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

    def block_bytes(self, layer: int) -> int:
        """Of one block's keys and values in one layer."""
        return (self.keys[layer].nbytes + self.values[layer].nbytes) // self.blocks

    def read(self, layer: int, blocks: Sequence[int]) -> bytes:
        """Keys of these blocks, then values."""
        index = torch.tensor(blocks, dtype=torch.int64)
        parts = [self._blocks(t)[index.to(t.device)].cpu() for t in (self.keys[layer], self.values[layer])]
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, layer: int, blocks: Sequence[int], data: bytes) -> None:
        """As `read` gave it. Raises `ValueError` for another number of bytes."""
        if len(data) != len(blocks) * self.block_bytes(layer):
            raise ValueError(f"{len(data)} bytes for {len(blocks)} blocks of {self.block_bytes(layer)}")
        index, start = torch.tensor(blocks, dtype=torch.int64), 0
        for tensor in (self.keys[layer], self.values[layer]):
            rows = self._blocks(tensor)
            shape = (len(blocks), *rows.shape[1:])
            size = rows[0].nbytes * len(blocks)
            given = np.frombuffer(data, np.uint8, size, start)
            rows[index.to(tensor.device)] = (
                torch.from_numpy(given.copy()).view(tensor.dtype).view(shape).to(tensor.device)
            )
            start += size

    def take(self, other: KvPool, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these blocks of these layers from another pool of the same shape."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in layers:
            for mine, theirs in (
                (self.keys[layer], other.keys[layer]),
                (self.values[layer], other.values[layer]),
            ):
                at = index.to(mine.device)
                self._blocks(mine)[at] = other._blocks(theirs)[at]

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.blocks, self.block_size, *tensor.shape[1:])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each, in order, on every layer."""
        for pool in (self.keys, self.values):
            for tensor in pool.values():
                blocks = self._blocks(tensor)
                for source, target in pairs:
                    blocks[target].copy_(blocks[source])
