"""A coordinator and a member in one process, with nothing behind them: what becomes of rows, reports and bookings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from p2pshard_node.cluster import agreement
from p2pshard_node.cluster import planner as planning
from p2pshard_node.cluster.cluster import _refusal, _superseded
from p2pshard_node.cluster.coordinator import Attempt, Coordinator
from p2pshard_node.cluster.links import Links
from p2pshard_node.cluster.member import Member
from p2pshard_node.cluster.planner import Patience, Planner
from p2pshard_node.cluster.state import Deployments, deployment_id

from p2pshard.errors import DoesNotFit, NotReady, P2PShardError, StageLost, UnsupportedModel
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.growth import Growth
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.planning.profiles import NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import plan_pb2
from p2pshard.transport.grpc_errors import error_to_proto
from tests.waiting import come_true

ME = "a"


def plan(n: int = 1, nbytes: int = 0) -> Plan:
    stage = Stage((0, 1), True, True, (Rank(ME, weight_bytes=nbytes),))
    return Plan((Replica((stage,)),), Epoch(n, ME), "tolerant", "f" * 64, "m", "float32", 64, 1, 16, 4, 32, 2)


def row(manifest: str, state: str = "planning", n: int = 0) -> pb.Deployment:
    made = pb.Deployment(
        id=deployment_id(manifest), model=manifest, manifest=manifest, wanted=True, state=state
    )
    if n:
        made.plan.CopyFrom(plan(n).to_proto())
    return made


class Alone:
    """A coordinator of a cluster of one. `epochs` is what its member says; `make_plan` what the planner does."""

    def __init__(self, folder: Path) -> None:
        self.leads = True
        self.resting, self.serving = set[str](), {ME}
        self.growth, self.looks = Growth(None, "", {}), 0
        self.prepares: list[pb.PrepareRequest] = []
        self.report = pb.EpochReport()
        self.make: Callable[[pb.Deployment, Epoch], Awaitable[Plan]] = self.no_plan
        self.table = Deployments(folder / "deployments.json", ME)
        peers = SimpleNamespace(
            id=ME, member_ids=lambda: {ME}, alive=lambda: {ME}, silent=lambda n: False, refuses=lambda n: False, confirm=_nothing,
            known_elsewhere=lambda n: False, metadata=(),
            resting=lambda: set(self.resting), serving=lambda: set(self.serving),
            state=SimpleNamespace(me=pb.NodeInfo(id=ME, name="ann"), peers={}),
        )  # fmt: skip
        member = SimpleNamespace(epochs=self.epochs, abort=self.abort, prepare=self.prepare)
        self.coordinator = Coordinator(
            peers,  # type: ignore[arg-type]
            self.table,
            member,  # type: ignore[arg-type]
            lambda: self.leads,
            lambda r, e: self.make(r, e),
            lambda d: [],
            lambda r: self.table.write(r) and None,
            self.grow,
            lambda d: 0,
        )

    async def grow(self, *_: object) -> Growth:
        self.looks += 1
        return self.growth

    async def epochs(self, *_: object) -> pb.EpochReport:
        return self.report

    async def abort(self, request: pb.AbortRequest) -> None:
        return

    refusal: P2PShardError = UnsupportedModel("not here")

    async def prepare(self, request: pb.PrepareRequest) -> AsyncIterator[pb.PrepareProgress]:
        self.prepares.append(request)
        error = self.refusal
        yield pb.PrepareProgress(refused=error_to_proto(error))

    @staticmethod
    async def no_plan(*_: object) -> Plan:
        raise AssertionError("nothing is planned in this test")

    def add(self, added: pb.Deployment) -> str:
        self.table.write(added)
        return added.id

    def state(self, key: str) -> str:
        found = self.table.get(key)
        assert found is not None
        return found.state


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Alone]:
    made = Alone(tmp_path)
    yield made
    await made.coordinator.stop()


async def test_a_refusal_stays_the_error_it_was(alone: Alone) -> None:
    async def make(*_: object) -> Plan:
        raise DoesNotFit("too much", shortfall_bytes=7, terms=[{"node": ME}], suggestions=["buy"])

    alone.make = make
    key = alone.add(row("m"))
    alone.coordinator.start()
    await come_true(lambda: alone.state(key) == "refused")
    kept = alone.table.get(key)
    assert kept is not None
    error = _refusal(kept)
    assert isinstance(error, DoesNotFit) and error.exit_code == 3
    assert error.details == {"shortfall_bytes": 7, "terms": [{"node": ME}], "suggestions": ["buy"]}


async def test_a_members_refusal_at_prepare_stays_the_error_it_was(alone: Alone) -> None:
    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        return plan(epoch.n)

    alone.make = make
    key = alone.add(row("m"))
    alone.coordinator.start()
    await come_true(lambda: alone.state(key) == "refused")
    kept = alone.table.get(key)
    assert kept is not None and isinstance(_refusal(kept), UnsupportedModel)


async def test_one_plan_is_made_at_a_time_and_the_next_sees_it_booked(alone: Alone) -> None:
    seen: list[set[str]] = []

    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        seen.append({r.state for r in alone.table.all()})
        await asyncio.sleep(0.05)
        return plan(epoch.n)

    alone.make = make
    alone.add(row("m"))
    alone.add(row("k"))
    alone.coordinator.start()
    await come_true(lambda: len(seen) == 2)
    assert seen[0] == {"planning"}
    assert seen[1] != {"planning"}, "the first deployment was booked before the second was planned"


@pytest.mark.parametrize(
    ("prepared", "active", "expected"), [(True, 3, "ready"), (False, 3, "broken"), (True, 2, "broken")]
)
async def test_who_begins_to_coordinate_breaks_what_is_ready_and_not_served(
    alone: Alone, prepared: bool, active: int, expected: str
) -> None:
    async def make(*_: object) -> Plan:
        raise NotReady("later", state="planning")

    alone.make = make
    epoch = plan_pb2.Epoch(n=active, proposer=ME)
    alone.report = pb.EpochReport(prepared=prepared, active=epoch, promised=epoch)
    if prepared:
        alone.report.active_plan.CopyFrom(plan(active).to_proto())
    key = alone.add(row("m", "ready", 3))
    alone.coordinator.start()
    if expected == "broken":
        await come_true(lambda: alone.state(key) == "broken")
    else:
        await asyncio.sleep(0.2)
        assert alone.state(key) == "ready"


async def test_a_report_is_not_taken_by_a_node_that_follows(alone: Alone) -> None:
    alone.leads = False
    with pytest.raises(NotReady):
        alone.coordinator.reported(pb.StageEvent(deployment=alone.add(row("m", "ready", 1)), kind="lost"))


async def test_a_stage_lost_between_its_first_token_and_ready_fails_the_attempt(alone: Alone) -> None:
    key = alone.add(row("m", "loading", 1))
    attempt = alone.coordinator._attempts[key] = Attempt(epoch=Epoch(1, ME))
    epoch = plan_pb2.Epoch(n=1, proposer=ME)
    alone.coordinator.reported(pb.StageEvent(deployment=key, epoch=epoch, kind="ready"))
    error = error_to_proto(StageLost("gone", node=ME, layers=[0, 1]))
    alone.coordinator.reported(pb.StageEvent(deployment=key, epoch=epoch, kind="lost", error=error))
    assert attempt.ready.done() and isinstance(attempt.lost, StageLost)


async def test_a_plan_for_what_was_wanted_before_is_not_committed_again(alone: Alone) -> None:
    """Its members have not heard of the new wish yet, and hold its stages still."""
    planned: list[int] = []

    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        planned.append(epoch.n)
        return plan(epoch.n)

    alone.make = make
    epoch = plan_pb2.Epoch(n=3, proposer=ME)
    alone.report = pb.EpochReport(
        prepared=True, active=epoch, promised=epoch, promised_plan=plan(3).to_proto()
    )
    before = row("m", "removed", 3)
    before.wanted = False
    wanted = row("m")
    wanted.superseded.CopyFrom(cast(Any, _superseded(before)))
    alone.add(wanted)
    alone.coordinator.start()
    await come_true(lambda: planned)
    assert planned == [4]


async def test_an_attempt_that_is_cancelled_again_and_again_takes_back_what_it_prepared(alone: Alone) -> None:
    aborted: list[int] = []

    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        return plan(epoch.n)

    async def never(_: pb.PrepareRequest) -> AsyncIterator[pb.PrepareProgress]:
        yield pb.PrepareProgress(progress=pb.Progress(phase="fetching"))
        await asyncio.Event().wait()

    async def abort(request: pb.AbortRequest) -> None:
        await asyncio.sleep(0.2)
        aborted.append(request.epoch.n)

    alone.make = make
    member: Any = alone.coordinator._member
    member.prepare, member.abort = never, abort
    key = alone.add(row("m"))
    alone.coordinator.start()
    await come_true(lambda: alone.state(key) == "loading")
    await asyncio.sleep(0.05)
    gone = row("m", "removed", 1)
    gone.wanted = False
    alone.table.write(gone)
    for _ in range(20):
        alone.coordinator.wish_changed(key)
        await asyncio.sleep(0.01)
    await come_true(lambda: not alone.coordinator._attempts)
    assert aborted == [1]


async def test_the_failure_of_an_attempt_is_not_the_next_wishs(alone: Alone) -> None:
    """A plan is refused, and while it is taken back something else is wanted."""
    aborting, go = asyncio.Event(), asyncio.Event()
    planned: list[str] = []

    async def make(wanted: pb.Deployment, epoch: Epoch) -> Plan:
        planned.append(wanted.settings_json)
        if len(planned) > 1:
            await asyncio.Event().wait()
        return plan(epoch.n)

    async def abort(_: pb.AbortRequest) -> None:
        aborting.set()
        await go.wait()

    alone.make = make
    cast(Any, alone.coordinator._member).abort = abort
    key = alone.add(row("m"))
    alone.coordinator.start()  # its member refuses for good
    await aborting.wait()
    wish = row("m")
    wish.settings_json = '{"context": 64}'
    alone.table.write(wish)
    alone.coordinator.wish_changed(key)
    go.set()
    await come_true(lambda: len(planned) == 2)
    kept = alone.table.get(key)
    assert kept is not None and kept.wanted and kept.state == "planning" and "context" in planned[1]


async def test_one_members_nonsense_stops_no_deployment(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    planned: list[int] = []

    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        planned.append(epoch.n)
        return plan(epoch.n)

    alone.make = make
    alone.report = pb.EpochReport(promised=plan_pb2.Epoch(n=2**63, proposer="evil"))
    alone.add(row("m"))
    alone.coordinator.start()
    await come_true(lambda: planned)
    assert planned[0] == 1 and "not well formed" in caplog.text


@pytest.mark.parametrize(("before", "superseded"), [(0, 3), (5, 5)])
def test_what_was_superseded_once_stays_so(before: int, superseded: int) -> None:
    known = row("m", "ready", 3)
    known.superseded.n = before
    assert cast(Any, _superseded(known)).n == superseded
    assert _superseded(None) is None


# -- the member
def member(folder: Path, reports: list[pb.StageEvent], budget: int = 100, followed: str = ME) -> Member:
    peers = SimpleNamespace(id=ME, state=SimpleNamespace(me=pb.NodeInfo(id=ME, name="ann")))
    supervisor = SimpleNamespace(
        worker=lambda key: None, held=set, used_bytes=lambda without="": 0, stop=_nothing
    )
    given: list[Any] = [peers, agreement.Ledger.open(folder / "epochs"), supervisor, None, None, folder / "s"]
    table = Deployments(folder / "deployments.json", ME)
    return Member(*given, lambda: followed, lambda: budget, table.outdated, reports.append)


async def _nothing(*_: object) -> None:
    return


async def _manifest(*_: object) -> Manifest:
    tensor = TensorEntry("blk.0.attn_q.weight", "F32", (2, 2), 16, "e" * 64)
    return Manifest("gguf", {"num_hidden_layers": 2}, (tensor,), tokenizer="")


async def _loaded(*_: object, **__: object) -> tuple[Any, dict[str, Any]]:
    return SimpleNamespace(pid=1, peak_bytes=0), {"port": 1}


def test_a_worker_of_an_earlier_epoch_says_nothing_of_the_one_that_is_promised(tmp_path: Path) -> None:
    reports: list[pb.StageEvent] = []
    one = member(tmp_path, reports)
    record = agreement.prepare(one._ledger.get("d"), Epoch(1, ME), plan(1), plan(1).digest(), 0.0)
    record = agreement.loaded(record, Epoch(1, ME), 0.0)
    one._ledger.put(agreement.commit(record, Epoch(1, ME), plan(1).digest())[0])
    one._loaded_epochs["d"] = Epoch(1, ME)
    one.worker_event("d", {"ev": "edge_lost", "stage": 0, "error": {}, "epoch": [0, ME]})
    assert reports == [], "of an epoch before"
    one.worker_event("d", {"ev": "edge_lost", "stage": 0, "error": {}, "epoch": [1, ME]})
    assert [(r.kind, r.epoch.n) for r in reports] == [("lost", 1)]
    after = one._ledger.get("d")
    assert not after.prepared and not after.running, "a successor does not take it for one that serves"
    one._ledger.put(agreement.prepare(one._ledger.get("d"), Epoch(2, ME), plan(2), plan(2).digest(), 0.0))
    one.worker_event("d", {"ev": "exit", "reason": "killed"})
    assert len(reports) == 1


async def test_what_is_still_fetching_counts_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member(tmp_path, [], budget=100)
    go = asyncio.Event()

    async def fetch(*_: object) -> pb.StageEndpoint:
        await go.wait()
        return pb.StageEndpoint()

    monkeypatch.setattr(one, "_fetch_and_load", fetch)
    queue: asyncio.Queue[pb.PrepareProgress] = asyncio.Queue()
    first = asyncio.create_task(one._load("d", plan(nbytes=60), 0, [], queue, None))
    await asyncio.sleep(0)
    await come_true(lambda: one._booked)
    with pytest.raises(DoesNotFit) as caught:
        async with asyncio.timeout(5):  # it would go on to fetch
            await one._load("e", plan(nbytes=60), 0, [], queue, None)
    assert caught.value.details["shortfall_bytes"] == 20
    go.set()
    await first
    await one._load("e", plan(nbytes=60), 0, [], queue, None)  # what was booked is free again


async def test_what_is_undeployed_after_its_worker_died_holds_no_tensors(tmp_path: Path) -> None:
    def write_source(manifest: object, entries: object, path: Path) -> None:
        path.write_text("{}")

    def sources() -> list[str]:
        return [p.name for p in (tmp_path / "s").iterdir()]

    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "0a.json").write_text("{}")
    one = member(tmp_path, [])
    assert sources() == [], "what an earlier run of this daemon left"
    one._fetcher = cast(Any, SimpleNamespace(manifest=_manifest, ensure=_nothing))
    one._store = SimpleNamespace(write_source=write_source, recognise=lambda *_: True)
    cast(Any, one._supervisor).load = _loaded
    one._ledger.put(agreement.prepare(one._ledger.get("d"), Epoch(1, ME), plan(1), plan(1).digest(), 0.0))
    await one._load("d", plan(1), 0, [], asyncio.Queue(), None)
    assert sources() == ["d.json"] and one.holds("d"), "it has no worker any more, and is wanted"
    await one.remove("d", Epoch(1, ME))
    assert sources() == [] and not one.holds("d")


async def test_nothing_is_loaded_and_no_commit_answered_on_a_promise_that_is_not_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member(tmp_path, [])
    go, done = asyncio.Event(), []
    monkeypatch.setattr(one._ledger, "saved", go.wait)

    async def fetch(*_: object) -> pb.StageEndpoint:
        done.append("loads")
        return pb.StageEndpoint()

    monkeypatch.setattr(one, "_fetch_and_load", fetch)
    monkeypatch.setattr(one, "_activation", lambda *_: {})
    cast(Any, one._supervisor).activate = lambda *_: done.append("serves")
    loading = asyncio.create_task(one._load("d", plan(1), 0, [], asyncio.Queue(), None))
    await asyncio.sleep(0.05)
    assert done == []
    go.set()
    await loading
    record = agreement.prepare(one._ledger.get("d"), Epoch(1, ME), plan(1), plan(1).digest(), 0.0)
    one._ledger.put(agreement.loaded(record, Epoch(1, ME), 0.0))
    go.clear()
    epoch = plan_pb2.Epoch(n=1, proposer=ME)
    request = pb.CommitRequest(deployment="d", epoch=epoch, digest=plan(1).digest())
    given_up = asyncio.create_task(one.commit(request))
    await asyncio.sleep(0.05)
    assert not given_up.done() and done == ["loads", "serves"]
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    go.set()
    assert (await one.commit(request)).accepted and done == ["loads", "serves"], "it serves, and only once"


async def test_what_was_fetched_for_a_load_that_was_cancelled_may_be_evicted(tmp_path: Path) -> None:
    one, abandoned, go = member(tmp_path, []), [], asyncio.Event()

    async def ensure(*_: object) -> None:
        go.set()
        await asyncio.Event().wait()

    one._fetcher = cast(Any, SimpleNamespace(manifest=_manifest, ensure=ensure))
    one._store = SimpleNamespace(abandon=abandoned.append, recognise=lambda *_: True)
    loading = asyncio.create_task(one._load("d", plan(1), 0, [], asyncio.Queue(), None))
    await go.wait()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert loading.cancelled() and abandoned == [{"e" * 64}]


@pytest.mark.parametrize(
    ("followed", "state", "kept"), [(ME, "loading", True), (ME, "broken", False), ("gone", "loading", False)]
)
async def test_an_epoch_that_a_successor_may_still_bring_into_force_outlives_its_lease(
    tmp_path: Path, followed: str, state: str, kept: bool
) -> None:
    one = member(tmp_path, [], followed=followed)
    one._peers = cast(Any, SimpleNamespace(id=ME, member_ids=lambda: {ME}))
    epoch, key = Epoch(1, "gone"), row("m").id
    theirs = replace(plan(), epoch=epoch)
    record = agreement.prepare(one._ledger.get(key), epoch, theirs, theirs.digest(), -100.0)
    one._ledger.put(agreement.loaded(record, epoch, -100.0))
    named = row("m", state)
    named.plan.CopyFrom(theirs.to_proto())
    await one.tick([named])
    assert one._ledger.get(key).prepared is kept


async def test_the_end_of_one_load_takes_nothing_from_the_next(tmp_path: Path) -> None:
    one, stopping, go = member(tmp_path, []), asyncio.Event(), asyncio.Event()

    async def stop(_: str) -> None:
        stopping.set()
        await go.wait()

    cast(Any, one._supervisor).stop = stop
    record = agreement.prepare(one._ledger.get("d"), Epoch(1, ME), plan(1), plan(1).digest(), 0.0)
    one._ledger.put(agreement.loaded(record, Epoch(1, ME), 0.0))
    ending = asyncio.create_task(one.remove("d", Epoch(1, ME)))
    await stopping.wait()
    assert not one._ledger.get("d").prepared, "nobody counts on it any more"
    record = agreement.prepare(one._ledger.get("d"), Epoch(2, ME), plan(2), plan(2).digest(), 0.0)
    one._ledger.put(agreement.loaded(record, Epoch(2, ME), 0.0))
    one._source("d").write_text("{}")
    go.set()
    await ending
    assert one._source("d").exists() and one._ledger.get("d").prepared


async def test_a_stage_that_was_given_up_stays_in_memory_while_its_deployment_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next epoch takes it up; it makes way for another deployment, and for nobody's sake it does not stay for ever."""
    one, stopped, held = member(tmp_path, [], budget=100), [], {"d": 60}

    async def stop(key: str) -> None:
        stopped.append(key)
        held.pop(key, None)

    cast(Any, one._supervisor).stop = stop
    cast(Any, one._supervisor).held = lambda: set(held)
    cast(Any, one._supervisor).worker = held.get
    cast(Any, one._supervisor).used_bytes = lambda without="": sum(v for k, v in held.items() if k != without)
    one._peers = cast(Any, SimpleNamespace(id=ME, member_ids=lambda: {ME}, state=one._peers.state))
    record = agreement.prepare(one._ledger.get("d"), Epoch(1, ME), plan(1), plan(1).digest(), 0.0)
    one._ledger.put(agreement.loaded(record, Epoch(1, ME), 0.0))
    await one.drop("d", Epoch(1, ME))
    assert not one._ledger.get("d").prepared and stopped == []
    await one._make_room("e", 40)
    assert stopped == []
    await one._make_room("e", 41)
    assert stopped == ["d"]
    held["d"] = 60
    await one._end_unwanted({"d"}, 0.0)
    await one._end_unwanted({"d"}, 100.0)
    await one._end_unwanted(set(), 101.0)
    await one._end_unwanted(set(), 110.0)
    assert stopped == ["d"]
    await one._end_unwanted(set(), 120.0)
    assert stopped == ["d", "d"]


@pytest.mark.parametrize(
    ("promised", "active", "last", "ends"),
    [
        (2, 0, 2, True),  # what the tombstone names
        (2, 0, 3, True),
        (2, 0, 1, False),  # loads for a wish of which this node has not heard
        (2, 2, 1, True),  # serves, so the tombstone is the later word
    ],
)
async def test_a_late_tombstone_ends_what_serves_and_no_later_load(
    tmp_path: Path, promised: int, active: int, last: int, ends: bool
) -> None:
    one = member(tmp_path, [])
    theirs = plan(promised)
    record = agreement.prepare(one._ledger.get("d"), theirs.epoch, theirs, theirs.digest(), 0.0)
    record = agreement.loaded(record, theirs.epoch, 0.0)
    one._ledger.put(replace(record, active=Epoch(active, ME if active else "")))
    await one.remove("d", Epoch(last, ME))
    assert one._ledger.get("d").prepared is not ends


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_member_takes_no_epoch_of_what_is_not_wanted_any_more(tmp_path: Path, wanted: bool) -> None:
    """Its proposer was stopped, say, and has not heard of the change."""
    reports: list[pb.StageEvent] = []
    one, table = member(tmp_path, reports), Deployments(tmp_path / "rows.json", ME)
    one._outdated = table.outdated
    before = row("m", "ready", 3)
    now = row("m") if wanted else row("m", "removed", 3)
    now.wanted = wanted
    if wanted:
        now.superseded.CopyFrom(cast(Any, _superseded(before)))
    table.write(now)
    old = plan(3)
    request = pb.PrepareRequest(
        deployment=now.id, epoch=old.epoch.to_proto(), digest=old.digest(), plan=old.to_proto()
    )
    (answer,) = [m async for m in one.prepare(request)]
    assert answer.refused.code == "conflict" and "no longer wanted" in answer.refused.message
    record = agreement.prepare(one._ledger.get(now.id), old.epoch, old, old.digest(), 0.0)
    one._ledger.put(agreement.loaded(record, old.epoch, 0.0))
    reply = await one.commit(
        pb.CommitRequest(deployment=now.id, epoch=old.epoch.to_proto(), digest=old.digest())
    )
    assert not reply.accepted and "no longer wanted" in reply.error.message


# -- the planner
def test_what_is_missing_is_waited_for_once() -> None:
    patience = Patience(20.0)
    assert patience.left({"b"}, 0.0) and patience.left({"b"}, 19.9)
    assert not patience.left({"b"}, 20.0)
    assert not patience.left({"b"}, 500.0), "a later plan does not wait for it again"
    assert patience.left({"b", "c"}, 501.0), "a newcomer has its own time"
    assert not patience.left(set(), 502.0)
    assert patience.left({"b"}, 503.0), "it had come, and is missing anew"


async def test_a_member_that_is_left_out_is_not_waited_for(tmp_path: Path) -> None:
    me = pb.NodeInfo(id=ME, name="ann", devices=[pb.DeviceProfile(device="cpu", budget_bytes=100)])
    bob = pb.NodeInfo(id="b", name="bob")
    peers: Any = SimpleNamespace(
        id=ME, alive=lambda: {ME, "b"}, serving=lambda: {ME, "b"}, links=Links(),
        state=SimpleNamespace(me=me, members=lambda: [SimpleNamespace(info=bob)]),
    )  # fmt: skip
    planner = Planner(peers, Deployments(tmp_path / "deployments.json", ME), cast(Any, None))
    async with asyncio.timeout(5):
        nodes, settings = await planner._usable("d", Settings(exclude=("bob",)))
    assert [n.node for n in nodes] == [ME] and settings == Settings()


@pytest.mark.parametrize("returns", [True, False])
async def test_what_does_not_fit_without_a_suspected_member_waits_for_it_to_return_or_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    alive, members, links = {ME}, {ME, "b"}, Links()
    for pair in ((ME, "b"), ("b", ME)):
        links.observe(*pair, time.monotonic() + 60, 1.0)

    def info(node: str) -> pb.NodeInfo:
        return pb.NodeInfo(id=node, name=node, devices=[pb.DeviceProfile(device="cpu", budget_bytes=9)])

    def reply(nodes: list[NodeBudget], *_: object) -> dict[str, Any]:
        return {"fits": len(nodes) == 2, "plan": None}

    def made(nodes: list[NodeBudget], *_: object, **__: object) -> Plan:
        if len(nodes) < 2:
            raise DoesNotFit("too much", shortfall_bytes=1)
        return plan()

    monkeypatch.setattr(planning, "plan_reply", reply)
    monkeypatch.setattr(planning, "plan_model", made)
    peers: Any = SimpleNamespace(
        id=ME, alive=lambda: set(alive), serving=lambda: set(alive), member_ids=lambda: set(members), links=links,
        state=SimpleNamespace(
            me=info(ME), members=lambda: [SimpleNamespace(info=info(n)) for n in members - {ME}]
        ),
    )  # fmt: skip
    fetcher = cast(Any, SimpleNamespace(manifest=_manifest))
    planner = Planner(peers, Deployments(tmp_path / "deployments.json", ME), fetcher)
    asked = ("m", "f" * 64, Settings(), Epoch(0, ME), [])
    dry, real = asyncio.create_task(planner.dry_run(*asked)), asyncio.create_task(planner.plan(*asked))
    await asyncio.sleep(0.3)
    assert not dry.done() and not real.done(), "it may be back in a moment"
    if returns:
        alive.add("b")
    else:
        members.discard("b")
    async with asyncio.timeout(10):
        assert (await dry)["fits"] is returns
        if returns:
            assert await real == plan()
        else:
            with pytest.raises(DoesNotFit):
                await real


def test_a_row_without_an_error_is_refused_as_not_ready() -> None:
    error: P2PShardError = _refusal(row("m", "broken"))
    assert isinstance(error, NotReady)


# -- moving
async def moving(alone: Alone, make: Callable[[pb.Deployment, Epoch], Awaitable[Plan]]) -> str:
    """What is ready under epoch 3, on a node that steps back."""
    alone.make = make
    epoch = plan_pb2.Epoch(n=3, proposer=ME)
    alone.report = pb.EpochReport(
        prepared=True,
        active=epoch,
        promised=epoch,
        promised_plan=plan(3).to_proto(),
        active_plan=plan(3).to_proto(),
    )
    key = alone.add(row("m", "ready", 3))
    alone.coordinator.start()
    await asyncio.sleep(0.1)
    assert alone.state(key) == "ready" and alone.prepares == [], "nothing moves before it has to"
    alone.resting = {ME}
    alone.coordinator.wake()
    return key


async def test_what_cannot_move_stays_ready_and_is_tried_again_when_others_are_there(alone: Alone) -> None:
    tries: list[int] = []

    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        tries.append(epoch.n)
        raise DoesNotFit("too much", shortfall_bytes=7)

    key = await moving(alone, make)
    with pytest.raises(DoesNotFit):
        async with asyncio.timeout(5):
            await alone.coordinator.hand_over(ME)
    await asyncio.sleep(0.2)
    assert tries == [4] and alone.state(key) == "ready" and alone.prepares == []
    alone.serving = {ME, "b"}
    alone.coordinator.wake()
    await come_true(lambda: len(tries) == 2)
    assert alone.state(key) == "ready"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [(DoesNotFit("no room for both"), "broken"), (UnsupportedModel("not here"), "ready")],
)
async def test_the_next_epoch_is_prepared_beside_the_one_in_force_which_ends_only_where_both_have_no_room(
    alone: Alone, refusal: P2PShardError, expected: str
) -> None:
    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        return plan(epoch.n)

    alone.refusal = refusal
    key = await moving(alone, make)
    await come_true(lambda: alone.prepares)
    first = alone.prepares[0]
    assert first.beside and first.epoch.n == 4
    if expected == "broken":
        await come_true(lambda: len(alone.prepares) > 1)
        assert not alone.prepares[1].beside, "it ends first, and is loaded as any other"
    else:
        await asyncio.sleep(0.3)
        assert alone.state(key) == "ready" and len(alone.prepares) == 1


async def test_a_loss_in_the_epoch_in_force_ends_the_move(alone: Alone) -> None:
    async def make(_: pb.Deployment, epoch: Epoch) -> Plan:
        await asyncio.sleep(0.3 if epoch.n == 4 else 0)
        return plan(epoch.n)

    key = await moving(alone, make)
    await come_true(lambda: key in alone.coordinator._attempts)
    event = pb.StageEvent(
        deployment=key, epoch=plan_pb2.Epoch(n=3, proposer=ME), kind="lost",
        error=error_to_proto(StageLost("gone", node=ME, layers=[0, 1])),
    )  # fmt: skip
    alone.coordinator.reported(event)
    assert alone.state(key) == "broken"
    await come_true(lambda: alone.prepares)
    assert not alone.prepares[0].beside
