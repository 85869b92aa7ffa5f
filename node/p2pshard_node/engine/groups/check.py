"""Before a layout is used: does this processor's compiled product give the definition's bits?"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from p2pshard.errors import Internal
from p2pshard.models.groups import FINE, GROUP, PLAIN, GroupLayout
from p2pshard_node.engine.groups.features import target_features
from p2pshard_node.engine.groups.linear import GroupLinear
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.groups.reference import reference_product
from p2pshard_node.engine.groups.repack import GroupRows

__all__ = ["check_exact"]


@cache
def check_exact(layout: GroupLayout, wide: bool) -> None:
    """Compile the product for a layout and compare it with plain arithmetic, extremes included, in tiles of
    every size. Raises `Internal`."""
    random = np.random.default_rng(7)
    rows, groups, tokens = 20, 8, 15
    weights = _random_rows(layout, rows, groups, random)
    x_TK = random.normal(size=(tokens, groups * GROUP)).astype(np.float32)
    x_TK[0], x_TK[1], x_TK[2] = 1, -1, 0
    matrix = GroupMatrix(layout, rows, groups * GROUP)
    matrix.fill(0, weights)
    out_TN = GroupLinear(matrix, None, wide=wide)(torch.from_numpy(x_TK)).numpy()
    if not np.array_equal(out_TN, reference_product(weights, x_TK, wide)):
        raise Internal(
            f"the compiled product of {layout.name} groups ({target_features().dot}) is not exact on this "
            "processor; use int8 or bfloat16, and report this with the output of `p2pshard status`"
        )


def _random_rows(layout: GroupLayout, rows: int, groups: int, random: np.random.Generator) -> GroupRows:
    most = 1 << layout.bits
    q_RGK = random.integers(0, most, (rows, groups, GROUP)).astype(np.uint8)
    q_RGK[0], q_RGK[1] = most - 1, 0
    blocks = groups // layout.groups
    scale = random.normal(size=(2, rows, blocks)).astype(np.float16)
    sub = random.integers(0, 256 if layout.scales == FINE else 64, (rows, groups, 2)).astype(np.uint8)
    return GroupRows(
        layout,
        q_RGK,
        scale[0],
        scale[1] if layout.minimum else None,
        None if layout.scales == PLAIN else sub,
    )
