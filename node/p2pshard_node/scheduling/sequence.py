"""One sequence while the scheduler has it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from p2pshard_node.scheduling.drafting import Drafter
from p2pshard_node.scheduling.step import Advance, Request

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    request: Request
    arrival: int
    ids: list[int]
    """Prompt and output."""
    turn: int = 0
    sent: int = 0
    """Tokens of `ids` that a step holds or held."""
    done: int = 0
    """Those of steps that have returned: every stage has their keys and values."""
    drafter: Drafter | None = None
    awaits: bytes | None = None
    """Key of the last block that it lets another sequence compute before it is admitted."""
    keys: list[bytes] = field(default_factory=list)
    """Of the first full blocks of `ids`, as far as they were needed."""

    @property
    def number(self) -> int:
        return self.request.sequence

    @property
    def outputs(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    def take(self, tokens: Items[int], context: int) -> list[Advance]:
        """Append tokens, up to the one that ends the sequence."""
        request, taken = self.request, []
        for token in tokens:
            self.ids.append(token)
            finished = ""
            if token in request.eos_ids:
                finished = "stop"
            elif self.outputs >= request.max_tokens or len(self.ids) > context:
                finished = "length"
            taken.append(Advance(request.sequence, self.outputs - 1, token, finished))
            if finished:
                break
        return taken
