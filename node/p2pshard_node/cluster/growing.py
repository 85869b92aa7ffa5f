"""When to ask whether what is served should spread to more nodes: not at every look, and not for nodes that come and go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pshard.planning.plan import Epoch, Plan

__all__ = ["Growing"]

LOAD_S = 5.0
"""The requests that count are those that have run at once for so long."""
ASK_S = 2.0
"""Between two looks whether a move is worth it."""
AGAIN_S = 10.0
"""The same while several requests run and nothing else has changed: steps take longer the longer the answers are."""
REST_S = 60.0
"""Between two moves of a deployment for a gain, and after one that failed."""
STEADY_S = 5.0
"""So long a node has to be there before it is given layers that others serve well."""
FLAP_S = 600.0
"""Each time that a node was lost within this makes it wait twice as long."""
MOST_STEADY_S = 320.0


@dataclass
class _Watched:
    """One deployment."""

    loads: deque[tuple[float, int]] = field(default_factory=deque)
    judged: tuple[Epoch, frozenset[str], int] | None = None
    asked: float = float("-inf")
    not_before: float = 0.0


class Growing:
    """While this node coordinates. ``streams(deployment)``: sequences that its driver has now."""

    def __init__(self, streams: Callable[[str], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams, self._clock = streams, clock
        self._watched: dict[str, _Watched] = {}
        self._since: dict[str, float] = {}
        """Since when each member has been one without a break."""
        self._losses: dict[str, deque[float]] = {}

    # -- who is there
    def see(self, members: set[str]) -> None:
        """The members now, at every look."""
        now = self._clock()
        for node in set(self._since) - members:
            del self._since[node]
            self._losses.setdefault(node, deque(maxlen=8)).append(now)
        for node in members:
            self._since.setdefault(node, now)
        for node in [n for n, losses in self._losses.items() if now - losses[-1] > FLAP_S]:
            del self._losses[node]

    def steady(self, node: str) -> bool:
        """Whether a node has been there for long enough to be given layers that others serve well."""
        since = self._since.get(node)
        losses = [t for t in self._losses.get(node, ()) if self._clock() - t <= FLAP_S]
        return since is not None and self._clock() - since >= min(STEADY_S * 2 ** len(losses), MOST_STEADY_S)

    # -- what is served
    def load(self, deployment: str) -> int:
        """Requests that have run at once all the time lately, one at least, which is also taken while that is not known."""
        watched, now = self._watched.setdefault(deployment, _Watched()), self._clock()
        watched.loads.append((now, self._streams(deployment)))
        while now - watched.loads[0][0] > LOAD_S and now - watched.loads[1][0] >= LOAD_S:
            watched.loads.popleft()
        if now - watched.loads[0][0] < LOAD_S:
            return 1
        return max(1, min(count for _, count in watched.loads))

    def due(self, deployment: str, plan: Plan, serving: set[str]) -> bool:
        """Whether something has changed since it was last asked that may make a move worth it."""
        load = self.load(deployment)
        watched = self._watched[deployment]
        spare = serving - set(plan.nodes)
        now = self._clock()
        if (
            now < watched.not_before
            or now - watched.asked < ASK_S
            or not spare
            or not all(self.steady(n) for n in spare)
        ):
            return False
        changed = watched.judged != (plan.epoch, frozenset(serving), load)
        return changed or (load > 1 and now - watched.asked >= AGAIN_S)

    def judged(self, deployment: str, plan: Plan, serving: set[str], load: int) -> bool:
        """It was asked, under these circumstances; whether they were others than the time before."""
        watched, before = self._watched[deployment], self._watched[deployment].judged
        watched.judged, watched.asked = (plan.epoch, frozenset(serving), load), self._clock()
        return watched.judged != before

    def rest(self, deployment: str) -> None:
        """A move was made or failed: the next one has time."""
        self._watched[deployment].not_before = self._clock() + REST_S

    def forget(self, deployment: str) -> None:
        self._watched.pop(deployment, None)
