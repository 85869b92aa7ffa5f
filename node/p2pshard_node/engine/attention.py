"""Our attention function: causal attention of a ragged step over the block pool.

transformers calls `attend` in place of its own kernels. What a step is about (rows, slots, pool) travels on a
context variable, since some architectures do not pass their keyword arguments down.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from p2pshard.errors import UnsupportedModel
from p2pshard_node.engine import compat
from p2pshard_node.engine.kv import KvPool
from p2pshard_node.engine.placement import Placement

__all__ = ["ATTENTION", "STEP", "AttentionStep", "RowSpan", "Step", "attend", "spans_of"]

ATTENTION = "p2pshard"
#: Queries of one row handled at once, and most scores of one product: both bound the temporaries of long
#: prompts.
QUERY_BLOCK = 128
MAX_SCORES = 1 << 21


class Step(Protocol):
    """What stands behind `attend` during one forward pass."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """Queries [1, H, T, D], keys [1, K, T, D], values [1, K, T, E] → [1, T, H, E]."""


STEP: ContextVar[Step] = ContextVar("p2pshard_step")


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers' ``AttentionInterface``."""
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own")
    return STEP.get().attend(module, query, key, value, **how), None


compat.register_attention(ATTENTION, attend)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One sequence's tokens in a step, and where its keys lie."""

    first: int
    last: int
    """Columns [first, last) of the step."""
    start: int
    """Position of the first token in its sequence."""
    end: int
    """Tokens of the sequence after this step."""
    slot: int
    """First slot of its blocks when they are consecutive, else -1."""
    slots: torch.Tensor | None
    """int64 [end], the slot of each position, when they are not."""

    def slice(self, pool_SKD: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Positions [low, high) as [1, K, high - low, D]; a view when the blocks are consecutive."""
        if self.slots is None:
            part = pool_SKD[self.slot + low : self.slot + high]
        else:
            part = pool_SKD.index_select(0, self.slots[low:high])
        return part.transpose(0, 1).unsqueeze(0)


def spans_of(
    placement: Placement, size: int, device: str
) -> tuple[tuple[RowSpan, ...], torch.Tensor, torch.Tensor]:
    """Spans of the rows, slot and position of each token (int64 [T]); `size`: tokens of a block."""
    spans, slots, positions = [], [], []
    for first, last, start, begin in placement.rows.tolist():
        end = start + last - first
        used = placement.table[begin : begin + -(-end // size)]
        where = np.arange(start, end)
        positions.append(where)
        if (np.diff(used) == 1).all():
            slot, table = int(used[0]) * size, None
            slots.append(where + slot)
        else:
            every = (used[:, None] * size + np.arange(size)).reshape(-1)[:end]
            slot, table = -1, torch.from_numpy(every).to(device)
            slots.append(every[start:])
        spans.append(RowSpan(first, last, start, end, slot, table))
    slots_T = torch.from_numpy(np.concatenate(slots)).to(device)
    return tuple(spans), slots_T, torch.from_numpy(np.concatenate(positions)).to(device)


@dataclass(slots=True)
class AttentionStep:
    """One step over real keys and values."""

    pool: KvPool
    rows: tuple[RowSpan, ...]
    slots_T: torch.Tensor
    """int64 [T], the slot that each token's key and value go to."""
    windows: dict[int, int] = field(default_factory=dict)
    """Sliding windows of layers whose attention call does not name them."""
    take: torch.Tensor | None = None
    """int64 [R], the columns whose logits are wanted; None on a stage without a head."""
    _masks: dict[tuple[int, int, int, int, int], torch.Tensor] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self.slots_T, key[0].transpose(0, 1))
        values.index_copy_(0, self.slots_T, value[0].transpose(0, 1))
        scale = how.get("scaling")
        if scale is None:
            scale = query.shape[-1] ** -0.5
        window = how.get("sliding_window") or self.windows.get(layer, 0)
        softcap, sinks = how.get("softcap"), how.get("s_aux")
        plain = softcap is None and sinks is None and keys.shape[-1] == values.shape[-1]
        outputs = []
        for row in self.rows:
            one = row.last - row.first == 1
            part = query if len(self.rows) == 1 else query[:, :, row.first : row.last]
            if plain and one:
                outputs.append(_decode(row, part, keys, values, scale, window))
            elif plain:
                outputs.append(self._prefill(row, part, keys, values, scale, window))
            else:
                outputs.append(self._explicit(row, part, keys, values, scale, window, softcap, sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _prefill(
        self,
        row: RowSpan,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        length, grouped = query.shape[2], query.shape[1] != keys.shape[1]
        if row.start == 0 and length <= QUERY_BLOCK and not 0 < window < length:
            k, v = row.slice(keys, 0, length), row.slice(values, 0, length)
            out = scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)
        outputs = []
        for begin in range(0, length, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, length)
            low, high, mask = self._mask(row, begin, end, window, query.device)
            k, v = row.slice(keys, low, high), row.slice(values, low, high)
            part = query[:, :, begin:end]
            out = scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _explicit(
        self,
        row: RowSpan,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Scores written out: for soft caps, sinks and values of another width than keys."""
        heads, length = query.shape[1], query.shape[2]
        shared = keys.shape[1]
        group = heads // shared
        block = max(1, min(length, QUERY_BLOCK, MAX_SCORES // (heads * row.end)))
        outputs = []
        for begin in range(0, length, block):
            end = min(begin + block, length)
            low, high, mask = self._mask(row, begin, end, window, query.device)
            k_KSD, v_KSE = row.slice(keys, low, high)[0], row.slice(values, low, high)[0]
            q_KMD = query[0, :, begin:end].reshape(shared, group * (end - begin), -1)
            scores = torch.bmm(q_KMD, k_KSD.transpose(1, 2)).mul_(scale)
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            scores = scores.view(shared, group, end - begin, high - low)
            if end - begin > 1:
                scores = scores.masked_fill_(~mask, float("-inf"))
            if sinks is not None:
                column = sinks.to(scores.dtype).view(shared, group, 1, 1).expand(-1, -1, end - begin, 1)
                scores = torch.cat((scores, column), dim=-1)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            if sinks is not None:
                weights = weights[..., :-1]
            out = torch.bmm(weights.reshape(shared, group * (end - begin), high - low), v_KSE)
            outputs.append(out.view(1, heads, end - begin, -1).transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _mask(
        self, row: RowSpan, begin: int, end: int, window: int, device: torch.device
    ) -> tuple[int, int, torch.Tensor]:
        """Keys [low, high) that queries [begin, end) of a row may see, and which (bool, True: seen). Shared
        by the layers."""
        low = max(0, row.start + begin - window + 1) if window else 0
        high = row.start + end
        name = (row.first, begin, end, low, window)
        mask = self._masks.get(name)
        if mask is None:
            positions = torch.arange(low, high, device=device)
            queries = positions[row.start + begin - low :].unsqueeze(1)
            mask = positions <= queries
            if window:
                mask &= positions > queries - window
            self._masks[name] = mask
        return low, high, mask


def _decode(
    row: RowSpan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """One query sees all keys: the heads that share a key head stand in for a query length, so no key is
    copied."""
    low = max(0, row.end - window) if window else 0
    heads, shared = query.shape[1], keys.shape[1]
    grouped = query.reshape(1, shared, heads // shared, query.shape[-1])
    out = scaled_dot_product_attention(
        grouped, row.slice(keys, low, row.end), row.slice(values, low, row.end), scale=scale
    )
    return out.reshape(1, 1, heads, out.shape[-1])
