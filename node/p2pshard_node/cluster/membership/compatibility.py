"""Whether two nodes may be in one cluster."""

from __future__ import annotations

from p2pshard.transport.generated import control_pb2 as pb

from .state import text, where

__all__ = ["compatible"]


def _release(version: str) -> str:
    """The part of a build's version that must be equal: ``0.1`` of ``0.1.7``."""
    return ".".join(version.split(".")[:2])


def compatible(me: pb.NodeInfo, other: pb.NodeInfo) -> tuple[str, str]:
    """``(code, reason)`` why the two cannot be in one cluster; empty when they can. The reason is read at
    either of the two."""
    if other.protocol != me.protocol:
        return "protocol", (
            f"protocol {other.protocol} (build {other.version}) cannot join protocol {me.protocol} "
            f"(build {me.version}); install the same p2pshard version on both"
        )
    if _release(other.version) != _release(me.version):
        return "protocol", (
            f"build {other.version} cannot join build {me.version}; install the same p2pshard version on both"
        )
    if other.cluster != me.cluster:
        return "cluster", (
            f"node {other.name or other.id} is of cluster {other.cluster!r} and node {me.name or me.id} of "
            f"{me.cluster!r}; start one of them with --cluster {me.cluster} or --cluster {other.cluster} to join the other"
        )
    if other.id == me.id:
        if other.nonce == me.nonce:
            return "self", "that address is this node itself; remove it from --peer"
        return "duplicate", (
            f"node id {me.id} is used twice: by {text(where(me))} ({me.name}) and by {text(where(other))} "
            f"({other.name}); one data directory is a copy of the other: give one of them a new --data-dir"
        )
    return "", ""
