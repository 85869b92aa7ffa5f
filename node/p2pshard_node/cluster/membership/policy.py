"""Who becomes a member, who is dialled, suspected and evicted, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2pshard.transport.generated import control_pb2 as pb

from .compatibility import compatible
from .events import (
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
)
from .state import JOINING, LOST, MEMBER, SUSPECT, Addr, Candidate, Peer, Row, State, text, where

__all__ = ["EVICT_S", "PING_S", "SUSPECT_S", "apply"]


PING_S = 0.25
SUSPECT_S = 1.5
EVICT_S = 4.75
"""Of silence. Peers and people are promised 5 s; what is left covers a tick and the message that says so."""
REDIAL_FIRST_S = 0.25
REDIAL_MOST_S = 2.0
DECLINED_RETRY_S = 5.0
JOINING_RETRY_S = 1.0
BETTER_RETRY_S = 30.0
FORGET_S = 120.0
"""A candidate that nothing has mentioned for so long, and that is not a `--peer`, is dropped."""
ROW_S = 30.0
"""How long a caller that was refused stays listed after its last call."""
MAX_CANDIDATES = 1024
MAX_DIALS = 256
MAX_ROWS = 256
MAX_KNOWN = 1024
"""Nodes that are remembered, beyond the members."""


def apply(state: State, event: Event) -> tuple[State, list[Action]]:
    """The state after the event, and what is to be done about it, in order."""
    step = _Step(state.copy())
    getattr(step, "on_" + type(event).__name__.lower())(event)
    return step.s, step.actions


class _Step:
    """One application: a private copy of the state, and the actions so far."""

    def __init__(self, state: State) -> None:
        self.s = state
        self.actions: list[Action] = []

    # -- addresses
    def on_seen(self, e: Seen) -> None:
        if e.node == self.s.me.id and not e.static:
            return
        for address in e.addresses:
            self.candidate(address, e.now, e.node, e.static)
        self.dial(e.now)

    def candidate(self, address: Addr, now: float, node: str = "", static: bool = False) -> None:
        known = self.s.candidates.get(address)
        if known is None:
            if len(self.s.candidates) >= MAX_CANDIDATES and not static and not self.make_room():
                return
            known = Candidate(address, node, static, now, now)
        elif node and known.node and node != known.node:
            # Another node lives at an address that had someone: try it at once.
            known = replace(known, next_try=now, failures=0, code="", trouble="")
        self.s.candidates[address] = replace(
            known, node=node or known.node, static=known.static or static, seen=max(now, known.seen)
        )

    def make_room(self) -> bool:
        """Drop the candidate that is least likely to be somebody; whether there was one."""
        useless = [
            c
            for c in self.s.candidates.values()
            if not c.static and not c.dialling and c.failures and c.node not in self.members()
        ]
        if not useless:
            return False
        del self.s.candidates[max(useless, key=lambda c: (c.failures, -c.seen)).address]
        return True

    def members(self) -> set[str]:
        return {node for node, peer in self.s.peers.items() if peer.phase in (MEMBER, SUSPECT)}

    def dial(self, now: float) -> None:
        """Ask for every dial that is due, those with fewest failures first, a bounded number at once."""
        busy = sum(c.dialling for c in self.s.candidates.values())
        due = [
            c for c in self.s.candidates.values() if not c.dialling and c.next_try <= now and self.wanted(c)
        ]
        for c in sorted(due, key=lambda c: (c.failures, -c.seen))[: max(0, MAX_DIALS - busy)]:
            self.s.candidates[c.address] = replace(c, dialling=True)
            self.actions.append(Dial(c.address))

    def wanted(self, c: Candidate) -> bool:
        """Whether dialling could improve anything."""
        peer = self.s.peers.get(c.node)
        if peer is None or peer.phase not in (MEMBER, SUSPECT):
            return True
        return c.address != peer.outbound and peer.rank > 0

    def settle(self, address: Addr, now: float, wait: float, **changes: Any) -> None:
        known = self.s.candidates.get(address) or Candidate(address, seen=now)
        self.s.candidates[address] = replace(known, dialling=False, next_try=now + wait, **changes)

    def redial(self, node: str, now: float) -> None:
        """Try all addresses of a node at once."""
        for c in list(self.s.candidates.values()):
            if c.node == node:
                self.s.candidates[c.address] = replace(c, next_try=now, failures=0)
        self.dial(now)

    # -- handshakes
    def on_answered(self, e: Answered) -> None:
        probe = self.conflict(e.info, e.address, e)
        if probe is not None:
            self.settle(e.address, e.now, DECLINED_RETRY_S, node=e.info.id)
            self.actions.append(probe)
            return
        self.accept_outbound(e)

    def accept_outbound(self, e: Answered) -> None:
        peer = self.instance(e.info, e.now)
        self.settle(
            e.address, e.now, BETTER_RETRY_S, node=e.info.id, failures=0, code="", trouble="", seen=e.now
        )
        if peer.outbound is None or e.rank < peer.rank or e.address == peer.outbound:
            if peer.outbound is not None and peer.outbound != e.address:
                self.actions.append(Forget(peer.outbound, gone=False))
            peer = replace(peer, outbound=e.address, rank=e.rank, rtt_ms=e.rtt_ms)
        self.s.peers[e.info.id] = replace(
            peer, denied_since=None if peer.phase != MEMBER else peer.denied_since
        )
        self.mention(e.info, e.now)
        self.join(e.info.id, e.now)
        if self.s.peers[e.info.id].phase == JOINING:
            # It has not called back yet; a call may have been lost.
            self.settle(e.address, e.now, JOINING_RETRY_S)

    def on_declined(self, e: Declined) -> None:
        if e.code == "incarnation":
            self.settle(e.address, e.now, 0.0, node=e.info.id)
            self.actions.append(RaiseIncarnation(e.highest))
            return
        before = self.s.candidates.get(e.address)
        wait = BETTER_RETRY_S if e.code == "self" else DECLINED_RETRY_S
        theirs = f"{e.info.version} (protocol {e.info.protocol})"
        self.settle(e.address, e.now, wait, node=e.info.id, code=e.code, trouble=e.reason, theirs=theirs)
        if before is not None and before.trouble != e.reason and (e.code != "self" or before.static):
            self.actions.append(Log("peer not joined", {"address": text(e.address), "reason": e.reason}))

    def on_dialfailed(self, e: DialFailed) -> None:
        before = self.s.candidates.get(e.address) or Candidate(e.address, seen=e.now)
        failures = before.failures + 1
        wait = min(REDIAL_MOST_S, REDIAL_FIRST_S * 2 ** min(failures - 1, 8))
        self.settle(e.address, e.now, wait, failures=failures, code="unreachable", trouble=e.reason)
        if before.static and failures == 3:
            self.actions.append(Log("peer not joined", {"address": text(e.address), "reason": e.reason}))

    def on_called(self, e: Called) -> None:
        code, reason = compatible(self.s.me, e.info)
        if code:
            self.refuse(e.info, e.source, code, reason, e.now)
            return
        at = (e.source, where(e.info)[1]) if e.source else where(e.info)
        probe = self.conflict(e.info, at, None)
        if probe is not None:
            self.actions.append(probe)
            return
        self.accept_inbound(e.info, e.source, e.now)

    def accept_inbound(self, info: pb.NodeInfo, source: str, now: float) -> None:
        highest, nonce = self.s.highest.get(info.id, (0, ""))
        if info.incarnation <= highest and nonce not in ("", info.nonce):
            reason = (
                f"incarnation {info.incarnation} is not above {highest}, the highest met of node {info.id}"
            )
            self.actions.append(Reply(False, "incarnation", reason, highest))
            return
        peer = self.instance(info, now)
        self.s.refused.pop((info.id, info.nonce), None)
        self.s.peers[info.id] = replace(peer, inbound=True)
        self.actions.append(Reply(True))
        self.mention(info, now, source)
        if peer.outbound is None:
            self.redial(info.id, now)
        self.join(info.id, now)

    def conflict(self, info: pb.NodeInfo, at: Addr, answered: Answered | None) -> ProbeOld | None:
        """A probe of the earlier instance, if one of the same id may still live."""
        old = self.s.peers.get(info.id)
        if old is None or old.info.nonce == info.nonce or old.phase == LOST:
            return None
        return ProbeOld(where(old.info, old.outbound), old.info.nonce, info, at, answered)

    def on_probed(self, e: Probed) -> None:
        p = e.probe
        info = p.newcomer
        if e.alive:
            old = self.s.peers.get(info.id)
            other = f"{text(p.address)} ({old.info.name})" if old is not None else text(p.address)
            reason = (
                f"node id {info.id} is used twice: by {other} and by {text(p.at)} ({info.name}); one data directory "
                "is a copy of the other: give one of them a new --data-dir"
            )
            if p.answered is not None:
                self.settle(p.at, e.now, DECLINED_RETRY_S, node=info.id, code="duplicate", trouble=reason)
                self.actions.append(Log("peer not joined", {"address": text(p.at), "reason": reason}))
            else:
                self.refuse(info, p.at[0], "duplicate", reason, e.now)
            return
        old = self.s.peers.get(info.id)
        if old is not None and old.info.nonce == p.nonce:
            self.evict(info.id, "it was started again", e.now)
        if p.answered is not None:
            self.accept_outbound(replace(p.answered, now=e.now))
        else:
            self.accept_inbound(info, p.at[0], e.now)

    def refuse(self, info: pb.NodeInfo, source: str, code: str, reason: str, now: float) -> None:
        self.actions.append(Reply(False, code, reason))
        if code == "self":
            return
        key = (info.id, info.nonce)
        address = (source, where(info)[1]) if source else where(info)
        if key not in self.s.refused:
            if len(self.s.refused) >= MAX_ROWS:
                self.s.refused.pop(min(self.s.refused, key=lambda k: self.s.refused[k].at))
            self.actions.append(Log("peer not joined", {"address": text(address), "reason": reason}))
        self.s.refused[key] = Row(address, code, reason, f"{info.version} (protocol {info.protocol})", now)

    def instance(self, info: pb.NodeInfo, now: float) -> Peer:
        """The peer's record, a fresh one if this is another start of it."""
        peer = self.s.peers.get(info.id)
        highest, _ = self.s.highest.get(info.id, (0, ""))
        if info.incarnation >= highest:
            self.s.highest[info.id] = (info.incarnation, info.nonce)
            self.bound(info.id)
        if peer is None or peer.info.nonce != info.nonce or peer.phase == LOST:
            return Peer(info, heard=now)
        return replace(peer, info=info)

    def bound(self, kept: str) -> None:
        """Forget those who came longest ago and are no members, beyond as many as are remembered: anybody may
        call."""
        members = self.members() | {kept}
        strangers = [node for node in self.s.highest if node not in members]
        for node in strangers[: max(0, len(self.s.highest) - MAX_KNOWN)]:
            del self.s.highest[node]
        rest = sorted((p.heard, node) for node, p in self.s.peers.items() if node not in members)
        for _, node in rest[: max(0, len(self.s.peers) - MAX_KNOWN)]:
            del self.s.peers[node]

    def mention(self, info: pb.NodeInfo, now: float, source: str = "") -> None:
        """Remember the addresses a node gives itself, and the host it called from."""
        for address in info.addresses:
            self.candidate((address.host, address.port), now, info.id)
        if source and info.addresses:
            self.candidate((source, info.addresses[0].port), now, info.id)
        self.dial(now)

    def join(self, node: str, now: float) -> None:
        peer = self.s.peers[node]
        if peer.phase == JOINING and peer.inbound and peer.outbound is not None:
            self.s.peers[node] = replace(peer, phase=MEMBER, heard=now, denied_since=None)
            self.actions.append(Joined(node))

    # -- liveness
    def on_pinged(self, e: Pinged) -> None:
        peer = self.s.peers.get(e.info.id)
        if peer is None or peer.info.nonce != e.info.nonce or peer.phase == LOST:
            return
        self.s.peers[e.info.id] = replace(peer, info=e.info)

    def on_pong(self, e: Pong) -> None:
        peer = self.s.peers.get(e.info.id)
        if peer is None or peer.info.nonce != e.info.nonce or peer.phase not in (MEMBER, SUSPECT):
            return
        denied = None if e.member else (peer.denied_since if peer.denied_since is not None else e.now)
        rtt = e.rtt_ms if not peer.rtt_ms else 0.8 * peer.rtt_ms + 0.2 * e.rtt_ms
        self.s.peers[e.info.id] = replace(
            peer, info=e.info, phase=MEMBER, heard=e.now, denied_since=denied, refused_since=None, rtt_ms=rtt
        )
        if denied is None or peer.outbound is None:
            return
        if e.now - denied >= EVICT_S:
            self.evict(e.info.id, "it no longer counts this node as a member", e.now)
        else:
            # It dropped us (a pause of ours, or a join that is still under way there): shake hands again.
            known = self.s.candidates.get(peer.outbound)
            if known is not None and not known.dialling and e.now - denied >= PING_S:
                self.s.candidates[peer.outbound] = replace(known, dialling=True)
                self.actions.append(Dial(peer.outbound))

    def on_pinglost(self, e: PingLost) -> None:
        peer = self.s.peers.get(e.node)
        if peer is None or peer.phase not in (MEMBER, SUSPECT):
            return
        since = peer.refused_since if peer.refused_since is not None else e.now
        self.s.peers[e.node] = replace(peer, phase=SUSPECT, refused_since=since)
        if peer.phase == MEMBER:
            self.actions.append(Suspected(e.node))

    def on_left(self, e: Left) -> None:
        if self.s.is_member(e.node, e.nonce):
            self.evict(e.node, "it said goodbye", e.now)
            self.s.peers[e.node] = replace(self.s.peers[e.node], left=True)
            for c in list(self.s.candidates.values()):
                if c.node == e.node and not c.static:
                    self.s.candidates[c.address] = replace(c, next_try=e.now + REDIAL_MOST_S)

    def evict(self, node: str, reason: str, now: float) -> None:
        peer = self.s.peers[node]
        was_member = peer.phase in (MEMBER, SUSPECT)
        self.s.peers[node] = replace(peer, phase=LOST, outbound=None, rank=9, inbound=False, heard=now)
        if peer.outbound is not None:
            self.actions.append(Forget(peer.outbound, gone=True))
        if was_member:
            self.actions.append(Evicted(node, reason))
        self.redial(node, now)

    def on_tick(self, e: Tick) -> None:
        pause = 0.0 if self.s.last_tick is None else e.now - self.s.last_tick
        self.s.last_tick = e.now
        if pause > SUSPECT_S:
            # We were stopped or starved, not they: their silence is of our making.
            for node, peer in self.s.peers.items():
                self.s.peers[node] = replace(peer, heard=peer.heard + pause)
        for node, peer in list(self.s.peers.items()):
            silent = e.now - peer.heard
            if peer.phase in (MEMBER, SUSPECT) and silent >= EVICT_S:
                self.evict(node, f"silent for {silent:.1f} s", e.now)
            elif peer.phase == MEMBER and silent >= SUSPECT_S:
                self.s.peers[node] = replace(peer, phase=SUSPECT)
                self.actions.append(Suspected(node))
            elif peer.phase in (LOST, JOINING) and silent >= FORGET_S:
                del self.s.peers[node]
        for address, c in list(self.s.candidates.items()):
            peer_or_none = self.s.peers.get(c.node)
            of_member = peer_or_none is not None and peer_or_none.phase in (MEMBER, SUSPECT)
            if not c.static and not c.dialling and not of_member and e.now - c.seen >= FORGET_S:
                del self.s.candidates[address]
        for key, row in list(self.s.refused.items()):
            if e.now - row.at >= ROW_S:
                del self.s.refused[key]
        self.dial(e.now)
