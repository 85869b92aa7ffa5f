"""What happens to the membership, and what it wants done: all that `apply` takes and gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from p2pshard.transport.generated import control_pb2 as pb

from .state import Addr

__all__ = [
    "MAX_GOSSIP",
    "Action",
    "Answered",
    "Called",
    "Declined",
    "Dial",
    "DialFailed",
    "Event",
    "Evicted",
    "Forget",
    "Joined",
    "Left",
    "Log",
    "PingLost",
    "Pinged",
    "Pong",
    "ProbeOld",
    "Probed",
    "RaiseIncarnation",
    "Reply",
    "Seen",
    "Suspected",
    "Tick",
    "gossip",
]


# -- events ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Seen:
    """Zeroconf, a `--peer`, gossip or a caller mentioned addresses of a node."""

    addresses: tuple[Addr, ...]
    now: float
    node: str = ""
    static: bool = False


@dataclass(frozen=True)
class Answered:
    """Our handshake was accepted."""

    address: Addr
    info: pb.NodeInfo
    rank: int
    rtt_ms: float
    now: float


@dataclass(frozen=True)
class Declined:
    """Something of ours answered the handshake with no."""

    address: Addr
    info: pb.NodeInfo
    code: str
    reason: str
    highest: int
    now: float


@dataclass(frozen=True)
class DialFailed:
    address: Addr
    reason: str
    now: float


@dataclass(frozen=True)
class Called:
    """A handshake came in. Answered by a `Reply`, or by a `ProbeOld` whose `Probed` gives the reply."""

    info: pb.NodeInfo
    source: str
    """Host that the call came from; empty when not known."""
    now: float


@dataclass(frozen=True)
class Probed:
    """What became of the question whether the earlier instance of an id still lives."""

    probe: ProbeOld
    alive: bool
    now: float


@dataclass(frozen=True)
class Pinged:
    """A ping came in."""

    info: pb.NodeInfo
    now: float


@dataclass(frozen=True)
class Pong:
    """Our ping was answered. ``member``: the peer counts us as one."""

    info: pb.NodeInfo
    member: bool
    rtt_ms: float
    now: float


@dataclass(frozen=True)
class PingLost:
    """The connection to a member was reset or refused (no mere silence)."""

    node: str
    now: float


@dataclass(frozen=True)
class Left:
    node: str
    nonce: str
    now: float


@dataclass(frozen=True)
class Tick:
    now: float


# -- actions --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dial:
    address: Addr


@dataclass(frozen=True)
class Reply:
    accepted: bool
    code: str = ""
    reason: str = ""
    highest: int = 0


@dataclass(frozen=True)
class ProbeOld:
    """Ask the earlier instance's address whether that instance (``nonce``) still answers."""

    address: Addr
    nonce: str
    newcomer: pb.NodeInfo
    at: Addr
    """Where the newcomer is."""
    answered: Answered | None = None
    """Set when it was our own handshake that met the newcomer."""


@dataclass(frozen=True)
class Joined:
    node: str


@dataclass(frozen=True)
class Suspected:
    node: str


@dataclass(frozen=True)
class Evicted:
    node: str
    reason: str


@dataclass(frozen=True)
class Forget:
    """Close what was open to this address: at once when its node is `gone`, else after the calls under way."""

    address: Addr
    gone: bool


@dataclass(frozen=True)
class RaiseIncarnation:
    """A peer has met a higher incarnation of ours: exceed it and shake hands again."""

    highest: int


@dataclass(frozen=True)
class Log:
    message: str
    fields: dict[str, Any]


Event = Seen | Answered | Declined | DialFailed | Called | Probed | Pinged | Pong | PingLost | Left | Tick
Action = Dial | Reply | ProbeOld | Joined | Suspected | Evicted | Forget | RaiseIncarnation | Log


MAX_GOSSIP = 256
"""Nodes of whom one message may tell."""


def gossip(infos: Iterable[pb.NodeInfo], me: str, now: float) -> list[Seen]:
    """What another member's list of members tells us."""
    return [
        Seen(tuple((a.host, a.port) for a in info.addresses[:16]), now, info.id)
        for info in list(infos)[:MAX_GOSSIP]
        if info.id and info.id != me
    ]
