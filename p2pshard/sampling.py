"""Sampling settings of one request; pure values, the same in client, gateway, driver and sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2pshard.errors import InvalidRequest
from p2pshard.transport.generated import generate_pb2

__all__ = ["SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits. The defaults are greedy."""

    temperature: float = 0.0
    """0: the most likely token, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most likely; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p; 1: all."""
    min_p: float = 0.0
    """Keep tokens of at least this fraction of the best one's probability; 0: all."""
    repetition_penalty: float = 1.0
    """Over prompt and output (CTRL, arXiv:1909.05858); 1: none."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted for each time the output has the token."""
    seed: int = 0
    """64 bit; with the output index it keys each token's random number."""
    logprobs: int = -1
    """-1: none; 0: of the token itself; N: and of the N most likely."""

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature <= 100, "temperature", "0 to 100", self.temperature),
            (0 <= self.top_k <= 2**31, "top_k", "0 or more", self.top_k),
            (0 < self.top_p <= 1, "top_p", "above 0 up to 1", self.top_p),
            (0 <= self.min_p <= 1, "min_p", "0 to 1", self.min_p),
            (
                0 < self.repetition_penalty <= 100,
                "repetition_penalty",
                "above 0 up to 100",
                self.repetition_penalty,
            ),
            (-100 <= self.presence_penalty <= 100, "presence_penalty", "-100 to 100", self.presence_penalty),
            (
                -100 <= self.frequency_penalty <= 100,
                "frequency_penalty",
                "-100 to 100",
                self.frequency_penalty,
            ),
            (0 <= self.seed < 2**64, "seed", "0 to 2^64-1", self.seed),
            (-1 <= self.logprobs <= 20, "logprobs", "-1 to 20", self.logprobs),
        )
        for good, name, allowed, value in checks:
            if not good or (isinstance(value, float) and not math.isfinite(value)):
                raise InvalidRequest(f"{name} is {value}; it must be {allowed}", field=name)

    @property
    def penalised(self) -> bool:
        """Whether a choice depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def to_proto(self) -> generate_pb2.Sampling:
        return generate_pb2.Sampling(**{k: getattr(self, k) for k in self.__dataclass_fields__})

    @classmethod
    def from_proto(cls, message: generate_pb2.Sampling) -> SamplingParams:
        """Raises `InvalidRequest`. An empty message is greedy (its zeros of top_p and repetition_penalty mean 1)."""
        values = {k: getattr(message, k) for k in cls.__dataclass_fields__}
        return cls(
            **{
                **values,
                "top_p": message.top_p or 1.0,
                "repetition_penalty": message.repetition_penalty or 1.0,
            }
        )
