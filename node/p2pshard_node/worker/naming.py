"""How a worker speaks of stages: by index, node and layers, so that an error names a machine."""

from __future__ import annotations

from p2pshard.errors import Internal, P2PShardError, StageLost
from p2pshard.planning.plan import Plan

__all__ = ["compute_failed", "describe", "stage_lost"]


def describe(plan: Plan, index: int) -> str:
    stage = plan.stages[index]
    return f"stage {index} (node {stage.node}, layers {stage.layers[0]}-{stage.layers[1]})"


def _details(plan: Plan, index: int) -> dict[str, object]:
    stage = plan.stages[index]
    return {"node": stage.node, "layers": list(stage.layers), "stage": index}


def stage_lost(plan: Plan, index: int, what: str) -> StageLost:
    """`what` continues the sentence: "is gone", "has been silent for 3 s"."""
    return StageLost(f"{describe(plan, index)} {what}", **_details(plan, index))


def compute_failed(plan: Plan, index: int, cause: BaseException) -> P2PShardError:
    """What the requests of a step hear that stage `index` could not compute."""
    reason = cause.message if isinstance(cause, P2PShardError) else f"{type(cause).__name__}: {cause}"
    return Internal(
        f"{describe(plan, index)} could not compute this request: {reason[:400]}", **_details(plan, index)
    )
