"""What goes into the scheduler and what comes out: requests, steps, tokens taken. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pshard_node.scheduling.blocks import Run, runs_of

__all__ = ["Advance", "Changes", "Counts", "Request", "Step", "StepRow"]


@dataclass(frozen=True)
class Request:
    """What the scheduler needs to know of a sequence."""

    sequence: int
    """64 bit, never used for another request."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    """Output tokens in all, those already given included."""
    output_ids: tuple[int, ...] = ()
    """Already given, by an earlier attempt: computed again like a prompt, continued after."""
    eos_ids: frozenset[int] = frozenset()
    draft: int = 0
    """Tokens to draft at a time; 0: none; `p2pshard.speculation.ADAPTIVE`."""


@dataclass(frozen=True)
class StepRow:
    sequence: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    """Its last token's logits are sampled, and those of the tokens before a draft."""
    drafted: int = 0
    """How many of its tokens, the last ones, are a draft."""
    turn: int = 0
    """How often the sequence had lost its blocks when this row was made: a row of an earlier turn is void."""


@dataclass(frozen=True)
class Step:
    """One pass through all stages. Stages execute `freed`, `shared` and `allocated` in this order."""

    number: int
    rows: tuple[StepRow, ...]
    admitted: tuple[int, ...] = ()
    """Sequences that run from this step on, or again."""
    shared: tuple[tuple[int, tuple[Run, ...]], ...] = ()
    """Blocks, complete already, that an admitted sequence begins with."""
    allocated: tuple[tuple[int, tuple[Run, ...]], ...] = ()
    """Blocks appended to what a sequence has."""
    freed: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True)
class Advance:
    """One sampled token taken into its sequence."""

    sequence: int
    index: int
    """Output index."""
    token: int
    finished: str
    """``stop``, ``length`` or empty."""


@dataclass
class Counts:
    """Since the scheduler began."""

    admitted_tokens: int = 0
    """Tokens of sequences when they were admitted, again each time they were."""
    hit_tokens: int = 0
    """Those of them that were there already."""
    preempted: int = 0
    """Times that a sequence lost its blocks."""
    drafted: int = 0
    """Tokens guessed."""
    accepted: int = 0
    """Those that were right."""


@dataclass
class Changes:
    """Of the block table, by the step that is being made."""

    admitted: list[int] = field(default_factory=list)
    shared: list[tuple[int, tuple[Run, ...]]] = field(default_factory=list)
    allocated: dict[int, tuple[Run, ...]] = field(default_factory=dict)

    def allocate(self, sequence: int, runs: tuple[Run, ...]) -> None:
        self.allocated[sequence] = self.allocated.get(sequence, ()) + runs

    def room_for(self, hits: tuple[int, ...], most: int) -> bool:
        """A frame names at most so many shared runs as there are blocks."""
        return sum(len(runs) for _, runs in self.shared) + len(runs_of(hits)) <= most
