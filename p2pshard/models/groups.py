"""How a matrix of grouped weights lies in memory, and which grouping a file's tensor gets. Pure.

A weight is ``s (q - zero) - m``: ``q`` an unsigned integer of 4, 6 or 8 bits, ``s`` and ``m`` shared by a group
of 32 along a row. Sixteen rows form a *panel*, and a panel is one run of bytes: for each block of a row, what
its groups share, then the integers, arranged so that a vector of sixteen 32-bit lanes holds four neighbouring
weights of each of the sixteen rows. A product then needs no sum across lanes, and reads the panel once from
its first byte to its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from p2pshard.models.manifest import Manifest

__all__ = ["FINE", "GROUP", "LANES", "LAYOUTS", "NESTED", "PLAIN", "GroupLayout", "grouped_as", "has_groups"]

GROUP = 32
"""Weights of a row that share a scale."""
LANES = 16
"""Rows of a panel."""

PLAIN, NESTED, FINE = 0, 1, 2
"""How scales are stored. Plain: a float16 scale (and minimum) a group. Nested, as in ggml's Q4_K and Q5_K: a
float16 scale and minimum for 8 groups, multiplied by an 8-bit integer each for every group. Fine, as in Q6_K
and Q3_K: a float16 scale for 8 groups, multiplied by a signed 8-bit integer for each half of a group."""


@dataclass(frozen=True)
class GroupLayout:
    """One way of storing; `LAYOUTS` has all that there are."""

    name: str
    code: int
    """Its place in `LAYOUTS`: what compiled kernels are chosen by."""
    bits: int
    """4, 6 or 8."""
    zero: int
    """Subtracted from each stored integer."""
    scales: int
    """`PLAIN`, `NESTED` or `FINE`."""
    minimum: bool
    """Whether groups have one."""

    @cached_property
    def groups(self) -> int:
        """Groups of a block."""
        return 1 if self.scales == PLAIN else 8

    @cached_property
    def head_bytes(self) -> int:
        """Of a block of sixteen rows: float16 scales, then float16 minimums."""
        return 2 * LANES * (2 if self.minimum else 1)

    @cached_property
    def sub_bytes(self) -> int:
        """Of a group of sixteen rows: its two 8-bit integers a row, before its weights."""
        return 0 if self.scales == PLAIN else 2 * LANES

    @cached_property
    def group_bytes(self) -> int:
        """Of a group of sixteen rows, `sub_bytes` included."""
        return self.sub_bytes + LANES * GROUP * self.bits // 8

    @cached_property
    def block_bytes(self) -> int:
        """Of a block of sixteen rows."""
        return self.head_bytes + self.groups * self.group_bytes

    def blocks(self, columns: int) -> int:
        """Blocks in a row; `columns` is a multiple of the block's width."""
        return columns // (GROUP * self.groups)

    def fits(self, columns: int) -> bool:
        """Whether rows are a whole number of blocks."""
        return columns % (GROUP * self.groups) == 0

    def nbytes(self, rows: int, columns: int) -> int:
        """Of a whole matrix; rows are filled up to whole panels."""
        return -(-rows // LANES) * self.blocks(columns) * self.block_bytes


def _layouts(*rows: tuple[str, int, int, int, bool]) -> dict[str, GroupLayout]:
    return {row[0]: GroupLayout(row[0], code, *row[1:]) for code, row in enumerate(rows)}


LAYOUTS = _layouts(
    ("Q4_0", 4, 8, PLAIN, False),
    ("Q4_1", 4, 0, PLAIN, True),
    ("Q4_K", 4, 0, NESTED, True),
    ("Q5_0", 6, 16, PLAIN, False),
    ("Q5_1", 6, 0, PLAIN, True),
    ("Q5_K", 6, 0, NESTED, True),
    ("Q3_K", 4, 4, FINE, False),
    ("Q6_K", 6, 32, FINE, False),
    ("Q8_0", 8, 128, PLAIN, False),
)
"""By the ggml type whose values they hold exactly."""


def has_groups(manifest: Manifest) -> bool:
    """Whether a file was quantised in groups by its author: then what it left in floats matters."""
    return any(t.dtype in LAYOUTS for t in manifest.tensors)


def grouped_as(dtype: str, columns: int, *, outer: bool, grouped_file: bool) -> GroupLayout | None:
    """How ``int4`` stores a matrix of the file's type `dtype`.

    The file's own groups stay as they are. Of other matrices those between a model's embedding and its head
    (`outer`: these two) become 4-bit groups, unless the file has groups and left this one out; the rest become
    8-bit groups. None: rows do not divide into groups.
    """
    own = LAYOUTS.get(dtype)
    if own is not None and own.fits(columns):
        return own
    if columns % GROUP:
        return None
    return LAYOUTS["Q8_0" if outer or grouped_file else "Q4_1"]
