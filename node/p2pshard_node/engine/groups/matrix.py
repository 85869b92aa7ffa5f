"""A matrix of grouped weights in memory: panels of sixteen rows, filled some rows at a time."""

from __future__ import annotations

import numpy as np

from p2pshard.models.groups import GROUP, LANES, GroupLayout
from p2pshard_node.engine.groups.repack import GroupRows

__all__ = ["GroupMatrix"]

_PANELS = 64
"""Panels packed at a time: a few MB of temporaries at most."""


class GroupMatrix:
    """`rows` x `columns` weights in one layout; `data` is uint8 [bytes], `nbytes` all that it costs."""

    def __init__(self, layout: GroupLayout, rows: int, columns: int) -> None:
        if not layout.fits(columns):
            raise ValueError(f"{columns} columns are not a whole number of {layout.name} blocks")
        self.layout, self.rows, self.columns = layout, rows, columns
        self.blocks = layout.blocks(columns)
        self.panels = -(-rows // LANES)
        self.data = np.zeros(layout.nbytes(rows, columns), np.uint8)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def fill(self, first: int, rows: GroupRows) -> None:
        """Store rows from `first` on; `first` begins a panel, and the end is one or the matrix's."""
        end = first + len(rows.q_RGK)
        if first % LANES or (end % LANES and end != self.rows) or end > self.rows:
            raise ValueError(f"rows {first} to {end} of {self.rows} are not whole panels")
        if rows.layout is not self.layout:
            raise ValueError(f"rows of layout {rows.layout.name} for a matrix of {self.layout.name}")
        panels = self._panels()
        for at in range(0, end - first, _PANELS * LANES):
            count = min(_PANELS * LANES, end - first - at)
            part = slice((first + at) // LANES, (first + at) // LANES + -(-count // LANES))
            self._pack(panels[part], rows, slice(at, at + count))

    def _panels(self) -> np.ndarray:
        return self.data.reshape(self.panels, self.blocks, self.layout.block_bytes)

    def _pack(self, out_PBX: np.ndarray, rows: GroupRows, span: slice) -> None:
        layout = self.layout
        panels, blocks = out_PBX.shape[:2]

        def lanes(values: np.ndarray) -> np.ndarray:
            """[rows, X, ...] → [P, X, 16, ...], rows of zeros added at the end."""
            part = values[span]
            lack = panels * LANES - len(part)
            if lack:
                part = np.concatenate([part, np.zeros((lack, *part.shape[1:]), part.dtype)])
            return part.reshape(panels, LANES, *part.shape[1:]).swapaxes(1, 2)

        heads = [rows.scale_RB] if rows.low_RB is None else [rows.scale_RB, rows.low_RB]
        for i, head in enumerate(heads):
            place = slice(2 * LANES * i, 2 * LANES * (i + 1))
            out_PBX[:, :, place] = np.ascontiguousarray(lanes(head)).view(np.uint8)
        groups = out_PBX[:, :, layout.head_bytes :].reshape(panels, blocks, layout.groups, layout.group_bytes)
        if rows.sub_RG2 is not None:
            for i in range(2):
                sub = lanes(rows.sub_RG2[:, :, i]).reshape(panels, blocks, layout.groups, LANES)
                groups[..., LANES * i : LANES * (i + 1)] = sub
        # [P, G, 16 lanes, 8 quads of 4 bytes] → quads before lanes
        words = np.ascontiguousarray(lanes(rows.q_RGK)).view(np.uint32).swapaxes(2, 3)
        quads = np.ascontiguousarray(words).view(np.uint8)
        quads = quads.reshape(panels, blocks, layout.groups, 8, 4 * LANES)
        groups[..., layout.sub_bytes :] = _packed(quads, layout.bits)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """float32 [len(indices), columns] of some rows."""
        return self._unpack(np.asarray(indices)).values()

    def _unpack(self, indices: np.ndarray) -> GroupRows:
        layout = self.layout
        panel, lane = indices // LANES, indices % LANES
        count = len(indices)
        blocks = self._panels()[panel]
        heads = blocks[:, :, : layout.head_bytes].copy().view(np.float16)
        each = np.arange(count)
        scale = heads[each, :, lane]
        low = heads[each, :, LANES + lane] if layout.minimum else None
        groups = blocks[:, :, layout.head_bytes :].reshape(count, -1, layout.group_bytes)
        sub = None
        if layout.sub_bytes:
            sub = np.stack([groups[each, :, lane], groups[each, :, LANES + lane]], axis=2)
        weights = groups[:, :, layout.sub_bytes :].reshape(count, groups.shape[1], -1, LANES, 4)
        own = weights[each, :, :, lane]  # [R, G, vectors, 4]
        return GroupRows(layout, _unpacked(own, layout.bits).reshape(count, -1, GROUP), scale, low, sub)


def _packed(quads: np.ndarray, bits: int) -> np.ndarray:
    """Eight vectors of a group, [..., 8, 64], in `bits` bits a value: [..., bytes]."""
    if bits == 8:
        made = quads
    else:
        made = (quads[..., :4, :] & 15) | (quads[..., 4:, :] << 4)
        if bits == 6:
            tops = [sum((quads[..., i + j, :] >> 4) << 2 * j for j in range(4)) for i in (0, 4)]
            made = np.concatenate([made, np.stack(tops, axis=-2).astype(np.uint8)], axis=-2)
    return made.reshape(*made.shape[:-2], -1)


def _unpacked(vectors: np.ndarray, bits: int) -> np.ndarray:
    """The inverse for any width of the last axis: [..., vectors, W] → [..., 8, W]."""
    if bits == 8:
        return vectors
    nibbles = vectors[..., :4, :]
    made = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2)
    if bits == 6:
        tops = [(vectors[..., 4 + j // 4, :] >> 2 * (j % 4) & 3) << 4 for j in range(8)]
        made |= np.stack(tops, axis=-2)
    return made
