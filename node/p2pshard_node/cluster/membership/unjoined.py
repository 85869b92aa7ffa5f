"""Peers that were seen and are not members, each with the reason and what to do."""

from __future__ import annotations

from typing import Any

from .state import JOINING, Addr, Candidate, State, text

__all__ = ["not_joined"]


def _left(state: State, node: str) -> bool:
    peer = state.peers.get(node)
    return peer is not None and peer.left


def not_joined(state: State) -> list[dict[str, Any]]:
    """Rows ``{address, reason, code, version_here, version_there}`` of what was seen and is not a member, one per node."""
    here = f"{state.me.version} (protocol {state.me.protocol})"
    rows: dict[object, dict[str, Any]] = {}

    def add(key: object, address: Addr, code: str, reason: str, theirs: str) -> None:
        row = rows.get(key)
        # An answer says more than a silent address of the same node.
        if row is None or (row["code"] == "unreachable" and code != "unreachable"):
            rows[key] = {
                "address": text(address),
                "reason": reason,
                "code": code,
                "version_here": here,
                "version_there": theirs,
            }

    for row in state.refused.values():
        add((row.address[1], row.code), row.address, row.code, row.reason, row.theirs)
    unreachable: dict[str, list[Candidate]] = {}
    for c in state.candidates.values():
        if not c.trouble or (state.is_member(c.node) and c.code != "duplicate"):
            continue
        if c.code == "self" and not c.static:
            continue
        if c.code == "unreachable" and (c.failures < 2 or (not c.static and _left(state, c.node))):
            continue
        if c.code == "unreachable" and c.node:
            unreachable.setdefault(c.node, []).append(c)
        else:
            key: object = c.address if c.code == "unreachable" else (c.address[1], c.code)
            add(key, c.address, c.code, c.trouble, c.theirs)
    for node, tried in unreachable.items():
        addresses = ", ".join(text(c.address) for c in tried[:6])
        reason = (
            f"node {node} does not answer at {addresses} ({tried[0].trouble}); check that it runs and that no firewall "
            "blocks its control port, or start it with --advertise HOST"
        )
        add(node, tried[0].address, "unreachable", reason, tried[0].theirs)
    for node, peer in state.peers.items():
        if peer.phase == JOINING and node not in rows and peer.outbound is not None and not peer.inbound:
            reason = "it answers, but has not reached this node back; give this node --advertise HOST with an address it can reach"
            add(node, peer.outbound, "one-way", reason, peer.info.version)
    return sorted(rows.values(), key=lambda r: r["address"])
