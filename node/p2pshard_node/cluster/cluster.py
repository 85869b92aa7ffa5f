"""The cluster as one node sees it: members, deployments, and what is done to them. Composes the parts beside it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from p2pshard.credentials import Credentials
from p2pshard.errors import (
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    NotReady,
    P2PShardError,
)
from p2pshard.json_text import parse_json
from p2pshard.models.reference import parse_reference
from p2pshard.planning.growth import Growth, Pace
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import member_called
from p2pshard.transport.channels import error_of
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc
from p2pshard.transport.generated import plan_pb2
from p2pshard.transport.grpc_errors import error_from_proto, error_to_proto

from ..identity import Identity
from ..rounds import Rounds
from ..supervisor import Supervisor
from ..tasks import failure_of
from ..threads import in_thread
from . import leader
from .agreement import Ledger
from .coordinator import Coordinator
from .duty import DUTIES, OwnDuty
from .fetch import Fetcher
from .member import Member
from .membership import MEMBER, not_joined, text
from .peers import RELAYED_KEY, Peers
from .planner import Planner
from .reports import Reports
from .service import ClusterService
from .standby import Standby
from .state import Deployments, deployment_id, last_epoch, settings_satisfied
from .survey import Survey
from .traces import trace_to_json

__all__ = ["Cluster"]

SETTLE_S = 2.0
"""After a start: time to hear of a coordinator before appointing one."""
LEADER_WAIT_S = 10.0
WANT_S = 120.0
HAND_OVER_S = 600.0
PULL_S = 5.0
BROKEN_S = 30.0
"""How long a client that deploys waits for what is broken to be mended."""
HOLDER_LIMIT = 64

_log = logging.getLogger("p2pshard.cluster")


class Cluster:
    """One per daemon. The synchronous views only look; nothing in them waits."""

    def __init__(
        self,
        identity: Identity,
        *,
        me: Callable[[], pb.NodeInfo],
        credentials: Credentials | None,
        store: Any,
        supervisor: Supervisor,
        budget: Callable[[], int],
        requests: Callable[[], list[dict[str, Any]]],
        copies: bool = True,
    ) -> None:
        folder = identity.data_dir
        self._identity, self._store, self._supervisor = identity, store, supervisor
        self._started = time.monotonic()
        self._followed = ""
        self._claims: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulling: set[str] = set()
        self._texts: dict[str, asyncio.Task[None]] = {}
        self._idle: dict[str, str] = {}
        """Why this node has no stage of what is served, as last logged."""
        self._holders: dict[str, list[str]] = {}
        self._ledger = Ledger.open(folder / "epochs")
        self.table = Deployments(folder / "deployments.json", identity.id)
        self.peers = Peers(me, identity.exceed, credentials, self)
        self.duty = OwnDuty(self.peers, self._hand_over, supervisor.held)
        self.fetcher = Fetcher(store, self.peers)
        self.survey = Survey(self.peers, store, requests)
        self.planner = Planner(self.peers, self.table, self.fetcher)
        self.reports = Reports(self._report)
        self.member = Member(
            self.peers,
            self._ledger,
            supervisor,
            self.fetcher,
            store,
            folder / "sources",
            self.followed,
            budget,
            self.table.outdated,
            self.reports.put,
        )
        self.coordinator = Coordinator(
            self.peers,
            self.table,
            self.member,
            lambda: self._followed == identity.id,
            self.planner.for_row,
            self.holders,
            self._publish,
            self._grown,
            self._streams,
        )
        self.standby = Standby(self.peers, store, self.fetcher, supervisor, self._holders_of, copies=copies)
        self.service = ClusterService(self, self.peers, store)

    # -- life
    def start(self) -> None:
        self._started = time.monotonic()
        self.peers.start()
        self.coordinator.start()
        self._spawn(self._tick(), "cluster")

    async def stop(self) -> None:
        """Goodbye to all; nothing of ours runs afterwards."""
        await self.coordinator.stop()
        await self.reports.stop()
        tasks = [*self._tasks, *self._texts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.standby.close()
        await self.fetcher.close()
        await self.peers.stop()
        await in_thread(self.table.flush)
        await in_thread(self._ledger.flush)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure_of(task, _log, f"{task.get_name()} failed")

    async def _tick(self) -> None:
        second = 0.0
        rounds = Rounds("cluster", _log)
        while True:
            with rounds.one():
                self._elect()
                now = time.monotonic()
                if now - second >= 1.0:
                    second = now
                    await self.member.tick(self.table.all())
                    for row in self.table.all():
                        self._follow_up(row)
                        self.standby.look(row)
            await asyncio.sleep(0.2)

    # -- gossip (see peers.Gossip)
    def followed(self) -> str:
        return self._followed

    def versions(self) -> list[pb.StateVersion]:
        return self.table.versions()

    def heard(self, node: str, coordinator: str, versions: list[pb.StateVersion]) -> None:
        if self._claims.get(node) != coordinator:
            self._claims[node] = coordinator
            self._elect()
        newer = self.table.newer(versions)
        if newer and node not in self._pulling:
            self._pulling.add(node)
            self._spawn(self._pull(node, newer), f"pull from {node}")

    def joined(self, node: str) -> None:
        self._elect()
        self.coordinator.members_changed()
        self._notify()

    def suspected(self, node: str) -> None:
        self._spawn(self._watch(node), f"watch {node}")
        self._notify()

    async def _watch(self, node: str) -> None:
        """Act on the silence of a member as soon as it has lasted for long enough."""
        while self.peers.state.is_member(node) and node not in self.peers.alive():
            if self.peers.silent(node):
                self._elect()
                self.coordinator.wake()
                return
            await asyncio.sleep(0.05)

    def lost(self, node: str, reason: str) -> None:
        self._claims.pop(node, None)
        self._elect()
        self.coordinator.lost(node, reason)
        self.coordinator.members_changed()
        self._notify()

    def _elect(self) -> None:
        settled = time.monotonic() - self._started >= SETTLE_S
        chosen = leader.choose(
            self._identity.id, self._followed, self.peers.reachable(), self._claims, settled=settled
        )
        if chosen != self._followed:
            _log.info("coordinator node=%s", chosen or "-")
            self._followed = chosen
            self.peers.kick()
            self.coordinator.wake()
            self._notify()

    async def _pull(self, node: str, ids: list[str]) -> None:
        try:
            reply = await self.peers.stub(node).State(
                pb.StateRequest(deployments=ids), timeout=PULL_S, metadata=self.peers.metadata
            )
        except (grpc.aio.AioRpcError, NodeUnreachable) as error:
            _log.debug("state not pulled from %s: %s", node, error)
            return
        finally:
            self._pulling.discard(node)
        changed = self.table.merge(reply.deployments)
        if changed:
            for row in changed:
                self._follow_up(row)
            self._spread()

    def _spread(self) -> None:
        """A deployment changed: tell everybody now, not with the next ping."""
        self.peers.kick()
        self.coordinator.wake()
        self._notify()

    def _publish(self, row: pb.Deployment) -> None:
        self._follow_up(self.table.write(row))
        self._spread()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._spawn(notify(), "notify")

    def _follow_up(self, row: pb.Deployment) -> None:
        """What every node does about a row: end workers of what is not wanted, fetch what requests need of what is."""
        unused = not row.wanted or self.member.left_out(row)
        if unused and self.member.holds(row.id):
            self._spawn(self.member.remove(row.id, last_epoch(row)), "remove")
        if not row.wanted:
            return
        why = row.idle.get(self._identity.id, "")
        if why != self._idle.get(row.id, ""):
            self._idle[row.id] = why
            if why:
                _log.info("%s is served without this node: %s", row.model, why)
        if row.state in ("loading", "ready") and row.manifest not in self._texts:
            self._texts[row.manifest] = asyncio.create_task(
                self._fetch_text(row.manifest), name="fetch tokenizer"
            )
            self._texts[row.manifest].add_done_callback(lambda t, m=row.manifest: self._text_done(m, t))  # type: ignore[misc]

    def _text_done(self, manifest: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            # `ensure_text` and the next change of the row try again.
            self._texts.pop(manifest, None)

    async def _fetch_text(self, manifest: str) -> None:
        found = await self.fetcher.manifest(manifest, self._holders_of(manifest))
        await self.fetcher.extras(found, self._holders_of(manifest))

    # -- reports of this node's stages
    async def _report(self, event: pb.StageEvent) -> None:
        """To the coordinator. Raises while there is none, or one that does not take it: it may just be changing."""
        target = self._followed
        if target == self._identity.id:
            self.coordinator.reported(event)
        elif target:
            await self.peers.stub(target).Report(event, timeout=2.0, metadata=self.peers.metadata)
        else:
            raise NotReady("the cluster has no coordinator", state="following")

    # -- views
    def members(self) -> list[pb.NodeInfo]:
        """The nodes of the cluster, this one first."""
        return [self.peers.state.me, *(p.info for p in self.peers.state.members())]

    def not_joined(self) -> list[dict[str, Any]]:
        """Rows ``{address, reason, code, version_here, version_there}``."""
        return not_joined(self.peers.state)

    def deployments(self) -> list[pb.Deployment]:
        """Wanted deployments in any state, and those that were refused."""
        return [r for r in self.table.all() if r.wanted or r.state == "refused"]

    def find(self, model: str) -> pb.Deployment | None:
        """The wanted deployment of a name, id or manifest digest."""
        row = self.table.find(model)
        return row if row is not None and row.wanted else None

    def holders(self, deployment: str) -> list[str]:
        """Members that are known to have the model's files, likely ones first."""
        row = self.table.get(deployment)
        return self._holders_of(row.manifest) if row else []

    def _holders_of(self, manifest: str) -> list[str]:
        known = self._holders.get(manifest, [])
        return list(dict.fromkeys([*known, *sorted(self.peers.member_ids())]))[:HOLDER_LIMIT]

    async def wait_ready(self, deployment_id: str, timeout_s: float) -> pb.Deployment:
        """The deployment once it is ready. Raises `NotReady` after the time, or at once when it was refused or removed."""
        row = self.table.get(deployment_id)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while True:
                    row = self.table.get(deployment_id)
                    if row is None or not row.wanted:
                        state = row.state if row else "removed"
                        raise NotReady(
                            f"{row.model if row else deployment_id} is {state}: {row.reason if row else 'not deployed'}",
                            state=state,
                            reason=row.reason if row else "",
                        )
                    if row.state == "ready":
                        return row
                    await self._changed.wait()
        except TimeoutError:
            model, state, reason = (
                (row.model, row.state, row.reason) if row else (deployment_id, "removed", "")
            )
            raise NotReady(
                f"{model} is {state} after {timeout_s:.0f} s{': ' + reason if reason else ''}",
                state=state,
                reason=reason,
            ) from None

    def driver_target(self, deployment: pb.Deployment) -> str:
        """``host:port`` of the first stage's worker. Raises `NotReady` or `NodeUnreachable`."""
        first = next((e for e in deployment.endpoints if e.stage == 0), None)
        if first is None:
            raise NotReady(
                f"{deployment.model} has no driver yet", state=deployment.state, reason=deployment.reason
            )
        if first.node == self._identity.id:
            return text((self._supervisor.local_host, first.port))
        return text((self.peers.host(first.node), first.port))

    async def ensure_text(self, manifest: str) -> None:
        """Have manifest and tokenizer here. Raises `ModelNotFound` or `ModelCorrupt`."""
        task = self._texts.get(manifest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._texts[manifest] = asyncio.create_task(
                self._fetch_text(manifest), name="fetch tokenizer"
            )
            task.add_done_callback(lambda t: self._text_done(manifest, t))
        await asyncio.shield(task)

    def status(self) -> dict[str, Any]:
        """``{nodes, not_joined, deployments, coordinator}`` as ``status --json`` prints it."""
        alive = {self._identity.id} | {p.info.id for p in self.peers.state.members() if p.phase == MEMBER}
        return {
            "nodes": [self._node_row(info, info.id in alive) for info in self.members()],
            "not_joined": self.not_joined(),
            "deployments": [self._deployment_row(row) for row in self.deployments()],
            "coordinator": self._followed,
        }

    def _node_row(self, info: pb.NodeInfo, alive: bool) -> dict[str, Any]:
        device = info.devices[0] if info.devices else pb.DeviceProfile()
        peer = self.peers.state.peers.get(info.id)
        row = {
            "id": info.id,
            "name": info.name,
            "addresses": [text((a.host, a.port)) for a in info.addresses],
            "memory_free": device.free_bytes,
            "memory_budget": device.budget_bytes,
            "device": device.device,
            "incarnation": info.incarnation,
            "bytes_received": info.bytes_received,
            "version": info.version,
            "api_port": info.api_port,
            "state": DUTIES.get(info.duty, "member") if alive else "suspected",
            "this": info.id == self._identity.id,
        }
        if peer is not None and peer.outbound is not None:
            row["address"] = text(peer.outbound)
            row["rtt_ms"] = round(peer.rtt_ms, 3)
            link = self.peers.links.get(self._identity.id, info.id)
            row["bandwidth_mbps"] = round(link.bandwidth_mbps, 1) if link else 0.0
        return row

    def _deployment_row(self, row: pb.Deployment) -> dict[str, Any]:
        plan = Plan.from_proto(row.plan).to_json() if row.HasField("plan") and row.plan.replicas else None
        trace = None
        if plan is not None:
            ends = {(e.stage, e.node): e for e in row.endpoints}
            driver = self._driver(row)
            if driver is not None and driver.HasField("trace"):
                trace = trace_to_json(driver.trace)
            for index, stage in enumerate(plan["replicas"][0]["stages"]):
                for rank in stage["ranks"]:
                    end = ends.get((index, rank["node"]))
                    if end is None:
                        continue
                    counts = self._counts(end.node, row.id)
                    rank.update(
                        pid=end.pid,
                        port=end.port,
                        peak_bytes=max(end.peak_bytes, counts.peak_bytes if counts else 0),
                        actual_weight_bytes=end.actual_weight_bytes,
                        actual_kv_bytes=end.actual_kv_bytes,
                        actual_base_bytes=end.actual_base_bytes,
                        read_bytes=end.read_bytes,
                        # every stage computes what the driver sends around
                        replayed_rows=driver.replayed_rows if driver is not None else 0,
                    )
        return {
            "id": row.id,
            "model": row.model,
            "manifest": row.manifest,
            "state": row.state,
            "reason": row.reason,
            "settings": parse_json(row.settings_json or "{}"),
            "plan": plan,
            "progress": self._progress(row.id),
            "idle": dict(row.idle),
            "trace": trace,
        }

    def _progress(self, deployment: str) -> list[dict[str, Any]]:
        """Rows ``{node, phase, done_bytes, total_bytes}``: what the nodes last said of stages on their way into memory."""
        return [
            {
                "node": info.id,
                "phase": load.progress.phase,
                "done_bytes": load.progress.done_bytes,
                "total_bytes": load.progress.total_bytes,
            }
            for info in self.members()
            for load in info.loads
            if load.deployment == deployment
        ]

    def _counts(self, node: str, deployment: str) -> pb.WorkerCounts | None:
        """What the node last said of its worker."""
        for info in self.members():
            if info.id == node:
                return next((w for w in info.workers if w.deployment == deployment), None)
        return None

    def _driver(self, row: pb.Deployment) -> pb.WorkerCounts | None:
        """What the driver of a deployment last said of itself."""
        first = next((e for e in row.endpoints if e.stage == 0), None)
        return self._counts(first.node, row.id) if first is not None else None

    def _streams(self, deployment: str) -> int:
        row = self.table.get(deployment)
        driver = self._driver(row) if row is not None else None
        return driver.sequences if driver is not None else 0

    async def _grown(self, row: pb.Deployment, plan: Plan, streams: int) -> Growth:
        driver, pace = self._driver(row), None
        if driver is not None and driver.trace.decode.steps and driver.trace.decode.tokens:
            decode = driver.trace.decode
            step_s = sum(stage.compute_ms.median for stage in decode.stages) / 1000
            pace = Pace(step_s, decode.tokens / decode.steps) if step_s > 0 else None
        return await self.planner.grown(row, plan, streams, pace)

    def kv(self) -> list[dict[str, Any]]:
        """``[{node, model, stage, blocks_used, blocks_total, sequences}]``: every stage's worker, the driver's (stage 0) first."""
        rows = []
        for row in self.deployments():
            for end in sorted(row.endpoints, key=lambda e: e.stage):
                counts = self._counts(end.node, row.id)
                if counts is not None:
                    rows.append(
                        {
                            "node": end.node,
                            "model": row.model,
                            "stage": end.stage,
                            "blocks_used": counts.blocks_used,
                            "blocks_total": counts.blocks_total,
                            "sequences": counts.sequences,
                        }
                    )
        return rows

    async def requests(self) -> dict[str, Any]:
        """See `Survey.requests`."""
        return await self.survey.requests()

    async def models(self) -> dict[str, Any]:
        """See `Survey.models`."""
        return await self.survey.models()

    # -- what clients ask
    async def _resolve(self, ref: str, local_client: bool) -> tuple[str, str]:
        """``(name, manifest digest)`` of a model reference.

        That is what is deployed under it, else what this node's store has, else what the other members have.
        """
        deployed = self.find(ref)
        if (
            deployed is not None
        ):  # what runs under a name is that name, whatever lies in this node's own folder
            return deployed.model, deployed.manifest
        try:
            resolved = await asyncio.to_thread(self._store.resolve, ref, local_client=local_client)
        except ModelNotFound:
            if parse_reference(ref).path is not None:
                raise
            found = await self.survey.find(ref)
            self._holders[found.manifest] = list(found.holders)
            return ref, found.manifest
        digest = resolved.manifest.digest
        self._holders.setdefault(digest, [self._identity.id])
        return resolved.name, digest

    async def plan(self, model_ref: str, settings_json: str, local_client: bool) -> dict[str, Any]:
        """``{fits, plan, shortfall_bytes, suggestions, terms, message}``; loads nothing."""
        settings = Settings.from_json(settings_json)
        name, digest = await self._resolve(model_ref, local_client)
        return await self.planner.dry_run(
            name, digest, settings, Epoch(0, self._identity.id), self._holders_of(digest)
        )

    async def deploy(
        self, model_ref: str, settings_json: str, local_client: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Want a deployment and yield ``{state, reason, model, plan, progress}`` until it is ready. Raises why it is not."""
        settings = Settings.from_json(settings_json)
        name, digest = await self._resolve(model_ref, local_client)
        row = self._satisfying(digest, settings_json)
        if row is None:
            row = await self._want_at_coordinator(
                pb.WantDeployment(
                    model=name,
                    manifest=digest,
                    settings_json=settings.to_json(),
                    holder=self._holders_of(digest)[0],
                )
            )
        last: dict[str, Any] | None = None
        broken_since: float | None = None
        asked = (row.version, row.writer)
        while True:
            current = self.table.get(row.id)
            if current is not None and (current.version, current.writer) >= asked:
                row = current
            progress = self._deployment_row(row)
            if progress != last:
                last = progress
                yield progress
            if row.state == "ready":
                return
            if not row.wanted:
                raise _refusal(row)
            if row.state != "broken":
                broken_since = None
            elif broken_since is None:
                broken_since = time.monotonic()
            elif time.monotonic() - broken_since > BROKEN_S:
                raise _refusal(row)
            try:
                async with asyncio.timeout(0.5), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                continue  # only to show how far loading has come

    async def _coordinator(self) -> str:
        """Id of the coordinator, or of a member that reaches it, waiting for one that is being found. Raises
        `NodeUnreachable`."""
        deadline = time.monotonic() + LEADER_WAIT_S
        while not (target := self._way_to_coordinator()):
            if time.monotonic() > deadline:
                raise NodeUnreachable(f"the cluster has no coordinator after {LEADER_WAIT_S:.0f} s", tried=[])
            await asyncio.sleep(0.1)
        return target

    def _way_to_coordinator(self) -> str:
        members = self.peers.member_ids()
        if self._followed:
            return self._followed if self._followed in members else ""
        between = (n for n, c in sorted(self._claims.items()) if n in members and c and c not in members)
        return next(between, "")

    async def _pass_on(
        self,
        relayed: bool,
        here: Callable[[], Awaitable[Any]],
        there: Callable[[rpc.ClusterStub, Any], Awaitable[Any]],
    ) -> Any:
        """A member's wish: done here if this node coordinates, else passed on, with the metadata given, to the node that
        does; once. Raises `NotReady` when there is no such way."""
        if self._followed == self._identity.id:
            return await here()
        if relayed or self._followed not in self.peers.member_ids():
            raise NotReady("this node does not coordinate, and reaches no node that does", state="following")
        try:
            return await there(self.peers.stub(self._followed), (*self.peers.metadata, (RELAYED_KEY, "1")))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def take_want(self, request: pb.WantDeployment, *, relayed: bool) -> pb.WantReply:
        """A member's wish for a deployment; see `_pass_on`."""
        reply: pb.WantReply = await self._pass_on(
            relayed,
            lambda: self.want(request),
            lambda stub, metadata: stub.Want(request, timeout=WANT_S, metadata=metadata),
        )
        return reply

    async def take_unwant(self, request: pb.UndeployRequest, *, relayed: bool) -> None:
        """A member's wish to have none; see `_pass_on`."""
        await self._pass_on(
            relayed,
            lambda: self.unwant(request.model),
            lambda stub, metadata: stub.Unwant(request, timeout=WANT_S, metadata=metadata),
        )

    async def _at_coordinator(
        self, here: Callable[[], Awaitable[Any]], there: Callable[[rpc.ClusterStub], Awaitable[Any]]
    ) -> Any:
        """Done here if this node coordinates, else asked of the node that does; again, for a while, where that one
        does not coordinate any more, or not yet."""
        deadline = time.monotonic() + LEADER_WAIT_S
        while True:
            target = await self._coordinator()
            try:
                return await (here() if target == self._identity.id else there(self.peers.stub(target)))
            except grpc.aio.AioRpcError as error:
                typed = error_of(error)
                following = isinstance(typed, NotReady) and typed.details.get("state") == "following"
                if not following or time.monotonic() > deadline:
                    raise typed from error
            await asyncio.sleep(0.2)

    async def _want_at_coordinator(self, request: pb.WantDeployment) -> pb.Deployment:
        reply = await self._at_coordinator(
            lambda: self.want(request),
            lambda stub: stub.Want(request, timeout=WANT_S, metadata=self.peers.metadata),
        )
        if reply.HasField("error"):
            raise error_from_proto(reply.error)
        self.table.merge([reply.deployment])
        row: pb.Deployment = reply.deployment
        return row

    async def want(self, request: pb.WantDeployment) -> pb.WantReply:
        """As coordinator: take a wish, refused at once when the members cannot hold it."""
        try:
            if not 0 < len(request.model) <= 512:
                raise InvalidRequest("a model's name has 1 to 512 characters")
            settings = Settings.from_json(request.settings_json)
            if request.holder:
                known = self._holders.setdefault(request.manifest, [])
                if request.holder not in known:
                    known.insert(0, request.holder)
                    del known[HOLDER_LIMIT:]
            if (existing := self._satisfying(request.manifest, request.settings_json)) is not None:
                return pb.WantReply(deployment=existing)
            # A dry run first: what cannot fit is refused before anything of it is loaded or kept.
            await self.planner.plan(
                request.model,
                request.manifest,
                settings,
                Epoch(0, self._identity.id),
                self._holders_of(request.manifest),
            )
            if (existing := self._satisfying(request.manifest, request.settings_json)) is not None:
                return pb.WantReply(deployment=existing)  # another asked for it meanwhile
            key = deployment_id(request.manifest)
            row = pb.Deployment(
                id=key,
                model=request.model,
                manifest=request.manifest,
                wanted=True,
                settings_json=settings.to_json(),
                state="planning",
                superseded=_superseded(self.table.get(key)),
            )
            self._publish(row)
            self.coordinator.wish_changed(key)
            kept = self.table.get(key)
            assert kept is not None, "just written"
            await in_thread(self.table.flush)
            return pb.WantReply(deployment=kept)
        except P2PShardError as error:
            return pb.WantReply(error=error_to_proto(error))

    def _satisfying(self, manifest: str, settings_json: str) -> pb.Deployment | None:
        """The wanted deployment of a model if it is what is asked for."""
        row = self.table.get(deployment_id(manifest))
        if row is None or not row.wanted or not settings_satisfied(settings_json, row.settings_json):
            return None
        return row

    # -- nodes that step back
    async def _hand_over(self) -> None:
        """Have the coordinator give this node's layers to others. Raises why it cannot."""
        me = self._identity.id
        request = pb.HandOverRequest(node=me)

        async def there(stub: rpc.ClusterStub) -> None:
            reply = await stub.HandOver(request, timeout=HAND_OVER_S, metadata=self.peers.metadata)
            if reply.HasField("error"):
                raise error_from_proto(reply.error)

        await self._at_coordinator(lambda: self.coordinator.hand_over(me), there)

    async def pause(self, node: str, *, resume: bool) -> pb.PauseReply:
        """Have a member, by name or id (empty: this one), step back, or serve again. Raises `InvalidRequest` for a name that
        is none, and `NodeUnreachable`; that its layers stay is in the answer."""
        members = {info.id: info.name for info in self.members()}
        target = member_called(members, node, "node") if node else self._identity.id
        if target != self._identity.id:
            request = pb.PauseRequest(resume=resume)
            try:
                answer: pb.PauseReply = await self.peers.stub(target).Pause(
                    request, timeout=HAND_OVER_S, metadata=self.peers.metadata
                )
                return answer
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error
        reply = pb.PauseReply(node=target, name=members[target])
        try:
            await (self.duty.serve() if resume else self.duty.rest(pb.DUTY_PAUSED))
        except P2PShardError as error:
            reply.error.CopyFrom(error_to_proto(error))
        return reply

    async def undeploy(self, model: str) -> None:
        """No node wants the model any more; its workers end. Raises `ModelNotFound`."""
        if self.find(model) is None:
            raise ModelNotFound(f"{model} is not deployed; `p2pshard ps` and `status` list what is")
        request = pb.UndeployRequest(model=model)
        await self._at_coordinator(
            lambda: self.unwant(model),
            lambda stub: stub.Unwant(request, timeout=WANT_S, metadata=self.peers.metadata),
        )

    async def unwant(self, model: str) -> None:
        """As coordinator: a tombstone, which overtakes every older version of the row."""
        known = self.find(model)
        if known is None:
            raise ModelNotFound(f"{model[:200]} is not deployed")
        row = pb.Deployment()
        row.CopyFrom(known)
        row.wanted, row.state, row.reason = False, "removed", "undeployed"
        del row.endpoints[:]
        self._publish(row)
        self.coordinator.wish_changed(row.id)
        await self.member.remove(row.id, last_epoch(row))
        await in_thread(self.table.flush)


def _superseded(row: pb.Deployment | None) -> plan_pb2.Epoch | None:
    """The epoch that must not come back once something else is wanted: its stages may still be loaded somewhere."""
    if row is None:
        return None
    return last_epoch(row).to_proto()


def _refusal(row: pb.Deployment) -> P2PShardError:
    if row.HasField("error"):
        return error_from_proto(row.error)
    return NotReady(f"{row.model} is {row.state}: {row.reason}", state=row.state, reason=row.reason)
