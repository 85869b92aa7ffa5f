"""The member's half in action: prepares, commits and drops stages of this node, and reports what becomes of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from p2pshard.errors import (
    Conflict,
    DoesNotFit,
    Internal,
    NodeUnreachable,
    P2PShardError,
    ProtocolError,
    StageLost,
    from_wire,
)
from p2pshard.models.layout import needed_tensors
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.handover import together
from p2pshard.planning.plan import Epoch, Plan, Stage
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.grpc_errors import error_to_proto

from ..supervisor import Supervisor, Worker, same_weights
from ..threads import in_thread
from . import agreement
from .checks import word
from .fetch import Fetcher
from .peers import Peers

__all__ = ["Member", "lost_stage"]

PROGRESS_QUEUE = 64

_log = logging.getLogger("p2pshard.member")


def lost_stage(name: str, node: str, stage: Stage, why: str) -> StageLost:
    """The error that names a stage that is gone, by the node's name and its layers."""
    first, last = stage.layers
    return StageLost(f"layers {first}-{last} on node {name} are gone: {why}", node=node, layers=[first, last])


class Member:
    """One per node.

    ``budget()``: bytes that all workers may use now; ``outdated(deployment)``: epochs up to that one are for what is
    not wanted any more; ``report``: tells the coordinator.
    """

    def __init__(
        self,
        peers: Peers,
        ledger: agreement.Ledger,
        supervisor: Supervisor,
        fetcher: Fetcher,
        store: Any,
        folder: Path,
        followed: Callable[[], str],
        budget: Callable[[], int],
        outdated: Callable[[str], Epoch],
        report: Callable[[pb.StageEvent], None],
    ) -> None:
        self._peers, self._ledger, self._supervisor, self._fetcher = peers, ledger, supervisor, fetcher
        self._store, self._folder, self._followed = store, folder, followed
        self._budget, self._outdated, self._report = budget, outdated, report
        self._loading: dict[str, asyncio.Task[pb.StageEndpoint]] = {}
        self._ready: dict[str, Epoch] = {}
        """Epochs whose driver here has seen a token cross all stages."""
        self._booked: dict[str, int] = {}
        """Bytes of stages whose tensors are on their way, before they have a worker."""
        self._loaded_epochs: dict[str, Epoch] = {}
        """Of which epoch the worker of a deployment is."""
        self._loads: dict[str, pb.Progress] = {}
        """How far stages are that are on their way into memory, until they are committed or given up."""
        self._unwanted: dict[str, float] = {}
        """Since when the idle worker of a deployment that is not wanted is known to be one; monotonic."""
        self._sourced: set[str] = set()
        """Deployments of which there is a source file."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("*.json"):  # its worker ended with the daemon that started it
            left.unlink(missing_ok=True)

    # -- prepare
    async def prepare(self, request: pb.PrepareRequest) -> AsyncIterator[pb.PrepareProgress]:
        """Promise, load, and say so; what goes wrong is the last message, typed."""
        queue: asyncio.Queue[pb.PrepareProgress] = asyncio.Queue(PROGRESS_QUEUE)
        task: asyncio.Task[pb.StageEndpoint] | None = None
        try:
            task = self._begin(request, queue)
            while not (task.done() and queue.empty()):
                getter = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait([getter, task], return_when=asyncio.FIRST_COMPLETED)
                    if getter.done():
                        yield getter.result()
                finally:
                    getter.cancel()
            if task.cancelled():
                raise Conflict(f"epoch {request.epoch.n} was overtaken while it loaded")
            yield pb.PrepareProgress(prepared=task.result())
        except P2PShardError as error:
            _log.warning(
                "prepare refused deployment=%s epoch=%s reason=%s",
                request.deployment,
                request.epoch.n,
                error.message,
            )
            yield pb.PrepareProgress(refused=error_to_proto(error))
        finally:
            if task is not None and not task.done():
                task.cancel()  # the proposer is gone

    def _begin(
        self, request: pb.PrepareRequest, queue: asyncio.Queue[pb.PrepareProgress]
    ) -> asyncio.Task[pb.StageEndpoint]:
        deployment = agreement.checked_name(request.deployment)
        plan = Plan.from_proto(request.plan)
        epoch = Epoch.from_proto(request.epoch)
        leader = self._followed()
        if leader and leader != epoch.proposer and leader in self._peers.alive():
            raise Conflict(
                f"this node follows coordinator {leader}, which is alive; {epoch.proposer} may not propose now"
            )
        self._check_wanted(deployment, epoch)
        index = self._own_stage(plan)
        record = agreement.prepare(
            self._ledger.get(deployment),
            epoch,
            plan,
            request.digest,
            time.monotonic(),
            request.lease_s,
            beside=request.beside,
        )
        self._ledger.put(record)
        if not record.running:
            self._ready.pop(deployment, None)
        self._loads[deployment] = pb.Progress(phase="preparing")
        earlier = self._loading.pop(deployment, None)
        task = asyncio.create_task(
            self._load(
                deployment,
                plan,
                index,
                list(request.manifest_holders)[:64],
                queue,
                earlier,
                self._before(request),
            ),
            name=f"load {deployment}",
        )
        self._loading[deployment] = task
        task.add_done_callback(lambda t: self._loaded(deployment, t))
        return task

    def _loaded(self, deployment: str, task: asyncio.Task[pb.StageEndpoint]) -> None:
        if self._loading.get(deployment) is task:
            del self._loading[deployment]
            if (
                task.cancelled() or task.exception() is not None
            ):  # `prepare` passes it on if its caller is there
                self._loads.pop(deployment, None)
        elif not task.cancelled():
            task.exception()  # seen: a later load is under way

    def _check_wanted(self, deployment: str, epoch: Epoch) -> None:
        """Raises `Conflict` for an epoch of a proposer that has not heard yet that something else is wanted."""
        if epoch <= (last := self._outdated(deployment)):
            raise Conflict(
                f"epoch {epoch.n} is for what is no longer wanted: that ended with epoch {last.n} of {last.proposer}"
            )

    def _own_stage(self, plan: Plan) -> int:
        mine = [i for i, s in enumerate(plan.stages) for r in s.ranks if r.node == self._peers.id]
        if len(mine) != 1 or len(plan.replicas) != 1 or len(plan.stages[mine[0]].ranks) != 1:
            raise ProtocolError(
                f"the plan gives this node {len(mine)} stages; it takes exactly one, with one rank"
            )
        return mine[0]

    async def _load(
        self,
        deployment: str,
        plan: Plan,
        index: int,
        holders: list[str],
        queue: asyncio.Queue[pb.PrepareProgress],
        earlier: asyncio.Task[pb.StageEndpoint] | None,
        before: dict[str, Any] | None = None,
    ) -> pb.StageEndpoint:
        if earlier is not None:
            earlier.cancel()
            await asyncio.gather(earlier, return_exceptions=True)
        await self._ledger.saved()
        stage = plan.stages[index]
        needed = self._needed(deployment, plan, stage)
        await self._make_room(deployment, needed)
        self._check_budget(deployment, stage, needed)
        self._booked[deployment] = needed
        try:
            return await self._fetch_and_load(deployment, plan, index, holders, queue, before)
        except BaseException:
            if not self._ledger.get(deployment).running:
                self._release(deployment)
            raise
        finally:
            self._booked.pop(deployment, None)

    def _before(self, request: pb.PrepareRequest) -> dict[str, Any] | None:
        """The epoch in force, of which sequences may be taken over, as a worker is told; None when that is not to be."""
        if not request.HasField("before"):
            return None
        plan = Plan.from_proto(request.before)
        ports = {(e.stage, e.node): e.port for e in request.before_endpoints}
        targets = []
        for index, stage in enumerate(plan.stages):
            port = ports.get((index, stage.node), 0)
            own = stage.node == self._peers.id
            try:
                host = self._supervisor.local_host if own else self._peers.host(stage.node)
            except NodeUnreachable:
                return None
            if not 0 < port < 65536:
                return None
            targets.append([host, port])
        return {"plan": plan.to_json(), "targets": targets}

    def _needed(self, deployment: str, plan: Plan, stage: Stage) -> int:
        """Bytes that the deployment's worker needs until the stage is in force: beside one that serves, both."""
        serving = self._ledger.get(deployment).serving
        if serving is None:
            return stage.ranks[0].total_bytes
        return together(serving, self._own_stage(serving), plan, self._own_stage(plan))

    def _source(self, deployment: str) -> Path:
        """Tells a worker where its tensors lie; while it exists, they stay in the cache."""
        return self._folder / f"{deployment}.json"

    def _release(self, deployment: str) -> None:
        self._source(deployment).unlink(missing_ok=True)
        self._sourced.discard(deployment)

    def holds(self, deployment: str) -> bool:
        """Whether there is a worker here, or tensors that stay in the cache for one."""
        if self._supervisor.worker(deployment) is not None:
            return True
        return deployment in self._sourced and deployment not in self._loading

    async def _fetch_and_load(
        self,
        deployment: str,
        plan: Plan,
        index: int,
        holders: list[str],
        queue: asyncio.Queue[pb.PrepareProgress],
        before: dict[str, Any] | None = None,
    ) -> pb.StageEndpoint:
        stage = plan.stages[index]

        def tell(phase: str, done: int, total: int) -> None:
            progress = pb.Progress(phase=word(phase), done_bytes=max(0, done), total_bytes=max(0, total))
            self._loads[deployment] = progress
            if not queue.full():  # a slow listener misses steps, never the end
                queue.put_nowait(pb.PrepareProgress(progress=progress))

        manifest = await self._fetcher.manifest(plan.manifest, holders)
        entries = needed_tensors(manifest, *stage.layers, stage.embedding, stage.head)
        source, present = self._source(deployment), self._present(deployment, plan, stage, manifest)
        await in_thread(self._store.recognise, plan.model, plan.manifest)
        try:
            await self._fetcher.ensure(
                plan.manifest,
                [e for e in entries if e.sha256 not in present],
                holders,
                lambda done, total: tell("fetching", done, total),
            )
            self._sourced.add(deployment)
            await in_thread(self._write_source, manifest, entries, present, source)
        except BaseException:
            await in_thread(self._store.abandon, {e.sha256 for e in entries})
            raise
        beside = self._ledger.get(deployment).running
        load = self._supervisor.load
        if beside:
            load = partial(self._supervisor.load_beside, both_bytes=self._booked[deployment])
        else:
            self._loaded_epochs[deployment] = plan.epoch
        worker, event = await load(
            deployment,
            plan=plan.to_json(),
            stage=index,
            source=source,
            booked_bytes=stage.ranks[0].total_bytes,
            budget_bytes=stage.ranks[0].budget_bytes,
            progress=tell,
            before=before,
        )
        try:
            self._ledger.put(agreement.loaded(self._ledger.get(deployment), plan.epoch, time.monotonic()))
        except P2PShardError:
            if beside:
                self._supervisor.discard(deployment)
            else:
                await self._supervisor.stop(deployment)
            raise
        return self._endpoint(index, plan.epoch, worker, event)

    def _present(self, deployment: str, plan: Plan, stage: Stage, manifest: Manifest) -> frozenset[str]:
        """Tensors (by hash) that the deployment's worker has in memory and will not read again for this stage: they need
        not be on the disk any more."""
        worker = self._supervisor.worker(deployment)
        if worker is None or not worker.loaded or not same_weights(worker.plan, plan.to_json()):
            return frozenset()
        had = Plan.from_json(worker.plan).stages[worker.stage]
        ends = (had.embedding, had.head) == (stage.embedding, stage.head)
        held = needed_tensors(manifest, *had.layers, ends and had.embedding, ends and had.head)
        return frozenset(e.sha256 for e in held)

    def _write_source(
        self, manifest: Manifest, entries: Sequence[TensorEntry], present: frozenset[str], path: Path
    ) -> None:
        """All that is on the disk, so that it stays there; what is in memory may be missing."""
        found = [e for e in entries if e.sha256 not in present or self._store.holds(e.sha256)]
        self._store.write_source(manifest, found, path)

    def loads(self) -> list[pb.StageLoad]:
        """How far this node's stages are that are on their way into memory."""
        return [pb.StageLoad(deployment=d, progress=p) for d, p in self._loads.items()]

    def _available(self, deployment: str) -> int:
        """Bytes that a stage of the deployment may have now."""
        fetching = sum(
            size
            for other, size in self._booked.items()
            if other != deployment and self._supervisor.worker(other) is None
        )
        return self._budget() - self._supervisor.used_bytes(without=deployment) - fetching

    def _idle(self, deployment: str) -> bool:
        """Whether there is a worker here that no epoch has: one was lost, or given up, and another may take it up."""
        return (
            self._supervisor.worker(deployment) is not None
            and deployment not in self._loading
            and not self._ledger.get(deployment).prepared
            and not self._ledger.get(deployment).running
        )

    async def _make_room(self, deployment: str, needed: int) -> None:
        """End idle workers of other deployments as far as their memory is needed."""
        for other in self._supervisor.held() - {deployment}:
            if self._available(deployment) >= needed:
                return
            if self._idle(other):
                await self._supervisor.stop(other)

    def _check_budget(self, deployment: str, stage: Stage, needed: int) -> None:
        """Raises `DoesNotFit` when this node's own measure says that the stage does not fit now."""
        rank = stage.ranks[0]
        available = self._available(deployment)
        if needed > available:
            terms = {
                "weight_bytes": rank.weight_bytes,
                "kv_bytes": rank.kv_bytes,
                "workspace_bytes": rank.workspace_bytes,
                "base_bytes": rank.base_bytes,
                "available_bytes": available,
            }
            raise DoesNotFit(
                f"layers {stage.layers[0]}-{stage.layers[1]} need {needed:,} bytes here"
                f"{' while the ones before them serve' if needed != rank.total_bytes else ''} and "
                f"{max(0, available):,} are free now",
                shortfall_bytes=needed - available,
                terms=[{"node": self._peers.id, **terms}],
                suggestions=["ask for a smaller --context", "end other programs on that node, or add a node"],
            )

    def _endpoint(self, index: int, epoch: Epoch, worker: Worker, event: dict[str, Any]) -> pb.StageEndpoint:
        return pb.StageEndpoint(
            stage=index,
            epoch=epoch.to_proto(),
            node=self._peers.id,
            port=int(event["port"]),
            pid=worker.pid,
            peak_bytes=worker.peak_bytes,
            actual_weight_bytes=int(event.get("weight_bytes", 0)),
            actual_kv_bytes=int(event.get("kv_bytes", 0)),
            actual_base_bytes=int(event.get("base_bytes", 0)),
            read_bytes=int(event.get("read_bytes", 0)),
            fingerprint=str(event.get("fingerprint", "")),
            numerics=str(event.get("numerics", "tolerant")),
        )

    # -- commit, abort, questions
    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Start serving the epoch; as often as asked."""
        try:
            epoch = Epoch.from_proto(request.epoch)
            self._check_wanted(request.deployment, epoch)
            record, changed = agreement.commit(self._ledger.get(request.deployment), epoch, request.digest)
            if changed:
                assert record.serving is not None, "what is in force has a plan"
                plan = record.serving.measured((e.numerics, e.fingerprint) for e in request.endpoints)
                message = self._activation(plan, request)
                self._ledger.put(replace(record, plan=plan, serving=plan))
                self._loads.pop(request.deployment, None)
                self._ready.pop(request.deployment, None)
                self._loaded_epochs[request.deployment] = epoch
                self._supervisor.activate(request.deployment, message)
            elif self._ready.get(request.deployment) == epoch:
                self._send(request.deployment, record.serving, "ready")
            # After the worker has its order, which a caller that gives up now does not take back.
            await self._ledger.saved()
        except P2PShardError as error:
            return pb.CommitReply(accepted=False, error=error_to_proto(error))
        return pb.CommitReply(accepted=True)

    def _activation(self, plan: Plan, request: pb.CommitRequest) -> dict[str, Any]:
        """Where this stage sends to. Raises `ProtocolError` when the endpoints are not the plan's."""
        index = self._own_stage(plan)
        ports = {e.stage: e.port for e in request.endpoints}
        nodes = {e.stage: e.node for e in request.endpoints}
        if any(nodes.get(i) != s.node or not 0 < ports[i] < 65536 for i, s in enumerate(plan.stages)):
            raise ProtocolError(f"the commit of epoch {plan.epoch.n} names other endpoints than its plan")

        def target(stage: int) -> list[Any]:
            return [self._peers.host(nodes[stage]), ports[stage]]

        last = len(plan.stages) - 1
        return {
            "deployment": request.deployment,
            "epoch": plan.epoch.pair,
            "digest": request.digest,
            "numerics": plan.numerics,
            "next": target(index + 1) if index < last else None,
            "back": target(0) if index == last and last > 0 else None,
        }

    async def abort(self, request: pb.AbortRequest) -> None:
        """Drop an epoch that was prepared and not committed."""
        await self.drop(request.deployment, Epoch.from_proto(request.epoch))

    async def drop(self, deployment: str, epoch: Epoch) -> None:
        """As `abort`; what is committed stays. A stage that has been loaded stays in memory for the next epoch, for as
        long as the deployment is wanted."""
        record = self._ledger.get(deployment)
        if record.promised != epoch or record.active == epoch:
            return
        loading = self._loading.get(deployment)
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        record = self._ledger.get(deployment)
        if record.promised == epoch:  # else another load is under way by now
            self._loads.pop(deployment, None)
            self._ledger.put(agreement.abort(record, epoch))
            if record.running:
                self._supervisor.discard(deployment)

    async def remove(self, deployment: str, last: Epoch) -> None:
        """Epochs up to ``last`` are over: end the worker, which may have come into force under a later one.

        One that is still to come into force is for a wish that this node has not heard of: whoever proposed it ends
        it, or its lease does.
        """
        record = self._ledger.get(deployment)
        epoch = record.promised
        if epoch > max(record.active, last):
            return
        loading = self._loading.get(deployment)
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if self._ledger.get(deployment).promised == epoch:
            self._ready.pop(deployment, None)
            self._loads.pop(deployment, None)
            await self._end(deployment, epoch)

    async def _end(self, deployment: str, epoch: Epoch) -> None:
        """End the worker of an epoch and let go of its tensors, unless a later load has them in use meanwhile."""
        record = self._ledger.get(deployment)
        if record.prepared or record.running:  # of a deployment that was never here none is put
            self._ledger.put(agreement.unloaded(record))
        await self._supervisor.stop(deployment)
        if self._ledger.get(deployment).promised == epoch:
            self._release(deployment)

    def left_out(self, row: pb.Deployment) -> bool:
        """Whether the row is served by a plan newer than anything promised here that has no stage on this node.

        A plan that is still loading leaves nobody out: its coordinator may be alone with it.
        """
        if not row.HasField("plan") or row.state != "ready":
            return False
        nodes = {r.node for replica in row.plan.replicas for s in replica.stages for r in s.ranks}
        epoch = Epoch.from_proto(row.plan.epoch)
        return self._peers.id not in nodes and epoch > self._ledger.get(row.id).promised

    async def epochs(self, deployment: str) -> pb.EpochReport:
        """What is promised and active here."""
        record = self._ledger.get(deployment)
        return agreement.report_to_proto(record, self.endpoints(deployment))

    def endpoints(self, deployment: str) -> list[pb.StageEndpoint]:
        """Of the stages that are loaded here: the one in force, and one that is prepared."""
        record, worker = self._ledger.get(deployment), self._supervisor.worker(deployment)
        if worker is None or not worker.loaded:
            return []
        found = []
        if record.serving is not None:
            stage = self._own_stage(record.serving)
            found.append(self._endpoint(stage, record.active, worker, worker.loaded))
        if (pending := record.pending) is not None:
            event = worker.coming.event if worker.coming is not None else worker.loaded
            found.append(self._endpoint(self._own_stage(pending), pending.epoch, worker, event))
        return found

    async def tick(self, rows: Iterable[pb.Deployment]) -> None:
        """Once a second: leases of prepared epochs. One that is still to be brought into force, as ``rows`` say, is kept
        for whoever coordinates now."""
        rows = list(rows)
        now = time.monotonic()
        await self._end_unwanted({row.id for row in rows if row.wanted}, now)
        coordinated = self._followed() in self._peers.member_ids()
        awaited = {
            (row.id, Epoch.from_proto(row.plan.epoch))
            for row in rows
            if coordinated and row.wanted and row.state == "loading"
        }
        for record in list(self._ledger.records.values()):
            if not record.prepared or record.active == record.promised:
                continue
            kept = (record.deployment, record.promised) in awaited
            if kept or record.promised.proposer in self._peers.member_ids():
                self._ledger.put(agreement.renew(record, now))
            elif agreement.lapsed(record, now):
                _log.warning(
                    "prepared epoch dropped deployment=%s epoch=%s: its proposer is gone",
                    record.deployment,
                    record.promised.n,
                )
                await self.drop(record.deployment, record.promised)

    async def _end_unwanted(self, wanted: set[str], now: float) -> None:
        """End idle workers of deployments that nobody has wanted for a while, as far as this node has heard."""
        idle = {key for key in self._supervisor.held() if self._idle(key)} - wanted
        self._unwanted = {key: self._unwanted.get(key, now) for key in idle}
        for key, since in self._unwanted.items():
            if now - since > agreement.LEASE_S:
                _log.info("worker of deployment=%s ended: nobody wants it", key)
                await self._supervisor.stop(key)
                self._release(key)

    # -- what workers say
    def worker_event(self, deployment: str, event: dict[str, Any]) -> None:
        """Pass on what a worker said of its stage, or that it is gone."""
        record = self._ledger.get(deployment)
        name, kind = self._peers.state.me.name, event["ev"]
        if kind in ("fatal", "exit"):
            why = str(event["reason"]) if kind == "exit" else from_wire(event.get("error") or {}).message
            self._lost(deployment, record, f"its worker {why}", ended=kind == "exit")
            return
        plan = self._meant(deployment, record, event)
        if plan is None:
            _log.info("worker event=%s deployment=%s is of an earlier epoch", kind, deployment)
            return
        match kind:
            case "ready":
                self._ready[deployment] = plan.epoch
                self._send(deployment, plan, "ready")
            case "not_ready":
                self._ready.pop(deployment, None)
                why = f"node {name}: {event.get('reason', 'no reason given')}"
                self._send(deployment, plan, "not_ready", error=Internal(why))
            case "edge_lost":
                index = self._own_stage(plan)
                at = int(event.get("stage", index))
                # The epoch is over, though its worker lives: nobody may count on it any more.
                self._ready.pop(deployment, None)
                self._ledger.put(agreement.ended(record))
                error = from_wire(event.get("error") or {})
                self._send(deployment, plan, "lost", at if 0 <= at < len(plan.stages) else index, error)
            case other:
                _log.warning("worker says %r, which is not known here", other)

    def _meant(self, deployment: str, record: agreement.Record, event: dict[str, Any]) -> Plan | None:
        """The plan of whose epoch a worker speaks; None when that is over."""
        plan = record.serving or record.plan
        if plan is None or self._loaded_epochs.get(deployment) != plan.epoch:
            return None
        return plan if event.get("epoch") in (None, plan.epoch.pair) else None

    def _lost(self, deployment: str, record: agreement.Record, why: str, *, ended: bool) -> None:
        """The worker of a deployment is of no use any more, or gone, with every stage that it held."""
        self._ready.pop(deployment, None)
        held = [plan for plan in (record.serving, record.pending) if plan is not None]
        if ended:
            self._loads.pop(deployment, None)
            self._ledger.put(agreement.unloaded(record))
        for plan in held:
            index = self._own_stage(plan)
            error = lost_stage(self._peers.state.me.name, self._peers.id, plan.stages[index], why)
            self._send(deployment, plan, "lost", index, error)

    def _send(
        self,
        deployment: str,
        plan: Plan | None,
        kind: str,
        stage: int | None = None,
        error: P2PShardError | None = None,
    ) -> None:
        assert plan is not None, "only a loaded stage reports"
        self._report(
            pb.StageEvent(
                deployment=deployment,
                epoch=plan.epoch.to_proto(),
                stage=self._own_stage(plan) if stage is None else stage,
                node=self._peers.id,
                kind=kind,
                error=error_to_proto(error) if error is not None else None,
            )
        )
