"""Epochs as pure code: coordinators that die or pause at every point, members that refuse what is overtaken."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2pshard_node.cluster import agreement
from p2pshard_node.cluster.agreement import (
    MAX_EPOCH,
    Ledger,
    Propose,
    Record,
    Report,
    Resend,
    report_from_proto,
)
from p2pshard_node.cluster.proposal import Proposal

from p2pshard.errors import Conflict, InvalidRequest, NotReady, ProtocolError
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import plan_pb2

DEPLOYMENT = "abc123"


def plan_for(nodes: str, epoch: Epoch) -> Plan:
    """One layer per node, in order."""
    last = len(nodes) - 1
    stages = tuple(Stage((i, i), i == 0, i == last, (Rank(n),)) for i, n in enumerate(nodes))
    return Plan(
        (Replica(stages),), epoch, "tolerant", "f" * 64, "tiny", "float32", 128, 1, 16, 8, 64, len(nodes)
    )  # fmt: skip


def promised(record: Record, n: int, proposer: str = "a", now: float = 0.0) -> Record:
    plan = plan_for("ab", Epoch(n, proposer))
    return agreement.prepare(record, plan.epoch, plan, plan.digest(), now)


def test_a_promise_only_goes_up() -> None:
    record = promised(Record(DEPLOYMENT), 3)
    for n, proposer in ((3, "a"), (2, "z"), (1, "a")):
        with pytest.raises(Conflict, match="not above epoch 3"):
            promised(record, n, proposer)
    assert promised(record, 3, "b").promised == Epoch(3, "b")  # ordered by (n, proposer)


def test_an_epoch_that_leaves_no_higher_number_is_refused() -> None:
    last = Epoch(MAX_EPOCH, "a")
    assert promised(Record("d"), MAX_EPOCH).promised == last
    with pytest.raises(ProtocolError, match="no higher number"):
        promised(Record("d"), MAX_EPOCH + 1)
    with pytest.raises(ProtocolError, match="no higher number"):
        report_from_proto(pb.EpochReport(active=plan_pb2.Epoch(n=MAX_EPOCH + 1, proposer="a")))


def test_a_plan_that_is_not_the_one_named_is_refused() -> None:
    plan = plan_for("ab", Epoch(1, "a"))
    with pytest.raises(ProtocolError):
        agreement.prepare(Record(DEPLOYMENT), Epoch(1, "a"), plan, "0" * 64, 0.0)
    with pytest.raises(ProtocolError):
        agreement.prepare(Record(DEPLOYMENT), Epoch(2, "a"), plan, plan.digest(), 0.0)


def test_commit_needs_the_promise_the_digest_and_the_load_and_is_idempotent() -> None:
    record = promised(Record(DEPLOYMENT), 1)
    assert record.plan is not None
    digest = record.plan.digest()
    with pytest.raises(NotReady):
        agreement.commit(record, Epoch(1, "a"), digest)
    record = agreement.loaded(record, Epoch(1, "a"), 1.0)
    with pytest.raises(Conflict):
        agreement.commit(record, Epoch(1, "a"), "0" * 64)
    with pytest.raises(Conflict):
        agreement.commit(record, Epoch(1, "b"), digest)
    record, changed = agreement.commit(record, Epoch(1, "a"), digest)
    assert changed and record.running
    again, changed = agreement.commit(record, Epoch(1, "a"), digest)
    assert again == record and not changed


def test_a_load_that_was_overtaken_does_not_count() -> None:
    record = promised(promised(Record(DEPLOYMENT), 1), 2)
    with pytest.raises(Conflict, match="overtaken"):
        agreement.loaded(record, Epoch(1, "a"), 0.0)


def test_abort_drops_what_is_prepared_and_never_what_is_committed() -> None:
    record = agreement.loaded(promised(Record(DEPLOYMENT), 1), Epoch(1, "a"), 0.0)
    dropped = agreement.abort(record, Epoch(1, "a"))
    assert not dropped.prepared and dropped.promised == Epoch(1, "a")
    assert record.plan is not None
    committed, _ = agreement.commit(record, Epoch(1, "a"), record.plan.digest())
    assert agreement.abort(committed, Epoch(1, "a")) == committed
    assert agreement.abort(record, Epoch(9, "a")) == record


def test_a_lease_runs_out_only_while_it_is_not_renewed_and_nothing_is_committed() -> None:
    record = agreement.loaded(promised(Record(DEPLOYMENT), 1), Epoch(1, "a"), 10.0)
    end = 10.0 + agreement.LEASE_S
    assert not agreement.lapsed(record, end) and agreement.lapsed(record, end + 0.1)
    assert not agreement.lapsed(agreement.renew(record, end), end + 0.1)
    assert record.plan is not None
    committed, _ = agreement.commit(record, Epoch(1, "a"), record.plan.digest())
    assert not agreement.lapsed(committed, end + 100)


@pytest.mark.parametrize("lease", [float("nan"), 1e300, -5.0])
def test_a_lease_from_a_wire_is_bounded(lease: float) -> None:
    plan = plan_for("ab", Epoch(1, "a"))
    record = agreement.prepare(Record(DEPLOYMENT), plan.epoch, plan, plan.digest(), 0.0, lease)
    assert 1.0 <= record.lease_until <= agreement.MAX_LEASE_S


def test_promises_survive_a_restart_and_loads_do_not(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "epochs")
    record = ledger.put(agreement.loaded(promised(ledger.get(DEPLOYMENT), 4), Epoch(4, "a"), 0.0))
    assert record.plan is not None
    ledger.put(agreement.commit(record, Epoch(4, "a"), record.plan.digest())[0])
    ledger.flush()
    after = Ledger.open(tmp_path / "epochs").get(DEPLOYMENT)
    assert (after.promised, after.active, after.prepared) == (Epoch(4, "a"), Epoch(4, "a"), False)
    with pytest.raises(Conflict):
        promised(after, 4)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A", "a" * 65, "a/b", "a\0"])
def test_a_deployment_id_from_a_wire_cannot_name_another_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        Ledger.open(tmp_path / "epochs").get(name)


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / f"{DEPLOYMENT}.json").write_text('{"promised": ["x"]}')
    with pytest.raises(Conflict, match=DEPLOYMENT):
        Ledger.open(tmp_path)


# -- decide -----------------------------------------------------------------------------------------
def report(plan: Plan, *, prepared: bool = True, active: bool = False) -> Report:
    return Report(plan.epoch, plan.epoch if active else agreement.ZERO, prepared, plan)


def test_a_successor_proposes_above_all_that_was_promised() -> None:
    assert agreement.decide({}) == Propose(1)
    prepared = plan_for("abc", Epoch(7, "a"))
    assert agreement.decide({n: report(prepared) for n in "abc"}) == Propose(8)


def test_a_successor_sends_a_commit_again_only_if_all_members_still_hold_the_epoch() -> None:
    plan = plan_for("abc", Epoch(7, "a"))
    one = {"a": report(plan, active=True), "b": report(plan), "c": report(plan)}
    assert agreement.decide(one) == Resend(plan)
    assert agreement.decide({n: r for n, r in one.items() if n != "c"}) == Propose(8)  # c is gone
    assert agreement.decide({**one, "c": report(plan, prepared=False)}) == Propose(8)  # its worker is gone
    overtaken = report(plan_for("abc", Epoch(9, "b")))
    assert agreement.decide({**one, "c": overtaken}) == Propose(10)
    assert agreement.decide(one, spoilt=Epoch(7, "a")) == Propose(8)  # known not to work


# -- schedules --------------------------------------------------------------------------------------
@dataclass
class World:
    """Members as records. A coordinator is a generator: each step is one message answered, or lost with its sender."""

    records: dict[str, Record] = field(default_factory=lambda: {n: Record(DEPLOYMENT) for n in "abc"})
    down: set[str] = field(default_factory=set)

    def coordinate(self, me: str, nodes: str, *, moving: bool = False) -> Generator[str, None, bool]:
        """One attempt, pausing before every message. Returns whether it was committed by all."""
        reports: dict[str, Report] = {}
        for node in sorted(set(self.records) - self.down):
            yield f"ask {node}"
            if node not in self.down:
                reports[node] = Report.of(self.records[node])
        choice = agreement.decide(reports)
        if moving:
            choice = Propose(agreement.next_number(reports))
        if isinstance(choice, Resend):
            proposal = Proposal.resend(choice.plan)
        else:
            proposal = Proposal(plan_for(nodes, Epoch(choice.n, me)))
        while box := proposal.outbox():
            node, what = next(iter(sorted(box.items())))
            yield f"{what} {node}"
            if what == "abort":
                for other in box:
                    if other not in self.down:
                        self.records[other] = agreement.abort(self.records[other], proposal.plan.epoch)
                return False
            try:
                if node in self.down:
                    raise NotReady("gone")
                self.deliver(proposal, node, what, beside=moving)
            except (Conflict, NotReady) as error:
                proposal.on_refused(node, error)
        return True

    def deliver(self, proposal: Proposal, node: str, what: str, *, beside: bool) -> None:
        plan, record = proposal.plan, self.records[node]
        if what == "prepare":
            record = agreement.prepare(record, plan.epoch, plan, plan.digest(), 0.0, beside=beside)
            self.records[node] = agreement.loaded(record, plan.epoch, 0.0)
            proposal.on_prepared(node)
        else:
            self.records[node], _ = agreement.commit(record, plan.epoch, plan.digest())
            proposal.on_committed(node)

    def serving(self) -> set[Epoch]:
        """Epochs all of whose edges could shake hands: every member of the plan runs it."""
        found = set()
        for record in self.records.values():
            if record.serving is not None:
                others = [self.records[n] for n in record.serving.nodes]
                if all(r.running and r.active == record.active for r in others):
                    found.add(record.active)
        return found

    def finish(self, me: str = "c", nodes: str = "abc") -> None:
        """A coordinator that nothing disturbs tries until it succeeds."""
        for _ in range(5):
            attempt = self.coordinate(me, nodes)
            try:
                while True:
                    next(attempt)
            except StopIteration as end:
                if end.value:
                    return
        raise AssertionError("no agreement in five undisturbed attempts")


def advance(attempt: Generator[str, None, bool], until: str) -> None:
    """Run a coordinator until it is about to send that message (the message is not sent)."""
    for message in attempt:
        if message == until:
            return
    raise AssertionError(f"it never came to {until!r}")


@pytest.mark.parametrize(
    ("stops_before", "reused"),
    [("prepare b", False), ("commit a", False), ("commit b", True), ("commit c", True)],
    ids=[
        "after one of three prepares",
        "after all prepares",
        "after one of three commits",
        "after two commits",
    ],
)
def test_a_successor_of_a_coordinator_that_died_brings_one_plan(stops_before: str, reused: bool) -> None:
    world = World()
    first = world.coordinate("a", "abc")
    advance(first, stops_before)
    assert world.serving() == set()  # a partial commit never serves
    first.close()
    world.finish("b")
    (epoch,) = world.serving()
    assert (epoch.proposer == "a") is reused
    assert {r.active for r in world.records.values()} == {epoch}


def test_a_coordinator_that_was_stopped_before_its_commit_is_refused_when_it_continues() -> None:
    world = World()
    first = world.coordinate("a", "abc")
    advance(first, "commit a")
    world.finish("b")
    before = dict(world.records)
    (serving,) = world.serving()
    assert serving.proposer == "b"
    assert list(first)  # it goes on: its commits are refused and it aborts its own epoch
    assert world.records == before and world.serving() == {serving}


def test_a_coordinator_that_was_stopped_between_commits_disturbs_nothing_when_it_continues() -> None:
    world = World()
    first = world.coordinate("a", "abc")
    advance(first, "commit c")
    world.finish("b")
    before = dict(world.records)
    list(first)
    assert world.serving() == {Epoch(1, "a")} and world.records == before


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_schedule_of_three_coordinators_ends_in_one_plan_and_mixes_no_epochs(data: st.DataObject) -> None:
    world = World()
    plans = {n: data.draw(st.sampled_from(["abc", "cab", "ab", "bc"])) for n in "abc"}
    moving = {n: data.draw(st.booleans()) for n in "abc"}
    running = {n: world.coordinate(n, plans[n], moving=moving[n]) for n in "abc"}
    for _ in range(data.draw(st.integers(0, 60))):
        before = dict(world.records)
        actor = data.draw(st.sampled_from(sorted(running) or ["-"]))
        if actor == "-":
            break
        what = data.draw(st.sampled_from(["step", "step", "step", "step", "die", "worker dies", "restart"]))
        if what == "die":
            running.pop(actor).close()
        elif what == "worker dies":
            world.records[actor] = agreement.unloaded(world.records[actor])
        elif what == "restart":
            record = world.records[actor]
            world.records[actor] = replace(record, prepared=False, plan=None, serving=None)
        elif next(running[actor], None) is None:
            running[actor] = world.coordinate(actor, plans[actor], moving=moving[actor])
        for node, record in world.records.items():
            assert record.promised >= before[node].promised and record.active >= before[node].active
            assert record.active <= record.promised
            if record.serving is not None:
                assert record.serving.epoch == record.active <= record.promised
        for epoch in world.serving():
            members = [r for r in world.records.values() if r.running and r.active == epoch]
            assert len({r.active_digest for r in members}) == 1
    world.finish("c", "abc")
    serving = world.serving()
    assert len(serving) == 1
    (epoch,) = serving
    plan = next(r.serving for r in world.records.values() if r.running and r.active == epoch)
    assert plan is not None and plan.epoch == epoch


def test_what_serves_goes_on_while_the_next_epoch_is_prepared_beside_it_and_ends_with_its_commit() -> None:
    world = World()
    world.finish("a", "abc")
    (before,) = world.serving()
    move = world.coordinate("a", "ab", moving=True)
    advance(move, "commit a")
    assert world.serving() == {before}, "prepared beside it everywhere"
    assert list(move)
    (after,) = world.serving()
    assert after > before and world.records["c"].active == before


def test_a_move_that_is_given_up_leaves_what_serves_as_it_was() -> None:
    world = World()
    world.finish("a", "abc")
    serving = world.serving()
    move = world.coordinate("a", "ab", moving=True)
    advance(move, "prepare b")
    move.close()  # its coordinator died
    assert world.serving() == serving
    world.finish("b", "abc")
    assert world.serving() == serving, "a successor finds it in force and leaves it so"


def test_without_that_a_promise_ends_what_serves() -> None:
    world = World()
    world.finish("a", "abc")
    attempt = world.coordinate("b", "abc", moving=False)
    advance(attempt, "commit a")  # the epoch that is in force is sent again
    record = world.records["a"]
    plan = plan_for("abc", Epoch(5, "b"))
    assert not agreement.prepare(record, plan.epoch, plan, plan.digest(), 0.0).running
    assert agreement.prepare(record, plan.epoch, plan, plan.digest(), 0.0, beside=True).running


def test_the_end_of_an_epoch_leaves_what_is_prepared_beside_it_and_the_end_of_a_worker_nothing() -> None:
    plan, following = plan_for("abc", Epoch(1, "a")), plan_for("ab", Epoch(2, "a"))
    record = agreement.prepare(Record(DEPLOYMENT), plan.epoch, plan, plan.digest(), 0.0)
    record, _ = agreement.commit(agreement.loaded(record, plan.epoch, 0.0), plan.epoch, plan.digest())
    assert not agreement.ended(record).prepared and not agreement.ended(record).running
    both = agreement.prepare(record, following.epoch, following, following.digest(), 0.0, beside=True)
    both = agreement.loaded(both, following.epoch, 0.0)
    assert both.running and both.prepared
    assert agreement.commit(both, plan.epoch, plan.digest()) == (both, False), "sent again: nothing changes"
    over = agreement.ended(both)
    assert over.prepared and not over.running
    assert not agreement.unloaded(both).prepared and not agreement.unloaded(both).running
