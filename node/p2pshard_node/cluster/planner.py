"""Gives the pure planner what is known now: budgets of the members that answer, their links, the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from p2pshard.errors import DoesNotFit, NodeUnreachable, NotReady
from p2pshard.planning.growth import Growth, Pace
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.planner import grow_plan, plan_model, plan_reply
from p2pshard.planning.profiles import LinkProfile, NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import member_called
from p2pshard.transport.generated import control_pb2 as pb

from .fetch import Fetcher
from .peers import Peers
from .state import Deployments, deployment_id

__all__ = ["Patience", "Planner", "meant_now", "usable_now"]

MEASURE_S = 20.0
"""So long plans wait for a member that has not measured itself yet, counted from the first that did; later ones go on
without it."""
FIRST_S = 90.0
"""The same while no member has: a worker's first start imports and compiles for long on a slow machine."""


class Patience:
    """For how long something missing is waited for in all: a second wait for the same has only what is left of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[str, float] = {}
        """When each of what is missing was first missed; monotonic."""

    def left(self, missing: Collection[str], now: float) -> bool:
        """Whether any of it is still worth waiting for. What is not missing any more is forgotten."""
        self._since = {name: self._since.get(name, now) for name in missing}
        return any(now - since < self._seconds for since in self._since.values())


class Planner:
    """Reads the cluster's state; changes nothing."""

    def __init__(self, peers: Peers, table: Deployments, fetcher: Fetcher) -> None:
        self._peers, self._table, self._fetcher = peers, table, fetcher
        self._patience = Patience(MEASURE_S)

    async def for_row(self, row: pb.Deployment, epoch: Epoch) -> Plan:
        """A plan for a deployment as it is wanted. Raises `DoesNotFit`, `NodeUnreachable`, or what is wrong with the model."""
        settings = self._meant(row)
        before = Plan.from_proto(row.plan) if row.HasField("plan") and row.plan.replicas else None
        holders = sorted(self._peers.member_ids())
        return await self.plan(row.model, row.manifest, settings, epoch, holders, before=before)

    async def plan(
        self,
        name: str,
        manifest: str,
        settings: Settings,
        epoch: Epoch,
        holders: Sequence[str],
        *,
        before: Plan | None = None,
    ) -> Plan:
        """``before``: the plan that this one follows, whose stages stay where they are as far as that can be.

        Raises `DoesNotFit`, `InvalidRequest`, `NotReady`, or what is wrong with the model.
        """
        found = await self._fetcher.manifest(manifest, holders)
        while True:
            suspected = self._suspected()
            nodes, usable = await self._usable(deployment_id(manifest), settings)
            try:
                return await asyncio.to_thread(
                    plan_model, nodes, found, name, self.links(), usable, epoch, before=before
                )
            except DoesNotFit:
                if not await self._any_returned(suspected):
                    raise

    async def grown(self, row: pb.Deployment, before: Plan, streams: int, pace: Pace | None) -> Growth:
        """Whether members that the plan in force leaves idle are worth moving for. Raises as `plan`."""
        settings = self._meant(row)
        found = await self._fetcher.manifest(row.manifest, sorted(self._peers.member_ids()))
        nodes, usable = await self._usable(row.id, settings)
        return await asyncio.to_thread(grow_plan, before, nodes, found, self.links(), usable, streams, pace)

    async def dry_run(
        self, name: str, manifest: str, settings: Settings, epoch: Epoch, holders: Sequence[str]
    ) -> dict[str, Any]:
        """``{fits, plan, shortfall_bytes, suggestions, terms, message}``."""
        found = await self._fetcher.manifest(manifest, holders)
        while True:
            suspected = self._suspected()
            nodes, usable = await self._usable(deployment_id(manifest), settings)
            reply = await asyncio.to_thread(plan_reply, nodes, found, name, self.links(), usable, epoch)
            if reply["fits"] or not await self._any_returned(suspected):
                break
        if reply["plan"] is not None:
            reply["terms"] = _terms(Plan.from_json(reply["plan"]))
        return reply

    def _meant(self, row: pb.Deployment) -> Settings:
        """As `meant_now`, with the members that there are."""
        members = self._members()
        return meant_now(Settings.from_json(row.settings_json), {*members, *members.values()})

    def _suspected(self) -> set[str]:
        """Members that do not answer just now, and that no plan uses therefore."""
        return self._peers.member_ids() - self._peers.alive()

    async def _any_returned(self, suspected: Set[str]) -> bool:
        """Wait until it is known of all of them whether they are lost, which takes seconds; whether one is not."""
        while suspected & self._suspected():
            await asyncio.sleep(0.1)
        return bool(suspected & self._peers.alive())

    def _members(self) -> dict[str, str]:
        """Names of all members by id, whether they answer or not."""
        return {i.id: i.name for i in (self._peers.state.me, *(p.info for p in self._peers.state.members()))}

    async def _usable(self, deployment: str, settings: Settings) -> tuple[list[NodeBudget], Settings]:
        """Budgets, and the settings that are left to say of the nodes that have one."""
        members = self._members()
        without = {member_called(members, name, "exclude") for name in settings.exclude}
        for pin in settings.layers:
            if member_called(members, pin.node, "layers") in self._peers.resting():
                raise NotReady(
                    f"layers {pin.first}-{pin.last} are given to node {pin.node}, which is paused or leaving; "
                    f"`p2pshard resume {pin.node}`, or give them to another node",
                    state="planning",
                    reason=f"node {pin.node} is paused",
                )
        nodes = await self._measured(deployment, without)
        return nodes, usable_now(settings, self._members() | members, {n.node for n in nodes})

    async def _measured(self, deployment: str, without: Set[str]) -> list[NodeBudget]:
        """Budgets, once all members that answer have measured themselves (one that has just started still is at it),
        but for those that are to be left out."""
        started = time.monotonic()
        while True:
            nodes = self.nodes(deployment)
            missing = (self._peers.serving() - {n.node for n in nodes} | self._unlinked(nodes)) - without
            starts = {
                i.id: i.nonce for i in (self._peers.state.me, *(p.info for p in self._peers.state.members()))
            }
            if not self._peers.serving():
                raise DoesNotFit(
                    "every node is paused or leaving; resume one with `p2pshard resume NODE`, or add one",
                    shortfall_bytes=0,
                    terms=[],
                    suggestions=["p2pshard resume NODE"],
                )
            now = time.monotonic()
            if (not missing and nodes) or now - started > FIRST_S:
                break
            if not self._patience.left({f"{n} {starts.get(n)}" for n in missing}, now) and nodes:
                break
            await asyncio.sleep(0.1)
        if not nodes:
            raise NotReady(
                f"no member has measured its memory within {FIRST_S:.0f} s; its worker may not start "
                "(see the daemon's log). Try again shortly",
                state="planning",
                reason="no member has measured itself yet",
            )
        return nodes

    def _unlinked(self, nodes: Sequence[NodeBudget]) -> set[str]:
        """Members whose own row of links has not arrived here."""
        known = {n for link in self.links() for n in (link.a, link.b)}
        return set() if len(nodes) == 1 else {n.node for n in nodes if n.node not in known}

    def nodes(self, deployment: str) -> list[NodeBudget]:
        """Budgets for one deployment: what other deployments have booked is taken off, its own bookings are not."""
        booked: dict[tuple[str, str], int] = {}
        for row in self._table.all():
            if (
                row.id != deployment
                and row.wanted
                and row.state in ("loading", "ready")
                and row.HasField("plan")
            ):
                for stage in Plan.from_proto(row.plan).stages:
                    for rank in stage.ranks:
                        booked[rank.node, rank.device] = (
                            booked.get((rank.node, rank.device), 0) + rank.total_bytes
                        )
        serving = self._peers.serving()
        infos = [self._peers.state.me, *(p.info for p in self._peers.state.members())]
        return [
            NodeBudget(
                node=info.id,
                name=info.name,
                device=d.device,
                budget_bytes=max(0, d.budget_bytes - booked.get((info.id, d.device), 0)),
                base_bytes=d.base_bytes,
                free_bytes=d.free_bytes,
                bandwidth_gbps=d.bandwidth_gbps,
                gflops=d.matmul_gflops,
                dtypes=tuple(d.dtypes),
            )
            for info in infos
            if info.id in serving
            for d in info.devices[:1]  # the device that the node was told to use
        ]

    def links(self) -> list[LinkProfile]:
        """Pairs of members that both ends saw working just now."""
        usable = self._peers.links.usable(time.monotonic())
        found = []
        for (a, b), there in usable.items():
            if a < b:
                back = usable[b, a]
                measured = [x.bandwidth_mbps for x in (there, back) if x.bandwidth_mbps]
                found.append(LinkProfile(a, b, max(there.rtt_ms, back.rtt_ms), min(measured, default=0.0)))
        return found


def meant_now(settings: Settings, present: Collection[str]) -> Settings:
    """Settings that were valid when they were asked for, for the names and ids that are present now.

    An excluded node that has left needs no exclusion. One that layers are pinned to is waited for: raises
    `NodeUnreachable`.
    """
    for pin in settings.layers:
        if pin.node not in present:
            raise NodeUnreachable(
                f"layers {pin.first}-{pin.last} are pinned to node {pin.node}, which is no member now; "
                "start it again, or deploy with other --layers",
                tried=[pin.node],
            )
    return replace(settings, exclude=tuple(n for n in settings.exclude if n in present))


def usable_now(settings: Settings, members: Mapping[str, str], measured: Collection[str]) -> Settings:
    """Settings that name only nodes which the planner can use now.

    A member that is to be left out and has no budget (it has not measured itself, or does not answer just now) is left
    out as it is.

    Args:
        members: names of all members by id.
        measured: ids of those with a budget.

    Raises:
        InvalidRequest: no member, or several, are called what the settings name.
        NotReady: layers are given to a member without a budget.
    """
    for pin in settings.layers:
        if member_called(members, pin.node, "layers") not in measured:
            raise NotReady(
                f"layers {pin.first}-{pin.last} are given to node {pin.node}, which has not measured its memory yet, or "
                "does not answer just now; try again shortly, or give them to another node",
                state="planning",
                reason=f"node {pin.node} has no measure",
            )
    left = [n for n in settings.exclude if member_called(members, n, "exclude") in measured]
    return replace(settings, exclude=tuple(left))


def _terms(plan: Plan) -> list[dict[str, Any]]:
    """Rows of bytes per term and node."""
    return [
        {
            "node": rank.node,
            "layers": list(stage.layers),
            "weight_bytes": rank.weight_bytes,
            "kv_bytes": rank.kv_bytes,
            "workspace_bytes": rank.workspace_bytes,
            "base_bytes": rank.base_bytes,
            "budget_bytes": rank.budget_bytes,
        }
        for stage in plan.stages
        for rank in stage.ranks
    ]
