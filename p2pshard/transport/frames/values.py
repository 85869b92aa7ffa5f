"""What frames carry, and what a plan allows of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt

from p2pshard.errors import P2PShardError
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.sampling import SamplingParams
from p2pshard.transport.frames.wire import TEXT

__all__ = [
    "Admitted",
    "Array",
    "Arrival",
    "Deltas",
    "Frame",
    "Hello",
    "Hop",
    "Limits",
    "RowHeader",
    "SampledToken",
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """What the plan allows on an edge."""

    chunk_tokens: int
    """Most tokens, hence rows, of one step."""
    hidden_size: int
    vocab_size: int
    blocks: int
    context: int
    stages: int
    wires: tuple[str, ...] = ("raw",)
    """Codecs in which hidden states may come."""

    @classmethod
    def of(cls, plan: Plan, *, hidden_size: int, vocab_size: int) -> Limits:
        return cls(
            plan.chunk_tokens,
            hidden_size,
            vocab_size,
            plan.blocks,
            plan.context,
            len(plan.stages),
            tuple(sorted({stage.wire for stage in plan.stages if not stage.head})),
        )

    @property
    def sequences(self) -> int:
        """Sequences that can hold a block at once; also most ids in one list of a frame."""
        return self.blocks

    @cached_property
    def header_bytes(self) -> int:
        return (
            (64 << 10)
            + 64 * self.stages
            + 96 * self.blocks
            + min(self.chunk_tokens, self.blocks) * (320 + TEXT)
        )

    @cached_property
    def array_items(self) -> int:
        """Most items of one list in a header."""
        return max(64, self.chunk_tokens, self.blocks)

    @cached_property
    def payload_bytes(self) -> int:
        return self.chunk_tokens * 4 * (self.hidden_size + 1)


@dataclass(frozen=True)
class RowHeader:
    """One sequence's part of a step."""

    sequence: int
    start: int
    """Position of its first token."""
    length: int
    output: str = "none"


@dataclass(frozen=True)
class Admitted:
    """A sequence that this step is the first to carry; the last stage samples from these settings."""

    sequence: int
    prompt_length: int
    """Ids at and after this position are output: penalties and random numbers depend on the border."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Deltas:
    """Changes of the block table, executed in the order of the fields."""

    free: tuple[int, ...] = ()
    """Sequences that give all their blocks back."""
    truncate: tuple[tuple[int, int], ...] = ()
    """(sequence, blocks kept)."""
    copy: tuple[tuple[int, int], ...] = ()
    """(source block, destination block)."""
    share: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(sequence, runs of (first block, count)): complete blocks that a new sequence begins with, read only."""
    allocate: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(sequence, runs of (first block, count)), appended to what it has."""

    def __bool__(self) -> bool:
        return bool(self.free or self.truncate or self.copy or self.share or self.allocate)


@dataclass(frozen=True)
class Hop:
    """What one stage spent on a step, and the edge over which the step came to it."""

    stage: int
    queue_us: int
    """From the frame's arrival to the start of its computation."""
    compute_us: int
    """The layers, without the sampler."""
    sample_us: int = 0
    """The sampler's part of the last stage."""
    serialise_us: int = 0
    """Encoding at the sender and decoding here; 0 on the first stage, which no edge leads to."""
    nbytes: int = 0
    """Of the frame as it came over the edge."""
    kept: int = 0
    """1: this stage has what the epoch before left, so that its blocks may be used."""


@dataclass(frozen=True)
class Arrival:
    """How a frame came over its edge; says nothing about what is in it, and is not sent on."""

    nbytes: int
    """Of all its messages."""
    serialise_us: int
    """Encoding at the sender and decoding here."""


@dataclass(frozen=True)
class SampledToken:
    """One sampled token of a step's row."""

    sequence: int
    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Hello:
    """Opens an edge, and answers: both ends must hold the same plan of the same weights."""

    deployment: str
    plan: str
    """Digest of the plan."""
    manifest: str
    """Digest of the model."""
    fingerprint: str
    """Of the sender's numerics; must be equal only under an ``invariant`` plan."""
    instance: str
    """Random name of the sending process: one stream for each."""
    stage: int
    """Index of the sender."""
    edge: str
    """``forward`` (to the next stage) or ``back`` (last stage to driver)."""


@dataclass(frozen=True)
class Frame:
    """One message of an edge. Which fields a kind uses: see `wire.FIELDS`."""

    kind: str
    epoch: Epoch
    step: int = 0
    rows: tuple[RowHeader, ...] = ()
    token_ids_T: Array | None = None
    """int32, the rows' tokens one after another; on every step, so the last stage knows every history."""
    hidden_TD: Array | None = None
    """float32 residual of the same tokens; absent where nothing was computed."""
    deltas: Deltas = field(default_factory=Deltas)
    admitted: tuple[Admitted, ...] = ()
    failed: tuple[tuple[int, P2PShardError], ...] = ()
    """Sequences of this step that a stage could not compute, each with the error that names the stage."""
    tokens: tuple[SampledToken, ...] = ()
    hops: tuple[Hop, ...] = ()
    hello: Hello | None = None
    error: P2PShardError | None = None
    """For kind ``error``: why the sender (or one behind it) cannot go on."""
    status: tuple[int, int, int] | None = None
    """For kind ``pong``: (stage, last step received, last step computed)."""
    arrival: Arrival | None = None
    """Set by the `Assembler`; None for a frame that was made here."""

    def with_hop(self, hop: Hop) -> Frame:
        return replace(self, hops=(*self.hops, hop))
