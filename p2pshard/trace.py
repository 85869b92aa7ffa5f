"""Where a deployment's steps spend their time, as its driver sees it: values that `status` carries and `bench` shows.

Times of a stage are durations of that machine's own clock; what no stage claims of a round trip is the wire's share.
No two clocks are ever compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Self

__all__ = ["PhaseTrace", "Spread", "StageTrace", "Trace"]


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of some measurements; zeros of none."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The median of an even number of values is the mean of the middle two; p95 is by nearest rank."""
        known = sorted(values)
        if not known:
            return cls(0.0, 0.0)
        low, high = known[(len(known) - 1) // 2], known[len(known) // 2]
        return cls((low + high) / 2, known[ceil(0.95 * len(known)) - 1])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(float(value["median"]), float(value["p95"]))


@dataclass(frozen=True)
class StageTrace:
    """One stage over the steps of a window, and the edge that leads to it.

    The edge that leads to the first stage brings the tokens back from the last; a plan of one stage has none.
    """

    queue_ms: Spread
    """From a step's arrival to its computation."""
    compute_ms: Spread
    sample_ms: Spread
    """The sampler; zeros but on the last stage."""
    serialise_ms: Spread
    """Encoding and decoding of the frame that came over its edge."""
    busy: float
    """Computing and sampling over the time that steps were under way: 0 to 1."""
    bytes_per_token: float
    """Over its edge."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            Spread.from_json(value["queue_ms"]),
            Spread.from_json(value["compute_ms"]),
            Spread.from_json(value["sample_ms"]),
            Spread.from_json(value["serialise_ms"]),
            float(value["busy"]),
            float(value["bytes_per_token"]),
        )


@dataclass(frozen=True)
class PhaseTrace:
    """Steps of one kind: those that only continue sequences, or those that carry a part of a prompt."""

    steps: int
    tokens: int
    """That the steps carried: prompt tokens, or one or more for each sequence."""
    wall_s: float
    """For which at least one of the steps was under way."""
    round_trip_ms: Spread
    """From the driver's decision to the tokens' return."""
    wire_ms: Spread
    """Per edge: the part of the round trip that no stage spent queueing, computing, sampling or serialising."""
    hop_overhead_ms: Spread
    """Per edge: the wire and serialising."""
    stages: tuple[StageTrace, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            int(value["steps"]),
            int(value["tokens"]),
            float(value["wall_s"]),
            Spread.from_json(value["round_trip_ms"]),
            Spread.from_json(value["wire_ms"]),
            Spread.from_json(value["hop_overhead_ms"]),
            tuple(StageTrace.from_json(s) for s in value["stages"]),
        )


@dataclass(frozen=True)
class Trace:
    """The last steps of the spell of work that is under way, or of the last one."""

    spell: int
    """A number that grows when work begins after a pause of a second or more."""
    under_way: bool
    """Steps are in flight."""
    decode: PhaseTrace | None
    prefill: PhaseTrace | None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises `KeyError`, `TypeError` or `ValueError` for what is no trace."""
        decode, prefill = value.get("decode"), value.get("prefill")
        return cls(
            int(value["spell"]),
            bool(value["under_way"]),
            PhaseTrace.from_json(decode) if decode else None,
            PhaseTrace.from_json(prefill) if prefill else None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
