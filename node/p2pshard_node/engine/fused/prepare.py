"""Compile kernels before they are needed, in a process of its own.

Compiling takes 15 to 25 s of one core and 85 MB once on a machine, and a few seconds for each layout of grouped
weights and form of their input; a worker that finds the kernels on disk needs neither.
``python -m p2pshard_node.engine.fused.prepare [LAYOUT narrow|wide]`` does it by hand, ``--ahead [LAYOUT...]`` all that is
missing, with low priority.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from p2pshard.models.groups import GROUP, LAYOUTS
from p2pshard_node.engine.fused import ends, layers
from p2pshard_node.engine.fused.norm import NORM
from p2pshard_node.engine.fused.product import MATRIX
from p2pshard_node.engine.fused.rotary import angles
from p2pshard_node.engine.fused.tickets import alone
from p2pshard_node.engine.groups.kernels import multiplier
from p2pshard_node.engine.groups.make import make_groups
from p2pshard_node.engine.kernel_cache import FOLDER

__all__ = ["COMPILING", "compile_all", "prepare"]

log = logging.getLogger(__name__)

COMPILING = "compiling kernels for its processor (once)"
"""The phase of a load, for people."""
_SECONDS = 600.0
_PULSE_S = 10.0
_seen_to: set[tuple[str, ...]] = set()
"""What is on disk, or was tried: the disk is not asked again for each layer."""


def prepare(
    layout: str | None = None, *, wide: bool = False, alive: Callable[[], None] = lambda: None
) -> None:
    """See that the kernels of a step, or the product of a layout of `p2pshard.models.groups`, are on disk.

    Where that cannot be, they are compiled here when first called; it is not tried again for each layer. ``alive()`` is
    called when it begins and now and then meanwhile: a slow processor takes minutes.
    """
    asked = (layout, "wide" if wide else "narrow") if layout else ()
    if asked in _seen_to:
        return
    _seen_to.add(asked)
    if _mark(*asked).exists():
        return
    alive()
    if layout is None:
        log.info("compiling kernels for this processor, once: about 20 s")
    else:
        log.info("compiling the product of %s weights for this processor, once: about 5 s", layout)
    try:
        _run([sys.executable, "-m", "p2pshard_node.engine.fused.prepare", *asked], alive)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels were not compiled ahead, this process does it: %s", error)


def _run(command: list[str], alive: Callable[[], None]) -> None:
    """Raises `OSError` or `subprocess.SubprocessError` unless it ends well; it is given `_SECONDS`."""
    end = time.monotonic() + _SECONDS
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    code = process.wait(timeout=_PULSE_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > end:
                        raise
                    alive()
        except BaseException:
            process.kill()
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _mark(*asked: str) -> Path:
    """Exists once they are compiled."""
    return FOLDER / "-".join(("complete", *asked))


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
    ends.all_finite(floats(0, 16))
    for name in ("Q4_1", "Q8_0"):
        make_groups(LAYOUTS[name], floats(1, GROUP))


def main(*asked: str) -> None:
    if asked[:1] == ("--ahead",):
        if hasattr(os, "nice"):
            os.nice(10)  # whoever computes now comes first
        for each in ((), *((layout, form) for layout in asked[1:] for form in ("narrow", "wide"))):
            if not _mark(*each).exists():
                main(*each)
        return
    if asked:
        layout, form = asked
        multiplier(LAYOUTS[layout], wide=form == "wide")
    else:
        compile_all()
    FOLDER.mkdir(parents=True, exist_ok=True)
    _mark(*asked).touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
