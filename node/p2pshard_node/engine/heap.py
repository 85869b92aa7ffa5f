"""Freed memory goes back to the system while a model loads.

glibc keeps freed blocks of up to 32 MB for reuse. Conversion frees many, between allocations that stay, so a
third of an int8 model's size would be held for nothing and counted against the node's budget.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["returned_at_once"]

_M_MMAP_THRESHOLD = -3
_WHILE_LOADING = 128 * 1024
#: glibc's own upper limit: activations of later steps are reused, not mapped anew each time
_AFTERWARDS = 32 * 2**20


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Within, blocks above 128 KiB are mapped one by one and unmapped when freed. Nothing happens without
    glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)
