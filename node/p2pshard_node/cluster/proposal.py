"""One attempt to bring a plan into force, without I/O: what to send next, given what was answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pshard.errors import P2PShardError
from p2pshard.planning.plan import Plan

__all__ = ["Proposal"]

PREPARING, COMMITTING, COMMITTED, ABORTED = "preparing", "committing", "committed", "aborted"


@dataclass
class Proposal:
    """Nothing is committed before every member has prepared; one refusal before that aborts."""

    plan: Plan
    phase: str = PREPARING
    error: P2PShardError | None = None
    prepared: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)

    @classmethod
    def resend(cls, plan: Plan) -> Proposal:
        """For an epoch that was committed by somebody and is held by all: only COMMIT remains."""
        return cls(plan, COMMITTING, prepared=set(plan.nodes))

    def on_prepared(self, node: str) -> None:
        """A member has loaded its stage."""
        if self.phase != PREPARING:
            return
        self.prepared.add(node)
        if self.prepared >= set(self.plan.nodes):
            self.phase = COMMITTING

    def on_committed(self, node: str) -> None:
        """A member has accepted the commit."""
        self.committed.add(node)
        if self.phase == COMMITTING and self.committed >= set(self.plan.nodes):
            self.phase = COMMITTED

    def on_refused(self, node: str, error: P2PShardError) -> None:
        """A member said no, or is gone. What was committed by some stays so; a newer epoch overtakes it."""
        if self.phase in (PREPARING, COMMITTING):
            self.phase, self.error = ABORTED, error

    def outbox(self) -> Mapping[str, str]:
        """``{node: "prepare" | "commit" | "abort"}`` still to be sent or answered."""
        nodes = self.plan.nodes
        if self.phase == PREPARING:
            return {n: "prepare" for n in nodes if n not in self.prepared}
        if self.phase == COMMITTING:
            return {n: "commit" for n in nodes if n not in self.committed}
        if self.phase == ABORTED:
            return {n: "abort" for n in nodes if n not in self.committed}
        return {}
