"""The proposer's half: while this node coordinates, it brings every wanted deployment into force and keeps it there.

An attempt asks all members for their epochs, then either sends a COMMIT again that somebody has already
accepted, or plans, prepares and commits anew. It ends ready (the driver has seen a token cross every stage),
refused, or broken; a broken one is tried again with growing, random pauses, and at once when members change.

What is ready moves when one of its nodes pauses or leaves, and when nodes that are idle would gain enough: the next
epoch is prepared beside the one in force, which serves until the commit. Where a member cannot hold both, nothing is
moved for a gain, and for a node that steps back the one in force ends first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from p2pshard.errors import (
    Conflict,
    DoesNotFit,
    Internal,
    InvalidRequest,
    ModelCorrupt,
    NodeUnreachable,
    NotReady,
    P2PShardError,
    StageLost,
    UnsupportedModel,
)
from p2pshard.planning.growth import Growth
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.channels import error_of
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.grpc_errors import error_from_proto, error_to_proto, fitted

from ..rounds import Rounds
from ..tasks import failure_of
from . import agreement
from .growing import Growing
from .member import Member, lost_stage
from .peers import Peers
from .proposal import Proposal
from .state import Deployments

__all__ = ["Coordinator"]

ASK_S = 2.0
COMMIT_S = 5.0
READY_S = 120.0
RETRY_FIRST_S = 0.3
RETRY_MOST_S = 20.0
LOOP_S = 0.5
BROKEN_PAUSE_S = 0.05
LOOK_S = 0.05
PREPARE_SILENCE_S = 240.0
MAX_FIRST_TRIES = 5
"""A deployment that never was ready is given up after so many; one that was is never given up."""
CANNOT_HOLD = "; the members that are left cannot hold it: "
FINAL = (InvalidRequest, UnsupportedModel, ModelCorrupt)
"""Errors that another attempt cannot mend."""

_log = logging.getLogger("p2pshard.coordinator")


Circumstances = tuple[Epoch, frozenset[str]]
"""The epoch in force and the nodes that could have a stage: what decides whether it can move."""


@dataclass(frozen=True)
class Stay:
    """Why a deployment stays where it is, although a node of it pauses or leaves."""

    under: Circumstances
    error: P2PShardError


@dataclass
class Attempt:
    """What is under way for one deployment."""

    task: asyncio.Task[None] | None = None
    epoch: Epoch = agreement.ZERO
    ready: asyncio.Future[pb.StageEvent] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    lost: P2PShardError | None = None
    """Why a stage is gone, even if all had been ready before."""
    cancelled: bool = False
    """What it was for is not wanted any more, or another node's to bring about."""
    moving: bool = False
    """The epoch in force serves meanwhile."""
    growing: bool = False
    """It moves only for a gain."""
    closing: bool = False
    """It takes back what it prepared, which nothing interrupts."""

    def cancel(self) -> None:
        """End it, with nothing left prepared anywhere. As often as asked."""
        self.cancelled = True
        if self.task is not None and not self.closing:
            self.task.cancel()

    def fail(self, error: P2PShardError) -> None:
        """A stage of this attempt is gone."""
        self.lost = self.lost or error
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen: an attempt that has not come so far fails by itself


class Coordinator:
    """Acts only while ``leading()``. ``make_plan(row, epoch)`` raises `DoesNotFit`; ``publish(row)`` writes and spreads a row;
    ``grow(row, plan, streams)`` says whether idle nodes are worth moving for while so many requests run, ``streams(deployment)``.
    """

    def __init__(
        self,
        peers: Peers,
        table: Deployments,
        member: Member,
        leading: Callable[[], bool],
        make_plan: Callable[[pb.Deployment, Epoch], Awaitable[Plan]],
        holders: Callable[[str], list[str]],
        publish: Callable[[pb.Deployment], None],
        grow: Callable[[pb.Deployment, Plan, int], Awaitable[Growth]],
        streams: Callable[[str], int],
    ) -> None:
        self._peers, self._table, self._member, self._leading = peers, table, member, leading
        self._make_plan, self._holders, self._publish = make_plan, holders, publish
        self._grow, self._growing = grow, Growing(streams)
        self._attempts: dict[str, Attempt] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """By deployment: attempts failed in a row, and when the next is due."""
        self._spoilt: dict[str, Epoch] = {}
        """Epochs that are known not to work any more."""
        self._served: set[str] = set()
        """Deployments that have been ready: they are never given up."""
        self._stays: dict[str, Stay] = {}
        """By deployment: why it cannot move, as things are."""
        self._planning = asyncio.Lock()
        """One plan at a time: each counts what the one before has booked."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._led = False
        self._verifying: asyncio.Task[None] | None = None

    # -- life
    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="coordinator")

    async def stop(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel()
        loops = [t for t in (self._task, self._verifying) if t is not None]
        for task in loops:
            task.cancel()
        attempts = [a.task for a in self._attempts.values() if a.task is not None]
        await asyncio.gather(*loops, *attempts, return_exceptions=True)

    def wake(self) -> None:
        """Something has changed: look now."""
        self._wake.set()

    async def _run(self) -> None:
        rounds = Rounds("coordinator", _log)
        while True:
            with rounds.one():
                self._look()
            try:
                async with asyncio.timeout(LOOP_S):  # wait_for of Python 3.11 can lose a cancellation
                    await self._wake.wait()
            except TimeoutError:
                continue  # nothing happened; look anyway
            self._wake.clear()

    def _look(self) -> None:
        for row in self._table.all():  # also while another node coordinates: this one may have to succeed it
            if not row.wanted:
                self._served.discard(row.id)
            elif row.state == "ready" or (row.state == "broken" and row.writer != self._peers.id):
                self._served.add(row.id)  # a predecessor gave up on nothing that it left broken
        if not self._leading():
            self._led = False
            for attempt in self._attempts.values():
                attempt.cancel()
            return
        if not self._led:
            self._led = True
            self._verifying = asyncio.create_task(self._verify(), name="verify what is ready")
            self._verifying.add_done_callback(self._verified)
        self._growing.see(self._peers.member_ids())
        now = time.monotonic()
        for row in self._table.all():
            if not row.wanted:
                self._failures.pop(row.id, None)
                self._growing.forget(row.id)
                self._stays.pop(row.id, None)
                self._cancel(row.id)
            elif (
                row.id not in self._attempts
                and row.state != "ready"
                and now >= self._failures.get(row.id, (0, 0.0))[1]
            ):
                self._try(row, Attempt())
            elif row.state == "ready" and row.HasField("plan"):
                plan = Plan.from_proto(row.plan)
                for node in plan.nodes:
                    if self._serves_no_more(plan, node):
                        member = node in self._peers.member_ids()
                        self.lost(node, "it answers nobody" if member else "it is no member now")
                        break
                else:
                    if row.id in self._attempts:
                        continue
                    if self._is_to_move(row.id, plan):
                        self._try(row, Attempt(moving=True))
                    elif self._growing.due(row.id, plan, self._peers.serving()):
                        self._try(row, Attempt(moving=True, growing=True))

    def _try(self, row: pb.Deployment, attempt: Attempt) -> None:
        self._attempts[row.id] = attempt
        attempt.task = asyncio.create_task(self._attempt(row.id, attempt), name=f"deploy {row.model}")
        attempt.task.add_done_callback(lambda t: self._ended(row.id, attempt, t))

    # -- moving
    def _circumstances(self, plan: Plan) -> Circumstances:
        return plan.epoch, frozenset(self._peers.serving())

    def _is_to_move(self, deployment: str, plan: Plan) -> bool:
        """Whether a node of what is ready pauses or leaves, and nothing is known to be in the way."""
        if not self._peers.resting() & set(plan.nodes):
            return False
        stay = self._stays.get(deployment)
        return stay is None or stay.under != self._circumstances(plan)

    async def hand_over(self, node: str) -> None:
        """Return once nothing that is served has a stage on a node that pauses or leaves. Raises why that cannot be, and
        `NotReady` where another node coordinates."""
        while True:
            if not self._leading():
                raise NotReady("this node does not coordinate", state="following")
            held = False
            for row in self._table.all():
                if not row.wanted or not row.HasField("plan"):
                    continue
                plan = Plan.from_proto(row.plan)
                if node not in plan.nodes:
                    continue
                held = True
                stay = self._stays.get(row.id)
                if row.state == "ready" and stay is not None and stay.under == self._circumstances(plan):
                    raise stay.error
            if not held and node in self._peers.resting():
                return
            await asyncio.sleep(LOOK_S)

    def _stayed(self, row: pb.Deployment, attempt: Attempt, error: P2PShardError) -> None:
        """A move was not prepared; the epoch before it serves on."""
        now = self._table.get(row.id)
        if now is None or not now.wanted or now.state != "ready":
            return
        plan = Plan.from_proto(now.plan)
        if attempt.growing:
            _log.warning("model=%s does not spread to more nodes: %s", now.model, error.message)
            self._growing.rest(row.id)
            why = f"the layers were to be shared with it, and could not be handed over: {error.message}"
            self._tell_idle(now, dict.fromkeys(self._peers.serving() - set(plan.nodes), why))
            return
        if attempt.epoch != agreement.ZERO and isinstance(error, (DoesNotFit, Conflict)):
            # There is a plan, and no room for it beside the one in force.
            _log.info("model=%s ends before it moves: %s", now.model, error.message)
            names = ", ".join(self._name(n) for n in plan.nodes if n in self._peers.resting())
            self._broken(now, NotReady(f"its layers on {names} are handed over"), plan.epoch)
            return
        _log.warning("model=%s stays where it is: %s", now.model, error.message)
        self._stays[row.id] = Stay(self._circumstances(plan), error)

    async def _verify(self) -> None:
        """See for what is said to be ready whether its stages still are: what became of them may have been told to
        a predecessor that could no longer act on it."""
        for row in self._table.all():
            if not row.wanted or row.state != "ready" or not row.HasField("plan"):
                continue
            plan = Plan.from_proto(row.plan)
            reports, _ = await self._ask(row.id)
            now = self._table.get(row.id)
            if now is None or now.version != row.version or not self._leading():
                continue
            for index, stage in enumerate(plan.stages):
                report = reports.get(stage.node)
                if report is not None and not (report.serving is not None and report.active == plan.epoch):
                    error = lost_stage(self._name(stage.node), stage.node, stage, "its worker is gone")
                    _log.warning("stage %d of model=%s is not served", index, row.model)
                    self._broken(row, error, plan.epoch)
                    break

    def _verified(self, task: asyncio.Task[None]) -> None:
        failure_of(task, _log, "what is ready was not verified")

    def _cancel(self, deployment: str) -> None:
        attempt = self._attempts.get(deployment)
        if attempt is not None:
            attempt.cancel()

    def _ended(self, deployment: str, attempt: Attempt, task: asyncio.Task[None]) -> None:
        if self._attempts.get(deployment) is attempt:
            del self._attempts[deployment]
        if (error := failure_of(task, _log, "an attempt failed unexpectedly")) is not None:
            self._fail(deployment, Internal(repr(error)))
        self.wake()

    def wish_changed(self, deployment: str) -> None:
        """What is wanted of a deployment is another thing now, as its row says: end what is under way for the old."""
        self._cancel(deployment)
        self._failures.pop(deployment, None)
        self.wake()

    # -- what happens meanwhile
    def reported(self, event: pb.StageEvent) -> None:
        """A member tells what became of its stage, or of a neighbour's. Raises `NotReady` where another node
        coordinates: it has to be told."""
        if not self._leading():
            raise NotReady("this node does not coordinate", state="following")
        row = self._table.get(event.deployment)
        if row is None:
            return
        epoch = Epoch.from_proto(event.epoch)
        attempt = self._attempts.get(event.deployment)
        if attempt is not None and attempt.epoch == epoch:
            if event.kind == "ready":
                if not attempt.ready.done():
                    attempt.ready.set_result(event)
            elif event.kind == "not_ready":
                # The driver keeps trying; people see what it waits for.
                self._set(event.deployment, "loading", error_from_proto(event.error).message)
            elif event.kind == "lost":
                attempt.fail(error_from_proto(event.error))
            return
        current = Epoch.from_proto(row.plan.epoch)
        if row.wanted and row.state == "ready" and epoch == current and event.kind in ("lost", "not_ready"):
            self._broken(row, error_from_proto(event.error), epoch)

    def _gone(self, node: str) -> bool:
        """Whether nobody here reaches a node. One that another member reaches may serve on: if not, the stages
        beside its own say so."""
        if node in self._peers.member_ids():
            return self._peers.refuses(node)
        return not self._peers.known_elsewhere(node)

    def _serves_no_more(self, plan: Plan, node: str) -> bool:
        """Whether a node's stage is to be given to another. What hangs of the stages beside the first one the driver sees,
        which knows how long a step takes."""
        return self._gone(node) or (node == plan.stages[0].node and self._peers.silent(node))

    def lost(self, node: str, why: str) -> None:
        """A node is no member any more."""
        for row in self._table.all():
            if not row.wanted or not row.HasField("plan") or row.state not in ("ready", "loading"):
                continue
            plan = Plan.from_proto(row.plan)
            for stage in plan.stages:
                if stage.node != node:
                    continue
                peer = self._peers.state.peers.get(node)
                error = lost_stage(peer.info.name if peer else node, node, stage, why)
                attempt = self._attempts.get(row.id)
                if attempt is not None and not attempt.moving:
                    if attempt.epoch == plan.epoch:
                        attempt.fail(error)
                elif self._leading() and row.state == "ready" and self._serves_no_more(plan, node):
                    self._broken(row, error, plan.epoch)

    def members_changed(self) -> None:
        """Somebody joined or left: what failed may work now."""
        for deployment, (count, _) in list(self._failures.items()):
            self._failures[deployment] = (min(count, 2), time.monotonic() + random.uniform(0.1, 0.5))
        self.wake()

    def _broken(self, row: pb.Deployment, error: P2PShardError, epoch: Epoch) -> None:
        self._served.add(row.id)  # it was ready, perhaps for less time than this node looks at
        attempt = self._attempts.get(row.id)
        if attempt is not None and attempt.moving:
            attempt.cancel()
        self._spoilt[row.id] = max(epoch, self._spoilt.get(row.id, agreement.ZERO))
        # A moment's pause: what breaks one stage is often seen by its neighbours first.
        self._failures[row.id] = (1, time.monotonic() + BROKEN_PAUSE_S)
        asyncio.get_running_loop().call_later(BROKEN_PAUSE_S, self.wake)
        self._set(row.id, "broken", error.message)
        self.wake()

    def _set(self, deployment: str, state: str, reason: str = "", **changes: Any) -> None:
        known = self._table.get(deployment)
        if known is None:
            return
        row = pb.Deployment()
        row.CopyFrom(known)
        row.state, row.reason = state, reason
        if "plan" in changes:
            if changes["plan"].epoch != Epoch.from_proto(known.plan.epoch):
                row.ClearField("idle")
            row.plan.CopyFrom(changes["plan"].to_proto())
        if "endpoints" in changes:
            del row.endpoints[:]
            row.endpoints.extend(changes["endpoints"])
        if "wanted" in changes:
            row.wanted = changes["wanted"]
        row.ClearField("error")
        if "error" in changes:
            row.error.CopyFrom(error_to_proto(fitted(changes["error"])))
        _log.info(
            "deployment model=%s state=%s epoch=%s reason=%s",
            row.model,
            state,
            row.plan.epoch.n,
            reason or "-",
        )
        self._publish(row)

    # -- one attempt
    async def _attempt(self, deployment: str, attempt: Attempt) -> None:
        row = self._table.get(deployment)
        assert row is not None, "attempts are of rows in the table"
        proposal: Proposal | None = None
        try:
            grown = await self._grown(row) if attempt.growing else None
            if attempt.growing and grown is None:
                return
            if row.state == "broken" and row.HasField("plan"):
                # Who is lost is known to nobody yet, perhaps: it has no place in the next plan.
                await self._peers.confirm(Plan.from_proto(row.plan).nodes)
            reports, found = await self._ask(deployment)
            spoilt = max(Epoch.from_proto(row.superseded), self._spoilt.get(deployment, agreement.ZERO))
            choice = agreement.decide(reports, spoilt=spoilt)
            if attempt.moving:
                choice = agreement.Propose(agreement.next_number(reports, spoilt))
            if isinstance(choice, agreement.Resend):
                _log.info("sending the commit of epoch %s again model=%s", choice.plan.epoch.n, row.model)
                proposal = Proposal.resend(choice.plan)
                attempt.epoch = choice.plan.epoch
                endpoints = {n: e for n, e in found if Epoch.from_proto(e.epoch) == attempt.epoch}
            else:
                if not attempt.moving and row.state not in ("planning", "broken"):
                    self._set(deployment, "planning")
                async with self._planning:
                    epoch = Epoch(choice.n, self._peers.id)
                    plan = (
                        replace(grown, epoch=epoch)
                        if grown is not None
                        else await self._make_plan(self._to_plan(row), epoch)
                    )
                    proposal = Proposal(plan)
                    attempt.epoch = plan.epoch
                    if not attempt.moving:
                        self._set(deployment, "loading", plan=plan, endpoints=[])
                endpoints = await self._prepare(row, proposal, attempt)
                attempt.moving = False  # what comes now ends the epoch in force
            ordered = sorted(endpoints.values(), key=lambda e: e.stage)
            measured = proposal.plan.measured((e.numerics, e.fingerprint) for e in ordered)
            self._set(deployment, "loading", "connecting the stages", plan=measured, endpoints=ordered)
            await self._commit(deployment, proposal, ordered)
            try:
                async with asyncio.timeout(READY_S):
                    await attempt.ready
            except TimeoutError:
                raise NotReady(
                    f"no token crossed all stages within {READY_S:.0f} s",
                    state="loading",
                    reason="first token",
                ) from None
            if attempt.lost is not None:
                raise attempt.lost
            self._failures.pop(deployment, None)
            self._served.add(deployment)
            self._set(deployment, "ready", plan=measured, endpoints=ordered)
            if attempt.growing:
                self._growing.rest(deployment)
        except P2PShardError as error:
            if proposal is not None and not isinstance(error, Conflict) and not attempt.moving:
                self._spoilt[deployment] = max(
                    proposal.plan.epoch, self._spoilt.get(deployment, agreement.ZERO)
                )
            attempt.closing = True
            await self._abort(deployment, proposal)
            if attempt.cancelled:  # the failure is of something that nobody waits for
                return
            if attempt.moving:
                self._stayed(row, attempt, error)
            else:
                self._fail(deployment, error)
        except asyncio.CancelledError:
            attempt.closing = True
            await self._abort(deployment, proposal)
            raise

    async def _grown(self, row: pb.Deployment) -> Plan | None:
        """The plan that has idle nodes which are worth moving for; where there is none, they are told why."""
        plan, serving = Plan.from_proto(row.plan), self._peers.serving()
        load = self._growing.load(row.id)
        growth = await self._grow(row, plan, load)
        news = self._growing.judged(row.id, plan, serving, load)
        now = self._table.get(row.id)
        if growth.plan is not None:
            nodes = len(growth.plan.nodes)
            _log.info("model=%s is to spread over %d nodes: %s", row.model, nodes, growth.why)
        elif news and now is not None and now.version == row.version:
            self._tell_idle(now, growth.idle)
        return growth.plan

    def _tell_idle(self, row: pb.Deployment, idle: Mapping[str, str]) -> None:
        if dict(row.idle) != idle:
            told = pb.Deployment()
            told.CopyFrom(row)
            told.ClearField("idle")
            told.idle.update(idle)
            self._publish(told)

    def _to_plan(self, row: pb.Deployment) -> pb.Deployment:
        """The row for the planner, which keeps to the plan it names as far as it can: not after that has failed twice."""
        if self._failures.get(row.id, (0, 0.0))[0] < 3:
            return row
        anew = pb.Deployment()
        anew.CopyFrom(row)
        anew.ClearField("plan")
        return anew

    def _fail(self, deployment: str, error: P2PShardError) -> None:
        """Record that an attempt failed, and when to try again, if at all."""
        count = self._failures.get(deployment, (0, 0.0))[0] + 1
        pause = min(RETRY_MOST_S, RETRY_FIRST_S * 2**count) * random.uniform(0.5, 1.0)
        self._failures[deployment] = (count, time.monotonic() + pause)
        row = self._table.get(deployment)
        if row is None or not row.wanted:
            return
        served = deployment in self._served
        final = (
            isinstance(error, FINAL)
            or (isinstance(error, DoesNotFit) and count >= 2)
            or count >= MAX_FIRST_TRIES
        )
        if final and not served:
            self._set(deployment, "refused", error.message, wanted=False, error=error)
            return
        reason = error.message
        if isinstance(error, DoesNotFit) and row.state == "broken" and row.reason:
            cause = row.reason.split(CANNOT_HOLD)[0]
            reason = f"{cause}{CANNOT_HOLD}{error.message}"
        if row.state != "broken" or row.reason != reason:
            self._set(deployment, "broken", reason, error=error)

    async def _ask(
        self, deployment: str
    ) -> tuple[dict[str, agreement.Report], list[tuple[str, pb.StageEndpoint]]]:
        """Epochs of all members that answer, and the endpoints they have, with their node."""
        query = pb.EpochQuery(deployment=deployment)

        async def one(node: str) -> tuple[str, pb.EpochReport | None]:
            if node == self._peers.id:
                return node, await self._member.epochs(deployment)
            try:
                stub = self._peers.stub(node)
                return node, await stub.Epochs(query, timeout=ASK_S, metadata=self._peers.metadata)
            except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                _log.warning("node %s does not tell its epochs: %s", node, error)
                return node, None

        reports: dict[str, agreement.Report] = {}
        endpoints: list[tuple[str, pb.StageEndpoint]] = []
        for node, message in await asyncio.gather(*(one(n) for n in self._peers.alive())):
            if message is None:
                continue
            try:
                reports[node] = agreement.report_from_proto(message)
            except P2PShardError as error:
                _log.warning("what node %s tells of its epochs is not well formed: %s", node, error)
            else:
                endpoints += ((node, e) for e in message.endpoints if e.node == node)
        return reports, endpoints

    async def _prepare(
        self, row: pb.Deployment, proposal: Proposal, attempt: Attempt
    ) -> dict[str, pb.StageEndpoint]:
        """All members load at once; the first refusal ends it."""
        plan = proposal.plan
        request = pb.PrepareRequest(
            deployment=row.id,
            epoch=plan.epoch.to_proto(),
            digest=plan.digest(),
            plan=plan.to_proto(),
            lease_s=agreement.LEASE_S,
            manifest_holders=self._holders(row.id),
            beside=attempt.moving,
            before=row.plan if attempt.moving else None,
            before_endpoints=row.endpoints if attempt.moving else (),
        )
        endpoints: dict[str, pb.StageEndpoint] = {}

        async def one(node: str) -> None:
            async for message in self._prepare_one(node, request):
                kind = message.WhichOneof("event")
                if kind == "refused":
                    raise _at(self._name(node), error_from_proto(message.refused))
                if kind == "prepared":
                    endpoints[node] = message.prepared
                    proposal.on_prepared(node)
                    return
            raise NodeUnreachable(f"node {self._name(node)} ended its answer early", tried=[node])

        await self._all({n: one(n) for n in proposal.outbox()}, proposal, attempt.ready)
        return endpoints

    async def _prepare_one(self, node: str, request: pb.PrepareRequest) -> Any:
        """The member's progress messages, from the wire or from this process. Raises our errors only."""
        if node == self._peers.id:
            async for message in self._member.prepare(request):
                yield message
            return
        try:
            call = self._peers.stub(node).Prepare(request, metadata=self._peers.metadata)
            try:
                while True:
                    async with asyncio.timeout(PREPARE_SILENCE_S):
                        message = await call.read()
                    if message is grpc.aio.EOF:
                        return
                    yield message
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            raise _at(self._name(node), error_of(error)) from error
        except TimeoutError:
            raise NotReady(
                f"node {self._name(node)} reported nothing for {PREPARE_SILENCE_S:.0f} s",
                state="loading",
                reason="stuck",
            ) from None

    async def _commit(self, deployment: str, proposal: Proposal, endpoints: list[pb.StageEndpoint]) -> None:
        request = pb.CommitRequest(
            deployment=deployment,
            epoch=proposal.plan.epoch.to_proto(),
            digest=proposal.plan.digest(),
            endpoints=endpoints,
        )

        async def one(node: str) -> None:
            if node == self._peers.id:
                reply = await self._member.commit(request)
            else:
                try:
                    reply = await self._peers.stub(node).Commit(
                        request, timeout=COMMIT_S, metadata=self._peers.metadata
                    )
                except grpc.aio.AioRpcError as error:
                    raise _at(self._name(node), error_of(error)) from error
            if not reply.accepted:
                raise _at(self._name(node), error_from_proto(reply.error))
            proposal.on_committed(node)

        await self._all({n: one(n) for n in proposal.outbox()}, proposal, None)

    async def _all(
        self, work: Mapping[str, Any], proposal: Proposal, ready: asyncio.Future[pb.StageEvent] | None
    ) -> None:
        """Run all; at the first failure (or when the attempt has already failed elsewhere) end the rest and raise it."""
        tasks = {asyncio.create_task(w): node for node, w in work.items()}
        waiting: set[asyncio.Future[Any]] = set(tasks)
        watch: set[asyncio.Future[Any]] = {ready} if ready is not None else set()
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting | watch, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    error = (
                        NotReady("the call was cancelled", state="loading")
                        if future.cancelled()
                        else future.exception()
                    )
                    if error is not None:
                        node = tasks.get(future, "")  # type: ignore[call-overload]
                        ours = error if isinstance(error, P2PShardError) else Internal(repr(error))
                        proposal.on_refused(node, ours)
                        raise ours
                waiting -= done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _abort(self, deployment: str, proposal: Proposal | None) -> None:
        """Tell every member of a failed proposal to drop what it prepared; leases do it where this does not arrive."""
        if proposal is None:
            return
        request = pb.AbortRequest(deployment=deployment, epoch=proposal.plan.epoch.to_proto())

        async def one(node: str) -> None:
            if node == self._peers.id:
                await self._member.abort(request)
                return
            try:
                await self._peers.stub(node).Abort(request, timeout=ASK_S, metadata=self._peers.metadata)
            except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                _log.debug("abort not delivered to %s: %s", node, error)

        await asyncio.gather(*(one(n) for n in proposal.plan.nodes if n not in proposal.committed))

    def _name(self, node: str) -> str:
        if node == self._peers.id:
            return self._peers.state.me.name
        peer = self._peers.state.peers.get(node)
        return peer.info.name if peer else node


def _at(name: str, error: P2PShardError) -> P2PShardError:
    """The same error, with the node's name in front of its message."""
    if isinstance(error, StageLost) or name in error.message:
        return error
    error.message = f"node {name}: {error.message}"
    error.args = (error.message,)
    return error
