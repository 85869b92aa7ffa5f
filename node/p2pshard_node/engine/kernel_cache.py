"""Where compiled kernels are kept, and how they are compiled.

The folder's name is made of everything that decides their code, so that any number of processes and versions
may share a data directory: whoever writes a file writes what the others would have.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite
import numba
import platformdirs
from numba import types
from numba.core import config
from numba.core.registry import cpu_target

from p2pshard.models import groups

__all__ = ["FOLDER", "kernel", "native"]


def _processor() -> str:
    """Name and features of the instruction set that numba compiles for."""
    return repr(cpu_target.target_context.codegen().magic_tuple())


def _folder() -> Path:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (
        *sorted(here.glob("fused/*.py")),
        *sorted(here.glob("groups/*.py")),
        Path(str(groups.__file__)),
        Path(__file__),
    ):
        digest.update(path.read_bytes())
    versions = (numba.__version__, llvmlite.__version__, platform.python_version(), _processor())
    digest.update(repr(versions).encode())
    given = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(given) if given else Path(platformdirs.user_cache_dir("p2pshard")) / "kernels"
    return root / digest.hexdigest()[:16]


FOLDER = _folder()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` without the interpreter's lock, for whatever types it is called with; kept in `FOLDER`.

    No fast-math: LLVM may neither reorder sums nor contract products, so bits are the source's own.
    """
    with _kept():
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


def native(function: Callable[..., None], arguments: int) -> Any:
    """Compile `function` of so many integers and addresses so that other kernels can call it at its `address`;
    kept as those of `kernel` are."""
    with _kept():
        signature = types.void(*[types.intp] * arguments)
        return numba.cfunc(signature, nopython=True, cache=True, error_model="numpy")(function)


@contextmanager
def _kept() -> Iterator[None]:
    before = config.CACHE_DIR
    config.CACHE_DIR = str(FOLDER)
    try:
        yield
    finally:
        config.CACHE_DIR = before
