"""What the clocks of one client say about some streams that ran together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from p2pshard.trace import Spread

__all__ = ["Figures", "Round", "Timeline"]


@dataclass(frozen=True)
class Timeline:
    """One request, in seconds of one clock."""

    began: float
    """When it was sent."""
    tokens: tuple[float, ...]
    """When each token came, at least two."""


@dataclass(frozen=True)
class Round:
    """Streams that were started together."""

    prefill_tokens_per_second: float
    """Prompt tokens of all streams, until the last of them has its first token."""
    tokens_per_second: float | None
    """Of all streams, while each of them was given tokens; None when they did so one after another."""
    overall_tokens_per_second: float
    """All tokens given, from the first request to the last token."""

    @classmethod
    def of(cls, timelines: Sequence[Timeline], prompt_tokens: int) -> Self:
        """Raises `ValueError` without timelines, or when one has fewer than two tokens."""
        if not timelines or any(len(t.tokens) < 2 for t in timelines):
            raise ValueError("a round needs streams of at least two tokens")
        began = min(t.began for t in timelines)
        every = sorted(time for t in timelines for time in t.tokens)
        start = max(t.tokens[0] for t in timelines)
        end = min(t.tokens[-1] for t in timelines)
        given = sum(start < time <= end for time in every)
        return cls(
            len(timelines) * prompt_tokens / (start - began),
            given / (end - start) if end > start else None,
            len(every) / (every[-1] - began),
        )


@dataclass(frozen=True)
class Figures:
    """Several rounds of the same number of streams: medians of rates, spreads over all requests."""

    streams: int
    ttft_ms: Spread
    """From sending a request to its first token."""
    inter_token_ms: Spread
    """Between two tokens of a stream; tokens that come together are no time apart."""
    tokens_per_second: float | None
    """See `Round`; None when no round has it."""
    prefill_tokens_per_second: float
    overall_tokens_per_second: float
    rounds: tuple[Round, ...]

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Timeline]], prompt_tokens: int) -> Self:
        """Raises `ValueError` as `Round.of`."""
        timelines = [t for one in rounds for t in one]
        each = tuple(Round.of(one, prompt_tokens) for one in rounds)
        rates = [r.tokens_per_second for r in each if r.tokens_per_second is not None]
        return cls(
            len(rounds[0]),
            Spread.of((t.tokens[0] - t.began) * 1e3 for t in timelines),
            Spread.of(
                (later - sooner) * 1e3
                for t in timelines
                for sooner, later in zip(t.tokens, t.tokens[1:], strict=False)
            ),
            median(rates) if rates else None,
            median(r.prefill_tokens_per_second for r in each),
            median(r.overall_tokens_per_second for r in each),
            each,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
