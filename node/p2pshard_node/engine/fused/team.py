"""Threads that share the work of compiled kernels with whoever calls them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2pshard_node.engine.fused.pace import Pace
from p2pshard_node.engine.fused.tickets import COUNTERS, DONE, FAILED, Crew, alone

__all__ = ["Team", "Work", "team"]

log = logging.getLogger(__name__)

#: ``kernel(crew, *arguments)``, without the interpreter's lock.
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Work:
    """How much a call of a kernel is."""

    weights: int
    """Bytes that it multiplies by, in all its layers."""
    layers: int
    rows: int

    @property
    def ranks(self) -> int:
        """More threads than these gain nothing on idle cores: waking one takes as long as some 2 million
        multiplications, and the phases of a layer as long as a quarter of a million."""
        work = self.weights * self.rows
        return 1 + min(work >> 21, work // max(1, self.layers) >> 18)

    @property
    def kind(self) -> tuple[int, int, int]:
        """Equal for calls that take about as long for each row."""
        return self.weights, self.layers, self.rows.bit_length()


@dataclass
class _Post:
    """Where one helper sleeps, and finds what there is to do. Holds no team, so that a team can be collected."""

    bell: threading.Lock = field(default_factory=threading.Lock)
    """Held while there is nothing to do; let go to wake the helper."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held by the helper from when it looks what there is to do until it has done it."""
    job: tuple[Kernel, tuple[Any, ...]] | None = None
    """The latest; a helper that slept through others has missed nothing."""
    ended: bool = False

    def __post_init__(self) -> None:
        self.bell.acquire()

    def ring(self) -> None:
        if self.bell.locked():  # only the helper takes it, only the one caller lets it go
            self.bell.release()

    def work(self) -> None:
        """The helper's life."""
        while True:
            self.bell.acquire()
            with self.busy:
                if self.ended:
                    return
                if self.job is not None:
                    kernel, arguments = self.job
                    try:
                        kernel(*arguments)
                    except Exception:
                        # it has taken no item: a kernel raises before it begins, if at all
                        log.exception("a helper thread could not call a kernel; its callers go on without it")
                    del kernel, arguments


def _dismiss(posts: list[_Post]) -> None:
    for post in posts:
        post.job, post.ended = None, True
        post.ring()


class Team:
    """`threads` that work on a kernel together: the caller, and helpers that sleep between calls.

    No thread is made for a team of one. The helpers end with `close`, or when the team is collected.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._posts = [_Post() for _ in range(self.threads - 1)]
        self._counters = np.zeros(COUNTERS, np.int64)
        self._calling = threading.Lock()
        self._paces: dict[Hashable, Pace] = {}
        self._helpers = [
            threading.Thread(target=post.work, name=f"kernels-{rank}", daemon=True)
            for rank, post in enumerate(self._posts, 1)
        ]
        for helper in self._helpers:
            helper.start()
        self._end = weakref.finalize(self, _dismiss, self._posts)

    def call(self, work: Work, kernel: Kernel, *arguments: Any) -> Any:
        """``kernel(crew, *arguments)`` on as many threads as make it faster; the caller's result.

        Alone while another thread has the team. Helpers may hold `arguments` a little longer than this lasts.
        """
        most = min(work.ranks, self.threads)
        if most == 1 or not self._calling.acquire(blocking=False):
            return kernel(alone(), *arguments)
        try:
            key = (kernel, most, work.kind)
            pace = self._paces.get(key)
            if pace is None:
                pace = self._paces[key] = Pace(most)
            begun = time.perf_counter()
            result = self._share(pace.ranks, kernel, arguments)
            pace.took((time.perf_counter() - begun) / work.rows)
            return result
        finally:
            self._calling.release()

    def _share(self, ranks: int, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        posts = self._posts[: ranks - 1]
        begin = int(self._counters[DONE])
        self._counters[FAILED] = 0
        try:
            for rank, post in enumerate(posts, 1):
                post.job = (kernel, (Crew(self._counters, begin, ranks, rank), *arguments))
                post.ring()
            return kernel(Crew(self._counters, begin, ranks, 0), *arguments)
        except BaseException:
            self._settle(posts)
            raise
        finally:
            for post in posts:
                post.job = None

    def _settle(self, posts: list[_Post]) -> None:
        """After a call that failed here: wait for helpers that began it, and begin the tickets anew."""
        for post in posts:
            post.job = None
            with post.busy:
                pass
        self._counters = np.zeros(COUNTERS, np.int64)

    def close(self) -> None:
        """End the helpers, and wait for that. Calls go on, on one thread."""
        with self._calling:
            self._end()
            self.threads = 1
        for helper in self._helpers:
            helper.join()


_teams: weakref.WeakValueDictionary[int, Team] = weakref.WeakValueDictionary()
_making = threading.Lock()


def team(threads: int) -> Team:
    """The process's team of so many, which lives as long as someone holds it."""
    with _making:
        found = _teams.get(threads)
        if found is None or found.threads != threads:
            found = _teams[threads] = Team(threads)
        return found
