"""What one worker needs in memory while it serves a stage and has loaded the next one beside it. Pure."""

from __future__ import annotations

from p2pshard.planning.plan import Plan, Stage

__all__ = ["together"]


def together(before: Plan, old: int, after: Plan, new: int) -> int:
    """Bytes for stage ``old`` of the plan in force and stage ``new`` of the next, of the same model in the same dtype.

    Weights that both have are there once, keys and values of each; a stage that stays as it is needs no more than before.
    """
    had, has = before.stages[old].ranks[0], after.stages[new].ranks[0]
    if before.extent(old) == after.extent(new):
        return max(had.total_bytes, has.total_bytes)
    shared = _shared_bytes(before.stages[old], after.stages[new])
    return had.total_bytes + has.total_bytes - has.base_bytes - shared


def _shared_bytes(old: Stage, new: Stage) -> int:
    """Bytes of weights that both have, counted where one has all that the other has, else not: better too much memory
    set aside than too little."""
    for small, large in ((old, new), (new, old)):
        within = large.layers[0] <= small.layers[0] and small.layers[1] <= large.layers[1]
        ends = (small.embedding, small.head)
        # A tensor that is embedding and head at once is kept only where both stages use it alike.
        if within and ends in ((False, False), (large.embedding, large.head)):
            return small.ranks[0].weight_bytes
    return 0
