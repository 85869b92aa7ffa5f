"""Who is a member: pure ``apply(state, event) -> (state, actions)``; `peers` does the talking.

A peer is a member when a handshake succeeded in both directions: ours on one of its addresses, and its own
to us. All of a node's addresses are tried in parallel and the best that works is kept; an address that fails
is tried again ever more rarely and costs the others nothing. Silence makes a member suspected, then evicted;
its addresses stay candidates, so that it is a member again as soon as it answers.

Time is monotonic seconds, given with each event.
"""

from __future__ import annotations

from .events import (
    MAX_GOSSIP,
    Action,
    Answered,
    Called,
    Declined,
    Dial,
    DialFailed,
    Event,
    Evicted,
    Forget,
    Joined,
    Left,
    Log,
    Pinged,
    PingLost,
    Pong,
    Probed,
    ProbeOld,
    RaiseIncarnation,
    Reply,
    Seen,
    Suspected,
    Tick,
    gossip,
)
from .policy import EVICT_S, PING_S, SUSPECT_S, apply
from .state import JOINING, LOST, MEMBER, SUSPECT, Addr, Candidate, Peer, Row, State, text
from .unjoined import not_joined

__all__ = [
    "EVICT_S",
    "JOINING",
    "LOST",
    "MAX_GOSSIP",
    "MEMBER",
    "PING_S",
    "SUSPECT",
    "SUSPECT_S",
    "Action",
    "Addr",
    "Answered",
    "Called",
    "Candidate",
    "Declined",
    "Dial",
    "DialFailed",
    "Event",
    "Evicted",
    "Forget",
    "Joined",
    "Left",
    "Log",
    "Peer",
    "PingLost",
    "Pinged",
    "Pong",
    "ProbeOld",
    "Probed",
    "RaiseIncarnation",
    "Reply",
    "Row",
    "Seen",
    "State",
    "Suspected",
    "Tick",
    "apply",
    "gossip",
    "not_joined",
    "text",
]
