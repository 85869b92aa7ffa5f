"""Turns the hops of steps that came back into a breakdown: where the time of the last steps went. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from p2pshard.trace import PhaseTrace, Spread, StageTrace, Trace
from p2pshard.transport.frames import Arrival, Hop

__all__ = ["Trip", "TripWindow"]

_STEPS = 256
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Trip:
    """One step's way through all stages and back."""

    sent: float
    """Seconds of the driver's clock."""
    returned: float
    tokens: int
    """That the step carried, at least one."""
    prefill: bool
    """Some of them are of a prompt."""
    hops: tuple[Hop, ...]
    """One of each stage, in order."""
    arrival: Arrival | None
    """Of the tokens, back at the driver; None when no edge brought them."""


class TripWindow:
    """The last 256 steps of each kind since the last pause of a second or more."""

    def __init__(self, stages: int) -> None:
        self._stages = list(range(stages))
        self._spell = 0
        self._last = float("-inf")
        """When a step last returned."""
        self._decode: deque[Trip] = deque(maxlen=_STEPS)
        self._prefill: deque[Trip] = deque(maxlen=_STEPS)

    def add(self, trip: Trip) -> None:
        """Take a step in. One whose hops are not those of all stages in order, as a faulty peer may send, is left out."""
        if [h.stage for h in trip.hops] != self._stages:
            return
        if trip.sent - self._last >= _PAUSE_S:
            self._spell += 1
            self._decode.clear()
            self._prefill.clear()
        self._last = max(self._last, trip.returned)
        (self._prefill if trip.prefill else self._decode).append(trip)

    def report(self, *, under_way: bool) -> Trace:
        return Trace(self._spell, under_way, _phase(self._decode), _phase(self._prefill))


def _phase(trips: Sequence[Trip]) -> PhaseTrace | None:
    if not trips:
        return None
    tokens = sum(t.tokens for t in trips)
    wall_s = _covered((t.sent, t.returned) for t in trips)
    by_stage = list(zip(*(t.hops for t in trips), strict=True))
    stages = [_stage(hops, tokens, wall_s) for hops in by_stage]
    arrivals = [t.arrival for t in trips if t.arrival is not None]
    if arrivals:
        back = sum(a.nbytes for a in arrivals) / tokens
        serialise_ms = Spread.of(a.serialise_us / 1e3 for a in arrivals)
        stages[0] = replace(stages[0], serialise_ms=serialise_ms, bytes_per_token=back)
    return PhaseTrace(
        len(trips),
        tokens,
        wall_s,
        Spread.of((t.returned - t.sent) * 1e3 for t in trips),
        Spread.of(max(0.0, _outside_ms(t) - _serialise_ms(t) / _edges(t)) for t in trips),
        Spread.of(_outside_ms(t) for t in trips),
        tuple(stages),
    )


def _stage(hops: Sequence[Hop], tokens: int, wall_s: float) -> StageTrace:
    worked_s = sum(h.compute_us + h.sample_us for h in hops) / 1e6
    return StageTrace(
        Spread.of(h.queue_us / 1e3 for h in hops),
        Spread.of(h.compute_us / 1e3 for h in hops),
        Spread.of(h.sample_us / 1e3 for h in hops),
        Spread.of(h.serialise_us / 1e3 for h in hops),
        busy=min(1.0, worked_s / wall_s) if wall_s > 0 else 0.0,
        bytes_per_token=sum(h.nbytes for h in hops) / tokens,
    )


def _edges(trip: Trip) -> int:
    """A ring has as many edges as stages; a single stage is charged as one."""
    return len(trip.hops)


def _outside_ms(trip: Trip) -> float:
    """Per edge: the part of the round trip in which no stage had the step."""
    inside_us = sum(h.queue_us + h.compute_us + h.sample_us for h in trip.hops)
    return max(0.0, (trip.returned - trip.sent) * 1e3 - inside_us / 1e3) / _edges(trip)


def _serialise_ms(trip: Trip) -> float:
    back_us = trip.arrival.serialise_us if trip.arrival is not None else 0
    return (sum(h.serialise_us for h in trip.hops) + back_us) / 1e3


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
