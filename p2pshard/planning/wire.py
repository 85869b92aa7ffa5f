"""In which form hidden states leave a stage: chosen for each edge from what its link carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from p2pshard.planning.plan import WIRES, Plan, Replica
from p2pshard.planning.profiles import LinkProfile

__all__ = ["ENOUGH_TOKENS_PER_S", "choose_wire", "token_bytes", "wire_rows", "with_wires"]

ENOUGH_TOKENS_PER_S = 1000
"""A link that carries so many hidden states a second holds up no prompt on CPUs; slower ones get a smaller form."""
_ERROR_PERCENT = {"raw": 0.0, "bf16": 0.17, "q8": 1.0}
"""Of a row of hidden states, root mean square; measured as `transport.codecs` says."""
_PREFILL = 2000


def token_bytes(wire: str, hidden: int) -> float:
    """Of one token's hidden states on the wire, without headers."""
    return hidden * {"raw": 4.0, "bf16": 2.0, "q8": 1.0625}[wire]


def choose_wire(asked: str, link: LinkProfile | None, hidden: int) -> str:
    """The form that loses least of those that the link carries fast enough; ``asked`` unless it is ``auto``.

    An unmeasured link gets ``raw``, and so does one within a machine (None).
    """
    if asked != "auto":
        return asked
    if link is None or link.bandwidth_mbps <= 0:
        return "raw"
    for wire in WIRES:
        if link.bandwidth_mbps * 1e6 / 8 >= ENOUGH_TOKENS_PER_S * token_bytes(wire, hidden):
            return wire
    return WIRES[-1]


def with_wires(plan: Plan, asked: str, links: Iterable[LinkProfile], hidden: int) -> Plan:
    """``plan`` with a form for each edge. An ``invariant`` plan stays raw, unless another form is asked for by name:
    then it is ``tolerant``, for rounded hidden states depend on where the model is cut."""
    if plan.numerics == "invariant" and asked in ("auto", "raw"):
        return plan
    by_pair = _by_pair(links)
    replicas = []
    for replica in plan.replicas:
        stages = [
            replace(stage, wire=choose_wire(asked, by_pair.get(frozenset((stage.node, after.node))), hidden))
            for stage, after in pairwise(replica.stages)
        ]
        replicas.append(Replica((*stages, replica.stages[-1])))
    rounded = any(stage.wire != "raw" for replica in replicas for stage in replica.stages)
    numerics = "tolerant" if rounded else plan.numerics
    return replace(plan, replicas=tuple(replicas), numerics=numerics)


def _by_pair(links: Iterable[LinkProfile]) -> Mapping[frozenset[str], LinkProfile]:
    return {frozenset((link.a, link.b)): link for link in links}


def wire_rows(plan: Plan, links: Iterable[LinkProfile], hidden: int) -> list[dict[str, Any]]:
    """What each edge's form helps and costs, for ``plan``: one row for each edge that carries hidden states.

    ``prefill_ms`` and ``raw_prefill_ms``: how long the link is taken by a prompt of 2,000 tokens, in the form chosen and
    raw; None where the link was not measured. ``error_percent``: by how much a row of hidden states changes.
    """
    by_pair = _by_pair(links)
    rows = []
    for index, (stage, following) in enumerate(pairwise(plan.stages)):
        link = by_pair.get(frozenset((stage.node, following.node)))
        mbps = link.bandwidth_mbps if link is not None else 0.0

        def milliseconds(wire: str, mbps: float = mbps) -> float | None:
            if mbps <= 0:
                return None
            return round(_PREFILL * token_bytes(wire, hidden) * 8 / mbps / 1e3, 1)

        rows.append(
            {
                "stage": index,
                "from": stage.node,
                "to": following.node,
                "wire": stage.wire,
                "bandwidth_mbps": mbps or None,
                "prefill_tokens": _PREFILL,
                "prefill_ms": milliseconds(stage.wire),
                "raw_prefill_ms": milliseconds("raw"),
                "error_percent": _ERROR_PERCENT[stage.wire],
            }
        )
    return rows
