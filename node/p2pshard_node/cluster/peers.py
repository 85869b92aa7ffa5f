"""Talking to peers: dials, pings and gossip, driven by what `membership` decides.

Every member is pinged on a connection of its own, so a large transfer never makes a node look dead, and all
dials run in parallel with a short deadline, so a dead or silent address delays nobody.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Protocol

import grpc

from p2pshard.credentials import Credentials
from p2pshard.errors import InvalidRequest, NodeUnreachable
from p2pshard.transport.channels import make_channel
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc

from .. import platform
from ..rounds import Rounds
from ..tasks import failure_of
from . import membership as m
from .checks import MAX_INCARNATION, checked_info
from .connection import Connection
from .links import Links

__all__ = ["NODE_KEY", "NONCE_KEY", "RELAYED_KEY", "Gossip", "Peers"]

NODE_KEY, NONCE_KEY = "p2pshard-node", "p2pshard-nonce"
"""Call metadata that say which member is calling."""
RELAYED_KEY = "p2pshard-relayed"
"""On a wish that a member passes on for another, which does not reach the coordinator."""
DIAL_S = 1.5
PROBE_S = 1.0
TICK_S = 0.1
MEASURE_BYTES = 2 << 20
MEASURE_PIECE = 128 << 10
MEASURE_S = 10.0
CONFIRM_S = 0.5
"""A member that is asked because something is wrong answers in so long, or is left out of what is done about it."""
SILENT_S = 2.0
"""Of a member, until what it serves is given to others; it is suspected before and evicted later."""
REFUSED_S = 0.4
"""The same when nothing listens at its address any more."""

_log = logging.getLogger("p2pshard.peers")


class Gossip(Protocol):
    """What travels with pings besides membership; the cluster's part."""

    def followed(self) -> str:
        """Id of the coordinator that this node follows; empty: none yet."""

    def versions(self) -> list[pb.StateVersion]:
        """Versions of all deployments known here."""

    def heard(self, node: str, coordinator: str, versions: list[pb.StateVersion]) -> None:
        """A member said which coordinator it follows and which versions it has."""

    def joined(self, node: str) -> None: ...

    def suspected(self, node: str) -> None: ...

    def lost(self, node: str, reason: str) -> None: ...


class Peers:
    """The I/O around `membership.State`."""

    def __init__(
        self,
        me: Callable[[], pb.NodeInfo],
        raise_incarnation: Callable[[int], None],
        credentials: Credentials | None,
        gossip: Gossip,
    ) -> None:
        self._me, self._raise_incarnation, self._credentials, self._gossip = (
            me,
            raise_incarnation,
            credentials,
            gossip,
        )
        self.state = m.State(me())
        self.links = Links()
        self._connections: dict[m.Addr, Connection] = {}
        self._known_by: dict[str, frozenset[str]] = {}
        """Whom each member counts as a member."""
        self._pingers: dict[str, asyncio.Task[None]] = {}
        self._kicks: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bridges = platform.bridge_networks()
        self._closed = False

    # -- views
    @property
    def id(self) -> str:
        return self.state.me.id

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call to a member."""
        return ((NODE_KEY, self.state.me.id), (NONCE_KEY, self.state.me.nonce))

    def alive(self) -> set[str]:
        """Ids of members that are not suspected, this node included."""
        return {self.id} | {p.info.id for p in self.state.members() if p.phase == m.MEMBER}

    def member_ids(self) -> set[str]:
        """Ids of all members, this node included."""
        return {self.id} | {p.info.id for p in self.state.members()}

    def resting(self) -> set[str]:
        """Ids of the members that are to have no stage, as they say: paused, or about to leave."""
        infos = (self.state.me, *(p.info for p in self.state.members()))
        return {info.id for info in infos if info.duty != pb.DUTY_SERVING}

    def serving(self) -> set[str]:
        """Ids of the members that answer and may have stages."""
        return self.alive() - self.resting()

    def known_elsewhere(self, node: str) -> bool:
        """Whether a member of this node's says that the node is one of its own."""
        return any(node in self._known_by.get(other, ()) for other in self.member_ids())

    def silent(self, node: str) -> bool:
        """Whether a member that is suspected here has answered nobody, as far as is known, for so long that its part of
        what is served is given to others: the deployment cannot wait until it is evicted."""
        peer = self.state.peers.get(node)
        if peer is None or peer.phase != m.SUSPECT:
            return False
        return self._quiet(peer) >= SILENT_S or self.refuses(node)

    def refuses(self, node: str) -> bool:
        """Whether nothing listens at a member's address any more, and it has answered nobody since."""
        peer = self.state.peers.get(node)
        if peer is None or peer.phase != m.SUSPECT or peer.refused_since is None:
            return False
        return self._quiet(peer) >= REFUSED_S

    def _quiet(self, peer: m.Peer) -> float:
        """Seconds since anybody had an answer from it, as far as is known here."""
        return time.monotonic() - max(peer.heard, self.links.last_seen(peer.info.id, self.id))

    def reachable(self) -> set[str]:
        """Ids of the members that answer, or may just be slow to, this node included."""
        return {n for n in self.member_ids() if not self.silent(n)}

    async def confirm(self, nodes: Iterable[str]) -> None:
        """Ask members whether they are there; those that do not say so at once are suspected when this returns."""

        async def one(node: str) -> None:
            try:
                await self.stub(node).Ping(self.message(), timeout=CONFIRM_S, metadata=self.metadata)
            except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                _log.info(
                    "node=%s does not answer: %s",
                    node,
                    error.message if isinstance(error, NodeUnreachable) else error.details(),
                )
                self.dispatch(m.PingLost(node, time.monotonic()))

        alive = self.alive() - {self.id}
        await asyncio.gather(*(one(n) for n in nodes if n in alive))

    def host(self, node: str) -> str:
        """Host at which this node reaches the member. Raises `NodeUnreachable`."""
        return self._outbound(node)[0]

    def _outbound(self, node: str) -> m.Addr:
        peer = self.state.peers.get(node)
        if peer is None or peer.outbound is None:
            name = peer.info.name if peer else node
            raise NodeUnreachable(f"node {name} is not a member now", tried=[node])
        return peer.outbound

    def stub(self, node: str) -> rpc.ClusterStub:
        """Calls to a member, on a connection shared by all of them but pings. Raises `NodeUnreachable`."""
        address = self._outbound(node)
        connection = self._connections.get(address)
        if connection is None:
            channel = make_channel(m.text(address), self._credentials, own_connection=True)
            connection = Connection(channel, self.state.peers[node].info.name or node)
            self._connections[address] = connection
        return connection.stub

    # -- life
    def start(self) -> None:
        self._spawn(self._ticker(), "membership")

    async def stop(self) -> None:
        """Say goodbye to every member and close everything."""
        self._closed = True
        goodbye = pb.Goodbye(id=self.id, nonce=self.state.me.nonce)

        async def leave(node: str) -> None:
            try:
                await self.stub(node).Leave(goodbye, timeout=1.0, metadata=self.metadata)
            except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                _log.debug("goodbye not delivered to %s: %s", node, error)

        await asyncio.gather(*(leave(p.info.id) for p in self.state.members()))
        tasks = [*self._tasks, *self._pingers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(c.close() for c in self._connections.values()))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure_of(task, _log, f"{task.get_name()} failed")

    async def _ticker(self) -> None:
        rounds = Rounds("membership", _log)
        while True:
            with rounds.one():
                self.dispatch(m.Tick(time.monotonic()))
                self.state.me = self._me()
            await asyncio.sleep(TICK_S)

    # -- the loop of event and action
    def dispatch(self, event: m.Event) -> list[m.Action]:
        """Apply the event and do what follows from it; replies and probes are returned for the caller."""
        self.state, actions = m.apply(self.state, event)
        left: list[m.Action] = []
        for action in actions:
            match action:
                case m.Dial(address):
                    self._spawn(self._dial(address), f"dial {m.text(address)}")
                case m.ProbeOld(answered=m.Answered()):
                    self._spawn(self._probe(action), "probe")
                case m.Joined(node):
                    self._joined(node)
                case m.Suspected(node):
                    _log.info("peer suspected node=%s", node)
                    self._gossip.suspected(node)
                case m.Evicted(node, reason):
                    _log.info("peer left node=%s reason=%s", node, reason)
                    self._evicted(node, reason)
                case m.Forget(address, gone):
                    connection = self._connections.pop(address, None)
                    if connection is not None:
                        self._spawn(connection.close(drain=not gone), "close")
                case m.RaiseIncarnation(highest):
                    self._raise_incarnation(highest)
                    self.state.me = self._me()
                case m.Log(message, fields):
                    _log.warning("%s %s", message, " ".join(f"{k}={v}" for k, v in fields.items()))
                case _:
                    left.append(action)
        return left

    def seen(self, addresses: list[m.Addr], *, node: str = "", static: bool = False) -> None:
        """Addresses where a node may be."""
        self.dispatch(m.Seen(tuple(addresses), time.monotonic(), node, static))

    def _joined(self, node: str) -> None:
        peer = self.state.peers[node]
        where = m.text(peer.outbound) if peer.outbound else ""
        _log.info(
            "peer joined node=%s name=%s address=%s incarnation=%s",
            node,
            peer.info.name,
            where,
            peer.info.incarnation,
        )
        self._kicks[node] = asyncio.Event()
        self._pingers[node] = asyncio.create_task(self._ping(node), name=f"ping {node}")
        self._pingers[node].add_done_callback(self._finished)
        self._spawn(self._measure(node), f"measure {node}")
        self._gossip.joined(node)

    def _evicted(self, node: str, reason: str) -> None:
        self._kicks.pop(node, None)
        self._known_by.pop(node, None)
        pinger = self._pingers.pop(node, None)
        if pinger is not None:
            pinger.cancel()
        self.links.keep(self.member_ids())
        self._gossip.lost(node, reason)

    def left(self, node: str, nonce: str) -> None:
        """A member said goodbye."""
        self.dispatch(m.Left(node, nonce, time.monotonic()))

    # -- handshakes
    def rank(self, address: m.Addr) -> int:
        """How much an address that works is worth: 0 best; loopback only when nothing else works."""
        try:
            ip = ipaddress.ip_address(address[0].split("%")[0])
        except ValueError:
            return 3 if address[0] == "localhost" else 0
        if ip.is_loopback:
            return 3
        if ip.is_link_local:
            return 2
        return 1 if any(ip in network for network in self._bridges if network.version == ip.version) else 0

    async def _dial(self, address: m.Addr) -> None:
        request = pb.HandshakeRequest(sender=self.state.me)
        channel = make_channel(m.text(address), self._credentials, own_connection=True)
        started = time.monotonic()
        try:
            reply = await rpc.ClusterStub(channel).Handshake(request, timeout=DIAL_S)
        except grpc.aio.AioRpcError as error:
            connected = channel.get_state() is grpc.ChannelConnectivity.READY
            self.dispatch(m.DialFailed(address, _why(error, connected), time.monotonic()))
            return
        finally:
            await channel.close()
        now = time.monotonic()
        try:
            checked_info(reply.receiver)
            if reply.highest_incarnation >= MAX_INCARNATION:
                raise InvalidRequest(f"incarnation {reply.highest_incarnation} cannot be right")
        except InvalidRequest as error:
            self.dispatch(m.DialFailed(address, f"its answer makes no sense: {error.message}", now))
            return
        if reply.accepted:
            self.dispatch(
                m.Answered(address, reply.receiver, self.rank(address), (now - started) * 1000, now)
            )
        else:
            self.dispatch(
                m.Declined(address, reply.receiver, reply.code, reply.reason, reply.highest_incarnation, now)
            )

    async def called(self, info: pb.NodeInfo, source: str) -> m.Reply:
        """Decide on a handshake that came in; may take the second that a probe of an earlier instance takes."""
        actions = self.dispatch(m.Called(info, source, time.monotonic()))
        while actions and isinstance(actions[0], m.ProbeOld):
            actions = await self._probe(actions[0])
        replies = [a for a in actions if isinstance(a, m.Reply)]
        return (
            replies[0]
            if replies
            else m.Reply(False, "duplicate", "two instances of one node id called at once; try again")
        )

    async def _probe(self, probe: m.ProbeOld) -> list[m.Action]:
        alive = False
        if probe.address[1]:
            channel = make_channel(m.text(probe.address), self._credentials, own_connection=True)
            try:
                reply = await rpc.ClusterStub(channel).Ping(
                    pb.PingRequest(sender=self.state.me), timeout=PROBE_S, metadata=self.metadata
                )
                alive = reply.receiver.nonce == probe.nonce
            except grpc.aio.AioRpcError as error:
                _log.debug(
                    "earlier instance at %s does not answer: %s", m.text(probe.address), error.details()
                )
            finally:
                await channel.close()
        return self.dispatch(m.Probed(probe, alive, time.monotonic()))

    # -- pings
    def kick(self) -> None:
        """Ping every member now, to spread a change."""
        for event in self._kicks.values():
            event.set()

    def changed(self) -> None:
        """This node describes itself in another way than before: tell everybody."""
        self.state.me = self._me()
        self.kick()

    def message(self) -> pb.PingRequest:
        """What a ping says."""
        now = time.monotonic()
        return pb.PingRequest(
            sender=self.state.me,
            known=[p.info for p in self.state.members()],
            links=self.links.samples(now),
            deployments=self._gossip.versions(),
            coordinator=self._gossip.followed(),
        )

    def pinged(self, request: pb.PingRequest) -> pb.PingReply:
        """Take a ping that came in, and answer it."""
        now = time.monotonic()
        self.dispatch(m.Pinged(request.sender, now))
        member = self.state.is_member(request.sender.id, request.sender.nonce)
        if not member:
            return pb.PingReply(receiver=self.state.me, member=False)
        self._learn(request, request.sender.id, now)
        said = self.message()
        return pb.PingReply(
            receiver=said.sender,
            known=said.known,
            links=said.links,
            deployments=said.deployments,
            coordinator=said.coordinator,
            member=True,
        )

    def _learn(self, said: pb.PingRequest | pb.PingReply, node: str, now: float) -> None:
        self.links.merge(said.links, self.id, self.member_ids(), now)
        self._known_by[node] = frozenset(info.id for info in said.known[: m.MAX_GOSSIP])
        known = self.state.peers
        for event in m.gossip(said.known, self.id, now):
            if not self.state.is_member(event.node) or event.node not in known:
                self.dispatch(event)
        self._gossip.heard(node, said.coordinator, list(said.deployments)[:1024])

    async def _ping(self, node: str) -> None:
        address: m.Addr | None = None
        channel: grpc.aio.Channel | None = None
        kick = self._kicks[node]
        try:
            while self.state.is_member(node):
                peer = self.state.peers[node]
                if peer.outbound != address or channel is None:
                    if channel is not None:
                        await channel.close()
                    address = peer.outbound
                    assert address is not None, "a member has an address"
                    channel = make_channel(m.text(address), self._credentials, own_connection=True)
                kick.clear()
                started = time.monotonic()
                await self._ping_once(rpc.ClusterStub(channel), node, started)
                rest = m.PING_S - (time.monotonic() - started)
                try:
                    # Not wait_for, which in Python 3.11 can lose a cancellation.
                    async with asyncio.timeout(max(0.02, rest)):
                        await kick.wait()
                except TimeoutError:
                    continue  # the usual case: nothing to spread before the next ping is due
        finally:
            if channel is not None:
                await channel.close()

    async def _ping_once(self, stub: rpc.ClusterStub, node: str, started: float) -> None:
        try:
            reply = await stub.Ping(self.message(), timeout=m.SUSPECT_S, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.dispatch(m.PingLost(node, time.monotonic()))
            return
        now = time.monotonic()
        rtt = (now - started) * 1000
        if reply.receiver.id != node:
            return  # another node has that address now; silence of the one meant will evict it
        try:
            for info in (reply.receiver, *reply.known[: m.MAX_GOSSIP]):
                checked_info(info)
        except InvalidRequest as error:
            _log.debug("a ping's answer from node=%s is not taken: %s", node, error.message)
            return  # as silence
        self.dispatch(m.Pong(reply.receiver, reply.member, rtt, now))
        peer = self.state.peers.get(node)
        if peer is not None and reply.member and self.state.is_member(node, reply.receiver.nonce):
            self.links.observe(self.id, node, now, peer.rtt_ms)
            self._learn(reply, node, now)

    async def _measure(self, node: str) -> None:
        """Bandwidth to a new member, once, with little data and after the bustle of joining."""
        await asyncio.sleep(random.uniform(0.5, 2.5))
        piece = pb.Blob(data=random.randbytes(MEASURE_PIECE))

        async def pieces() -> AsyncIterator[pb.Blob]:
            for _ in range(MEASURE_BYTES // MEASURE_PIECE):
                yield piece

        try:
            started = time.monotonic()
            await self.stub(node).Measure(pieces(), timeout=MEASURE_S, metadata=self.metadata)
        except (grpc.aio.AioRpcError, NodeUnreachable) as error:
            _log.debug("bandwidth to %s not measured: %s", node, error)
            return
        now = time.monotonic()
        peer = self.state.peers.get(node)
        if peer is not None and self.state.is_member(node):
            self.links.observe(
                self.id, node, now, peer.rtt_ms, MEASURE_BYTES * 8 / max(now - started, 1e-6) / 1e6
            )


def _why(error: grpc.aio.AioRpcError, connected: bool) -> str:
    """A dial's failure in words for people."""
    details = error.details() or ""
    mute = "SETTINGS" in details  # gRPC's words for a TCP connection on which nothing comes
    if mute or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        if connected or mute:
            return f"it accepts the connection and stays silent for {DIAL_S} s: not a p2pshard daemon, or one that hangs"
        return f"no answer within {DIAL_S} s: the machine is off, or a firewall drops the packets"
    if "refused" in details.lower():
        return "connection refused: nothing listens on that port; start it there with `p2pshard up`"
    if "resolution" in details.lower() or "dns" in details.lower():
        return "the host name does not resolve"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "something other than a p2pshard daemon answers there"
    return f"{error.code().name.lower()}: {details[:160]}"
