"""From a manifest to a plan, or to the answer of ``p2pshard plan``: what the daemon calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from p2pshard.errors import DoesNotFit
from p2pshard.models.manifest import Manifest
from p2pshard.planning.growth import Growth, Pace, grow
from p2pshard.planning.memory import profile_model, resolve_dtype, smaller_dtypes
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.profiles import LinkProfile, NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import make_plan
from p2pshard.planning.wire import wire_rows

__all__ = ["grow_plan", "plan_model", "plan_reply"]


def plan_model(
    nodes: Sequence[NodeBudget],
    manifest: Manifest,
    name: str,
    links: Iterable[LinkProfile],
    settings: Settings,
    epoch: Epoch,
    *,
    before: Plan | None = None,
) -> Plan:
    """A plan for the model with these settings; ``name`` is what people call it. ``before`` as in `make_plan`.

    Raises `DoesNotFit` (smaller dtypes are tried for its suggestions), `InvalidRequest` and `ModelCorrupt`.
    """
    dtype = resolve_dtype(manifest, settings.dtype)
    model = profile_model(manifest, dtype, name)
    smaller = tuple(profile_model(manifest, other, name) for other in smaller_dtypes(dtype))
    return make_plan(nodes, model, links, settings, epoch, smaller=smaller, before=before)


def grow_plan(
    before: Plan,
    nodes: Sequence[NodeBudget],
    manifest: Manifest,
    links: Iterable[LinkProfile],
    settings: Settings,
    streams: int,
    pace: Pace | None,
) -> Growth:
    """As `growth.grow`; the plan, if any, has the epoch of the one before."""
    model = profile_model(manifest, resolve_dtype(manifest, settings.dtype), before.model)
    return grow(before, nodes, model, links, settings, before.epoch, streams, pace)


def plan_reply(
    nodes: Sequence[NodeBudget],
    manifest: Manifest,
    name: str,
    links: Iterable[LinkProfile],
    settings: Settings,
    epoch: Epoch,
) -> dict[str, Any]:
    """The answer of ``p2pshard plan``: ``{fits, plan, shortfall_bytes, suggestions, terms, message,
    wires}``, the last as `wire_rows` gives them.

    Raises `InvalidRequest` and `ModelCorrupt` as `plan_model` does.
    """
    links = tuple(links)
    try:
        plan = plan_model(nodes, manifest, name, links, settings, epoch)
    except DoesNotFit as error:
        return {"fits": False, "plan": None, "message": error.message, **error.details}
    return {
        "fits": True,
        "plan": plan.to_json(),
        "shortfall_bytes": 0,
        "suggestions": [],
        "terms": [],
        "message": "",
        "wires": wire_rows(plan, links, profile_model(manifest, plan.dtype, name).hidden),
    }
