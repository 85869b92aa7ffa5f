"""Parts of one product on several threads. Which thread computes a row changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

__all__ = ["spread"]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="groups")


def spread(count: int, threads: int, run: Callable[[int, int], None]) -> None:
    """``run(first, end)`` over [0, count) in `threads` parts, one of them on this thread.

    Raises what a part raised.
    """
    edges = [count * i // threads for i in range(threads + 1)]
    own, *spans = pairwise(edges)
    others = [_pool(threads - 1).submit(run, *span) for span in spans]
    run(*own)
    for other in others:
        other.result()
