"""Membership as pure code: states that are told what happened, and what they want done."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2pshard_node.cluster import membership as m
from p2pshard_node.cluster.membership import policy

from p2pshard.transport.generated import control_pb2 as pb


def info(
    name: str, *, port: int = 7332, nonce: str = "n1", incarnation: int = 1, **changes: object
) -> pb.NodeInfo:
    host = f"10.0.0.{ord(name[0]) - 96}"
    values: dict[str, object] = {
        "id": name,
        "name": name,
        "incarnation": incarnation,
        "nonce": nonce,
        "protocol": 1,
        "version": "0.1.0",
        "cluster": "home",
        "addresses": [pb.Address(host=host, port=port)],
    }
    return pb.NodeInfo(**{**values, **changes})  # type: ignore[arg-type]


def address(node: pb.NodeInfo) -> m.Addr:
    return node.addresses[0].host, node.addresses[0].port


def run(state: m.State, *events: m.Event) -> tuple[m.State, list[m.Action]]:
    actions: list[m.Action] = []
    for event in events:
        state, more = m.apply(state, event)
        actions += more
    return state, actions


def member_of(state: m.State, peer: pb.NodeInfo, now: float = 0.0) -> m.State:
    """The state after a handshake in both directions."""
    state, _ = run(
        state,
        m.Seen((address(peer),), now, peer.id),
        m.Answered(address(peer), peer, 0, 1.0, now),
        m.Called(peer, address(peer)[0], now),
    )
    assert state.is_member(peer.id, peer.nonce)
    return state


def test_apply_leaves_the_given_state_as_it_was() -> None:
    before = m.State(info("a"))
    after, actions = m.apply(before, m.Seen((("10.0.0.2", 7332),), 0.0))
    assert before.candidates == {} and list(after.candidates) == [("10.0.0.2", 7332)]
    assert actions == [m.Dial(("10.0.0.2", 7332))]


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_one_direction_is_not_enough(first: str) -> None:
    a, b = m.State(info("a")), info("b")
    events: list[m.Event] = [m.Answered(address(b), b, 0, 1.0, 0.0), m.Called(b, "10.0.0.2", 0.0)]
    if first == "theirs":
        events.reverse()
    a, actions = m.apply(a, events[0])
    assert not a.is_member("b") and m.Joined("b") not in actions
    a, actions = m.apply(a, events[1])
    assert a.is_member("b") and m.Joined("b") in actions


def test_a_call_makes_us_dial_the_addresses_its_caller_gives_and_the_one_it_came_from() -> None:
    _, actions = m.apply(m.State(info("a")), m.Called(info("b"), "172.30.0.9", 0.0))
    assert {a.address for a in actions if isinstance(a, m.Dial)} == {("10.0.0.2", 7332), ("172.30.0.9", 7332)}


def test_loopback_never_wins_over_another_address_that_works() -> None:
    b = info("b")
    state = m.State(info("a"))
    state, _ = run(state, m.Answered(("127.0.0.1", 7332), b, 3, 0.1, 0.0), m.Called(b, "127.0.0.1", 0.0))
    assert state.peers["b"].outbound == ("127.0.0.1", 7332)
    state, actions = m.apply(state, m.Answered(("10.0.0.2", 7332), b, 0, 5.0, 0.1))
    assert state.peers["b"].outbound == ("10.0.0.2", 7332)
    assert m.Forget(("127.0.0.1", 7332), gone=False) in actions
    state, _ = m.apply(state, m.Answered(("127.0.0.1", 7332), b, 3, 0.1, 0.2))
    assert state.peers["b"].outbound == ("10.0.0.2", 7332)


def test_strangers_who_call_by_the_thousand_cost_bounded_memory_and_no_member() -> None:
    b = info("b")
    state = member_of(m.State(info("a")), b)
    for i in range(3 * policy.MAX_KNOWN):
        stranger = info("c", id=f"stranger{i}", addresses=[])
        state, _ = m.apply(state, m.Called(stranger, f"10.{i >> 8}.{i & 255}.1", 0.001 * i))
    assert len(state.peers) <= policy.MAX_KNOWN + 1 and len(state.highest) <= policy.MAX_KNOWN
    assert state.is_member("b", b.nonce) and "b" in state.highest


def test_junk_addresses_keep_no_real_one_out() -> None:
    junk = tuple((f"10.9.{i >> 8}.{i & 255}", 1) for i in range(2 * policy.MAX_CANDIDATES))
    state, actions = m.apply(m.State(info("a")), m.Seen(junk, 0.0))
    assert len(state.candidates) == policy.MAX_CANDIDATES
    for action in actions:
        assert isinstance(action, m.Dial)
        state, _ = m.apply(state, m.DialFailed(action.address, "refused", 0.01))
    state, actions = m.apply(state, m.Seen((("10.0.0.2", 7332),), 0.02, "b"))
    assert ("10.0.0.2", 7332) in {a.address for a in actions if isinstance(a, m.Dial)}
    assert len(state.candidates) == policy.MAX_CANDIDATES


def test_dead_addresses_are_dialled_ever_more_rarely_and_delay_nobody() -> None:
    dead = tuple((f"10.9.0.{i}", 1) for i in range(300))
    state, actions = m.apply(m.State(info("a")), m.Seen(dead, 0.0, static=True))
    dials = [a.address for a in actions if isinstance(a, m.Dial)]
    assert len(dials) == policy.MAX_DIALS
    for where in dials:
        state, _ = m.apply(state, m.DialFailed(where, "refused", 0.01))
    # Every other address has its turn, and a newcomer has no failures behind it.
    state, actions = m.apply(state, m.Seen((("10.0.0.2", 7332),), 0.02))
    assert m.Dial(("10.0.0.2", 7332)) in actions
    for action in actions:
        state, _ = m.apply(state, m.DialFailed(action.address, "refused", 0.02))  # type: ignore[union-attr]
    counts: dict[m.Addr, int] = {}
    now = 0.02
    for _ in range(600):
        now += 0.1
        state, actions = m.apply(state, m.Tick(now))
        for action in actions:
            if isinstance(action, m.Dial):
                counts[action.address] = counts.get(action.address, 0) + 1
                state, _ = m.apply(state, m.DialFailed(action.address, "refused", now))
    assert max(counts.values()) <= 60 / policy.REDIAL_MOST_S + 6
    assert min(counts.get(d, 0) for d in dead) >= 8


def test_silence_suspects_then_evicts_and_the_peer_is_dialled_again() -> None:
    state = member_of(m.State(info("a")), info("b"))
    seen: dict[str, float] = {}
    now = 0.0
    redialled = False
    while now < 6.0:
        now += 0.1
        state, actions = m.apply(state, m.Tick(now))
        for action in actions:
            seen.setdefault(type(action).__name__, now)
            redialled = redialled or isinstance(action, m.Dial)
    assert m.SUSPECT_S <= seen["Suspected"] <= m.SUSPECT_S + 0.2
    assert m.EVICT_S <= seen["Evicted"] <= 5.0
    assert redialled and not state.is_member("b")


def test_a_pong_clears_suspicion() -> None:
    state = member_of(m.State(info("a")), info("b"))
    state, actions = m.apply(state, m.PingLost("b", 0.5))
    assert actions == [m.Suspected("b")] and state.peers["b"].phase == m.SUSPECT
    state, _ = m.apply(state, m.Pong(info("b"), True, 1.0, 0.7))
    assert state.peers["b"].phase == m.MEMBER


def test_a_pause_of_our_own_evicts_nobody() -> None:
    state = member_of(m.State(info("a")), info("b"))
    state, _ = m.apply(state, m.Tick(0.1))
    state, actions = m.apply(state, m.Tick(60.0))
    assert not [a for a in actions if isinstance(a, m.Evicted)] and state.is_member("b")


def test_who_was_dropped_shakes_hands_again() -> None:
    state = member_of(m.State(info("a")), info("b"))
    state, actions = m.apply(state, m.Pong(info("b"), False, 1.0, 1.0))
    assert actions == []  # the other side may just be a moment behind
    state, actions = m.apply(state, m.Pong(info("b"), False, 1.0, 1.3))
    assert actions == [m.Dial(address(info("b")))]
    state, _ = m.apply(state, m.Answered(address(info("b")), info("b"), 0, 1.0, 1.35))
    state, actions = m.apply(state, m.Pong(info("b"), True, 1.0, 1.5))
    assert state.is_member("b") and state.peers["b"].denied_since is None


def test_a_peer_that_was_evicted_returns_with_the_same_nonce() -> None:
    b = info("b")
    state = member_of(m.State(info("a")), b)
    state, _ = run(state, *[m.Tick(t / 10) for t in range(1, 60)])
    assert not state.is_member("b")
    state, _ = run(state, m.Called(b, "10.0.0.2", 7.0), m.Answered(address(b), b, 0, 1.0, 7.0))
    assert state.is_member("b", b.nonce)


def test_another_instance_is_accepted_when_the_old_one_is_silent() -> None:
    old, new = info("b"), info("b", nonce="n2", incarnation=2)
    state = member_of(m.State(info("a")), old)
    state, actions = m.apply(state, m.Called(new, "10.0.0.2", 1.0))
    (probe,) = actions
    assert isinstance(probe, m.ProbeOld) and probe.address == address(old) and probe.nonce == "n1"
    state, actions = m.apply(state, m.Probed(probe, False, 2.0))
    assert m.Evicted("b", "it was started again") in actions and m.Reply(True) in actions
    state, actions = m.apply(state, m.Answered(address(new), new, 0, 1.0, 2.1))
    assert m.Joined("b") in actions and state.is_member("b", "n2")


def test_another_instance_is_refused_naming_both_while_the_old_one_answers() -> None:
    old, copy = (
        info("b"),
        info("b", nonce="n2", incarnation=2, addresses=[pb.Address(host="10.0.0.77", port=7332)]),
    )
    state = member_of(m.State(info("a")), old)
    state, actions = m.apply(state, m.Called(copy, "10.0.0.77", 1.0))
    assert isinstance(actions[0], m.ProbeOld)
    state, actions = m.apply(state, m.Probed(actions[0], True, 2.0))
    reply = next(a for a in actions if isinstance(a, m.Reply))
    assert (reply.accepted, reply.code) == (False, "duplicate")
    assert "10.0.0.2:7332" in reply.reason and "10.0.0.77:7332" in reply.reason
    assert state.is_member("b", "n1") and not state.is_member("b", "n2")
    (row,) = m.not_joined(state)
    assert row["address"] == "10.0.0.77:7332" and "--data-dir" in row["reason"]


def test_a_copy_that_we_meet_by_our_own_dial_is_refused_too() -> None:
    old, copy = info("b"), info("b", nonce="n2", incarnation=2)
    state = member_of(m.State(info("a")), old)
    state, actions = m.apply(state, m.Answered(("10.0.0.77", 7332), copy, 0, 1.0, 1.0))
    probe = next(a for a in actions if isinstance(a, m.ProbeOld))
    state, _ = m.apply(state, m.Probed(probe, True, 2.0))
    assert state.is_member("b", "n1") and state.peers["b"].outbound == address(old)
    assert m.not_joined(state)[0]["code"] == "duplicate"


def test_an_incarnation_too_low_is_told_the_highest() -> None:
    state = member_of(m.State(info("a")), info("b", incarnation=9))
    state, _ = m.apply(state, m.Left("b", "n1", 1.0))
    state, actions = m.apply(state, m.Called(info("b", nonce="n2", incarnation=3), "10.0.0.2", 2.0))
    assert next(a for a in actions if isinstance(a, m.Reply)).highest == 9
    _, actions = m.apply(
        m.State(info("b")), m.Declined(("10.0.0.1", 7332), info("a"), "incarnation", "low", 9, 0.0)
    )
    assert m.RaiseIncarnation(9) in actions
    state, actions = m.apply(state, m.Called(info("b", nonce="n2", incarnation=10), "10.0.0.2", 2.0))
    assert m.Reply(True) in actions


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"protocol": 7}, "protocol", ("protocol 7", "protocol 1", "0.1.0")),
        ({"version": "0.2.3"}, "protocol", ("0.2.3", "0.1.0")),
        ({"cluster": "work"}, "cluster", ("'work'", "'home'", "--cluster home")),
    ],
)
def test_who_cannot_join_is_listed_with_both_versions_and_what_to_do(
    changes: dict[str, object], code: str, words: tuple[str, ...]
) -> None:
    stranger = info("z", **changes)  # type: ignore[arg-type]
    state, actions = m.apply(m.State(info("a")), m.Called(stranger, "10.0.0.26", 0.0))
    reply = next(a for a in actions if isinstance(a, m.Reply))
    assert (reply.accepted, reply.code) == (False, code)
    assert all(word in reply.reason for word in words)
    (row,) = m.not_joined(state)
    assert row["reason"] == reply.reason and row["address"] == "10.0.0.26:7332"
    assert stranger.version in row["version_there"] and row["version_here"] == "0.1.0 (protocol 1)"
    logs = [a for a in actions if isinstance(a, m.Log)]
    _, again = m.apply(state, m.Called(stranger, "10.0.0.26", 1.0))
    assert len(logs) == 1 and not [
        a for a in again if isinstance(a, m.Log)
    ]  # one line, however often it calls
    state, _ = m.apply(state, m.Tick(policy.ROW_S + 1))
    assert m.not_joined(state) == []


def test_itself_is_recognised_and_listed_only_when_the_user_gave_the_address() -> None:
    me = info("a")
    _, actions = m.apply(m.State(me), m.Called(me, "10.0.0.1", 0.0))
    reply = next(a for a in actions if isinstance(a, m.Reply))
    assert reply.code == "self" and not [a for a in actions if isinstance(a, m.Log)]
    for static in (True, False):
        state, _ = m.apply(m.State(me), m.Seen((("10.0.0.1", 7332),), 0.0, static=static))
        state, _ = m.apply(state, m.Declined(("10.0.0.1", 7332), me, "self", reply.reason, 0, 0.1))
        assert bool(m.not_joined(state)) is static


def test_an_unreachable_node_is_one_row_with_all_its_addresses() -> None:
    where = (("10.0.0.2", 7332), ("10.1.0.2", 7332))
    state, _ = m.apply(m.State(info("a")), m.Seen(where, 0.0, "b"))
    for now in (1.0, 2.0):
        for one in where:
            state, _ = m.apply(state, m.DialFailed(one, "no answer within 1.5 s", now))
    (row,) = m.not_joined(state)
    assert all(m.text(one) in row["reason"] for one in where) and "--advertise" in row["reason"]


def test_a_goodbye_ends_the_membership_of_that_instance_only() -> None:
    state = member_of(m.State(info("a")), info("b"))
    assert m.apply(state, m.Left("b", "another", 1.0))[0].is_member("b")
    assert not m.apply(state, m.Left("b", "n1", 1.0))[0].is_member("b")


def test_state_is_bounded_against_a_talkative_network() -> None:
    state = m.State(info("a"))
    for i in range(policy.MAX_CANDIDATES + 50):
        state, _ = m.apply(state, m.Seen(((f"host{i}", 1),), 0.0))
    for i in range(policy.MAX_ROWS + 50):
        state, _ = m.apply(state, m.Called(info("z", nonce=f"n{i}", cluster="other"), "10.0.0.26", float(i)))
    assert len(state.candidates) <= policy.MAX_CANDIDATES and len(state.refused) <= policy.MAX_ROWS


# -- several states on a network that loses, delays, stops and restarts -----------------------------
@dataclass
class Net:
    """Pure states and a clock; a message either arrives at once or is lost."""

    now: float = 0.0
    states: dict[str, m.State] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    cut: set[frozenset[str]] = field(default_factory=set)
    due: list[tuple[str, m.Action]] = field(default_factory=list)

    def add(self, name: str, *, incarnation: int = 1, nonce: str = "n1") -> None:
        self.states[name] = m.State(info(name, incarnation=incarnation, nonce=nonce))
        for other in self.states:
            if other != name:
                self.do(name, m.Seen((address(self.states[other].me),), self.now, other, True))

    def reaches(self, a: str, b: str) -> bool:
        return b in self.states and b not in self.stopped and frozenset((a, b)) not in self.cut

    def do(self, node: str, event: m.Event) -> list[m.Action]:
        self.states[node], actions = m.apply(self.states[node], event)
        self.due += [(node, a) for a in actions if isinstance(a, m.Dial)]
        for action in actions:
            if isinstance(action, m.ProbeOld):
                owner = next(n for n, s in self.states.items() if address(s.me) == action.address)
                alive = self.reaches(node, owner) and self.states[owner].me.nonce == action.nonce
                actions = actions + self.do(node, m.Probed(action, alive, self.now))
        return actions

    def dial(self, node: str, where: m.Addr) -> None:
        target = next((n for n, s in self.states.items() if address(s.me) == where), None)
        if target is None or not self.reaches(node, target):
            self.do(node, m.DialFailed(where, "no answer", self.now))
            return
        actions = self.do(target, m.Called(self.states[node].me, address(self.states[node].me)[0], self.now))
        reply = next(a for a in actions if isinstance(a, m.Reply))
        other = self.states[target].me
        if reply.accepted:
            self.do(node, m.Answered(where, other, 0, 1.0, self.now))
        else:
            self.do(node, m.Declined(where, other, reply.code, reply.reason, reply.highest, self.now))

    def step(self) -> None:
        self.now += 0.1
        running = [n for n in self.states if n not in self.stopped]
        for node in running:
            self.do(node, m.Tick(self.now))
        due, self.due = self.due, []
        for node, action in due:
            if node in self.stopped:
                self.due.append((node, action))  # its dial goes on when it does
            elif node in self.states and isinstance(action, m.Dial):
                self.dial(node, action.address)
        for node in running:
            for peer in self.states[node].members():
                other = peer.info.id
                if self.reaches(node, other) and self.states[other].me.nonce == peer.info.nonce:
                    counts = self.states[other].is_member(node, self.states[node].me.nonce)
                    self.do(node, m.Pong(self.states[other].me, counts, 1.0, self.now))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.step()

    def agreed(self) -> bool:
        live = set(self.states) - self.stopped
        return all({p.info.id for p in self.states[n].members()} == live - {n} for n in live)


def test_three_nodes_find_each_other_stop_continue_and_restart() -> None:
    net = Net()
    for name in "abc":
        net.add(name)
    net.run(2)
    assert net.agreed()
    net.stopped.add("b")
    net.run(5)
    assert net.agreed()
    net.stopped.clear()
    net.run(6)
    assert net.agreed()
    net.states.pop("c")
    net.run(0.3)
    net.add("c", incarnation=2, nonce="n2")
    net.run(8)
    assert net.agreed() and net.states["a"].is_member("c", "n2")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stop", "cont", "cut", "heal", "wait", "restart"]), st.sampled_from("abcd")
        ),
        max_size=14,
    )
)
def test_whatever_happens_all_agree_again_when_it_is_over(story: list[tuple[str, str]]) -> None:
    net = Net()
    incarnations = dict.fromkeys("abcd", 1)
    for name in "abcd":
        net.add(name)
    for what, node in story:
        match what:
            case "stop":
                net.stopped.add(node)
            case "cont":
                net.stopped.discard(node)
            case "cut":
                net.cut.add(frozenset((node, "abcda"["abcd".index(node) + 1])))
            case "heal":
                net.cut.clear()
            case "restart":
                incarnations[node] += 1
                net.states.pop(node)
                net.stopped.discard(node)
                net.add(node, incarnation=incarnations[node], nonce=f"n{incarnations[node]}")
        net.run(1.3)
    net.stopped.clear()
    net.cut.clear()
    net.run(20)
    assert net.agreed()
    for node, state in net.states.items():
        assert not state.is_member(node)


def test_who_said_goodbye_is_not_listed_as_unreachable_and_whoever_vanished_is() -> None:
    for goodbye in (True, False):
        state = member_of(m.State(info("a")), info("b"))
        at = address(info("b"))
        if goodbye:
            state, _ = m.apply(state, m.Left("b", "n1", 1.0))
        else:
            state = run(state, *(m.Tick(1.0 + i / 10) for i in range(60)))[0]
        for now in (8.0, 9.0, 10.0):
            state, _ = m.apply(state, m.DialFailed(at, "refused", now))
        assert not state.is_member("b")
        assert [row["code"] for row in m.not_joined(state)] == ([] if goodbye else ["unreachable"])
        assert member_of(state, info("b", nonce="n2", incarnation=2), 11.0).is_member("b")
