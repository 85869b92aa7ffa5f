"""What a node knows of the others: peers by id, candidate addresses, refused callers."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pshard.addresses import host_port
from p2pshard.transport.generated import control_pb2 as pb

__all__ = [
    "JOINING",
    "LOST",
    "MEMBER",
    "SUSPECT",
    "Addr",
    "Candidate",
    "Peer",
    "Row",
    "State",
    "text",
    "where",
]

Addr = tuple[str, int]

JOINING, MEMBER, SUSPECT, LOST = "joining", "member", "suspected", "lost"


@dataclass(frozen=True)
class Peer:
    """Another node, by id."""

    info: pb.NodeInfo
    phase: str = JOINING
    outbound: Addr | None = None
    """Where our handshake succeeded; what everything that goes to this peer uses."""
    rank: int = 9
    """Of `outbound`: 0 an ordinary address, 1 a container bridge, 2 link-local, 3 loopback."""
    rtt_ms: float = 0.0
    inbound: bool = False
    """Its handshake to us succeeded."""
    heard: float = 0.0
    """When it last answered a ping of this instance."""
    left: bool = False
    """It said goodbye: that it does not answer is as it should be."""
    refused_since: float | None = None
    """Since when nothing listens at its address: its process is gone, or was just replaced."""
    denied_since: float | None = None
    """Since when it has said that it does not count us as a member."""


@dataclass(frozen=True)
class Candidate:
    """An address where a node may be."""

    address: Addr
    node: str = ""
    """Whose it is said to be; empty: not known yet."""
    static: bool = False
    """Given by the user: kept for ever and always listed while it does not work."""
    seen: float = 0.0
    next_try: float = 0.0
    failures: int = 0
    dialling: bool = False
    code: str = ""
    trouble: str = ""
    theirs: str = ""
    """Version of what answered, when it was declined."""


@dataclass(frozen=True)
class Row:
    """A caller that was refused."""

    address: Addr
    code: str
    reason: str
    theirs: str
    at: float


@dataclass
class State:
    """Treated as a value: `apply` returns a new one."""

    me: pb.NodeInfo
    peers: dict[str, Peer] = field(default_factory=dict)
    candidates: dict[Addr, Candidate] = field(default_factory=dict)
    highest: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Highest incarnation met of each id, and its nonce."""
    refused: dict[tuple[str, str], Row] = field(default_factory=dict)
    last_tick: float | None = None

    def copy(self) -> State:
        return State(
            self.me,
            dict(self.peers),
            dict(self.candidates),
            dict(self.highest),
            dict(self.refused),
            self.last_tick,
        )

    def members(self) -> list[Peer]:
        """Peers in the member list (suspected ones still are), by id."""
        return [p for _, p in sorted(self.peers.items()) if p.phase in (MEMBER, SUSPECT)]

    def is_member(self, node: str, nonce: str | None = None) -> bool:
        peer = self.peers.get(node)
        return peer is not None and peer.phase in (MEMBER, SUSPECT) and nonce in (None, peer.info.nonce)


def text(address: Addr) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return host_port(*address)


def where(info: pb.NodeInfo, fallback: Addr | None = None) -> Addr:
    """`fallback`, else the first address the node gives itself."""
    if fallback is not None:
        return fallback
    return (info.addresses[0].host, info.addresses[0].port) if info.addresses else ("", 0)
