"""Compile all kernels before they are needed, in a process of its own.

Compiling takes 15 to 25 s of one core and 85 MB once on a machine; a worker that finds the kernels on disk
needs neither. ``python -m p2pshard_node.engine.fused.prepare`` does it by hand.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np

from p2pshard_node.engine.fused import ends, layers
from p2pshard_node.engine.fused.cache import FOLDER
from p2pshard_node.engine.fused.norm import NORM
from p2pshard_node.engine.fused.product import MATRIX
from p2pshard_node.engine.fused.rotary import angles
from p2pshard_node.engine.fused.tickets import alone

__all__ = ["compile_all", "prepare"]

log = logging.getLogger(__name__)

_DONE = FOLDER / "complete"
_SECONDS = 600


def prepare() -> None:
    """See that the kernels are on disk. Where that cannot be, they are compiled here when first called."""
    if _DONE.exists():
        return
    log.info("compiling kernels for this processor, once: about 20 s")
    try:
        subprocess.run(
            [sys.executable, "-m", "p2pshard_node.engine.fused.prepare"],
            check=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels were not compiled ahead, this process does it: %s", error)


def compile_all() -> None:
    """Call every kernel once with the types that a step calls it with, and nothing to do."""

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    rows, table, none = np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    matrix, norm = np.zeros((0, 7), MATRIX), np.zeros((0, 6), NORM)
    cos, sums, q = floats(1, 0, 16), np.zeros(0, np.int32), np.zeros((0, 0), np.int8)
    zero, crew, ranks = np.float32(0), alone(), floats(1, 0)
    scratches, blocks = np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int64)
    scales = floats(0)
    ends.places(rows, table, 16, none, none)
    angles(none, floats(1, 16), floats(1), cos, cos)
    layers.run_layers(
        crew, np.zeros(0, layers.LAYER), matrix, norm, floats(0, 16), rows, table, 16, none, cos, cos,
        floats(0, 16), floats(0, 16), floats(0, 16), floats(0, 16), q, sums, scales,
        ranks, scratches, ranks, blocks, ranks,
    )  # fmt: skip
    one_norm, one_matrix = np.zeros(1, NORM), np.zeros(1, MATRIX)
    ends.head(
        crew, floats(0, 16), none, one_norm, one_matrix, floats(0, 16), zero, zero,
        q, sums, scales, ranks, scratches,
    )  # fmt: skip
    ends.linear(crew, floats(0, 16), one_matrix, floats(0, 16), q, sums, scales, scratches)
    ends.embed(0, none, zero, floats(0, 16))
    ends.all_finite(floats(0, 16))


if __name__ == "__main__":
    compile_all()
    FOLDER.mkdir(parents=True, exist_ok=True)
    _DONE.touch()
