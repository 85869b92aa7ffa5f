"""Where the tokens of a step lie in the pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """The rows of a step; made by `StageModel`, read by both ways of running a layer."""

    rows: np.ndarray
    """int64 [R, 4]: columns first and last (exclusive), position of the first, start in `table`."""
    table: np.ndarray
    """int64: the blocks of all rows, one row's after the other."""
    tokens: int
    """Columns of the step."""
