"""The streams to the drivers of all deployments: one for each epoch, opened by whoever needs it first.

A request that loses its driver asks here for the next one: that of another epoch, once one is ready, or the same one
again when only the stream to it was cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from p2pshard.credentials import Credentials
from p2pshard.errors import (
    Conflict,
    ModelNotFound,
    NodeUnreachable,
    NotReady,
    P2PShardError,
    StageLost,
)
from p2pshard.planning.plan import Plan
from p2pshard.transport.channels import make_channel
from p2pshard.transport.generated import control_pb2, generate_pb2
from p2pshard.transport.grpc_errors import error_from_proto

from .driver_link import DriverLink
from .view import DeploymentView

__all__ = ["PASSING", "Drivers", "Joined"]

PASSING = (StageLost, NotReady, NodeUnreachable, Conflict)
"""What ends a stream to a driver, or keeps one from being opened, and may be over with the next epoch."""
_LOOK_S = 0.03
_SAME_AGAIN_S = 1.0
"""After the loss of a driver whose epoch is still said to be ready: the driver mostly knows of its loss before the cluster
does; if not, only the stream was cut."""


@dataclass(frozen=True)
class Joined:
    """A deployment as it was when its driver took the stream."""

    deployment: control_pb2.Deployment
    plan: Plan
    link: DriverLink


class Drivers:
    """`on_news` and `on_lost` as in `DriverLink`."""

    def __init__(
        self,
        node_id: str,
        view: DeploymentView,
        credentials: Credentials | None,
        *,
        queue: int,
        on_news: Callable[[DriverLink, generate_pb2.News], None],
        on_lost: Callable[[DriverLink, P2PShardError], None],
    ) -> None:
        self._node_id, self._view, self._credentials, self._queue = node_id, view, credentials, queue
        self._on_news, self._on_lost = on_news, on_lost
        self._links: dict[tuple[str, int, str], asyncio.Task[DriverLink]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._links)

    # -- deployments ----------------------------------------------------------------------------
    async def ready(self, model: str, *, load_s: float, mend_s: float) -> control_pb2.Deployment:
        """The deployment of a model once it is ready, waiting so long for one that loads, and for one that is broken.

        Raises `ModelNotFound` and `NotReady`.
        """
        deployment = self._view.find(model)
        if deployment is None:
            raise self._not_deployed(model)
        if deployment.state in ("refused", "removed"):
            raise NotReady(
                f"{model} is {deployment.state}: {deployment.reason}; type: p2pshard deploy {model}",
                state=deployment.state,
                reason=deployment.reason,
            )
        if deployment.state == "broken":
            try:
                return await self._view.wait_ready(deployment.id, mend_s)
            except NotReady as error:
                # Being mended: then it is as any other that loads.
                if error.details.get("state") not in ("planning", "loading"):
                    raise
        if deployment.state != "ready":
            deployment = await self._view.wait_ready(deployment.id, load_s)
        return deployment

    def _not_deployed(self, model: str) -> P2PShardError:
        known = self._view.deployments()
        refused = next((d for d in known if d.model == model and d.state == "refused"), None)
        if refused is not None:
            return NotReady(
                f"{model} was refused: {refused.reason}", state=refused.state, reason=refused.reason
            )
        others = ", ".join(sorted(d.model for d in known if d.state != "refused")) or "none"
        return ModelNotFound(
            f"model {model!r} is not deployed (deployed: {others}); if a node has it: p2pshard deploy {model}",
            model=model,
        )

    async def join(self, deployment: control_pb2.Deployment) -> Joined:
        """The stream to the driver of this epoch. Raises one of `PASSING`, or what else is wrong with it."""
        plan = Plan.from_proto(deployment.plan)
        key = (deployment.id, plan.epoch.n, plan.epoch.proposer)
        task = self._links.get(key)
        if task is None or (task.done() and not _alive(task)):
            task = self._links[key] = asyncio.create_task(self._open(deployment, plan))
        link = await asyncio.shield(task)
        if link.lost is not None:
            raise link.lost
        return Joined(deployment, plan, link)

    async def rejoin(
        self, lost: control_pb2.Deployment, trouble: Callable[[P2PShardError], None], until: float
    ) -> Joined:
        """The stream to the driver that follows the one of `lost`, or to that one again if its epoch goes on.

        ``trouble(error)`` hears why it takes so long. Raises `TimeoutError` at ``until`` (the loop's time) and `NotReady`
        when the deployment is not wanted any more.
        """
        async with asyncio.timeout_at(until):
            since = time.monotonic()
            while True:
                now = await self._usable(lost, since)
                try:
                    return await self.join(now)
                except PASSING as error:
                    trouble(error)
                lost, since = now, time.monotonic()
                await asyncio.sleep(_LOOK_S)

    async def _usable(self, lost: control_pb2.Deployment, since: float) -> control_pb2.Deployment:
        """The deployment once an epoch is ready that is not that of `lost`, which ended at `since`, or is again."""
        while True:
            now = self._view.find(lost.id)
            if now is None or now.state in ("refused", "removed"):
                said = f"{now.state}: {now.reason}" if now is not None else "not deployed any more"
                raise NotReady(f"{lost.model} is {said}", state=now.state if now is not None else "removed")
            if now.state == "ready":
                other = now.plan.epoch != lost.plan.epoch
                if other or time.monotonic() - since > _SAME_AGAIN_S:
                    return now
            await asyncio.sleep(_LOOK_S)

    def standing(self, deployment: str) -> tuple[str, dict[str, Any]]:
        """What the cluster says of a deployment that is not ready: the reason, and numbers of what is missing; both empty
        when there is nothing to say."""
        now = self._view.find(deployment)
        if now is None or now.state == "ready":
            return "", {}
        details = error_from_proto(now.error).details if now.HasField("error") else {}
        return now.reason, {k: details[k] for k in ("shortfall_bytes", "suggestions") if k in details}

    # -- streams --------------------------------------------------------------------------------
    async def _open(self, deployment: control_pb2.Deployment, plan: Plan) -> DriverLink:
        target = self._view.driver_target(deployment)
        link = DriverLink(
            plan,
            deployment.id,
            target,
            make_channel(target, self._credentials, own_connection=True),
            queue=self._queue,
            on_news=self._on_news,
            on_lost=self._lost,
        )
        await link.open(self._node_id)
        return link

    def _lost(self, link: DriverLink, error: P2PShardError) -> None:
        for key, task in list(self._links.items()):
            if _succeeded(task) and task.result() is link:
                del self._links[key]
        self._on_lost(link, error)
        self._close_soon(link)

    def _close_soon(self, link: DriverLink) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def check(self, used: Callable[[DriverLink], bool]) -> None:
        """Lose streams whose node has left the cluster (TCP may not know it yet); close past ones that nobody uses."""
        members = {node.id for node in self._view.members()}
        rows = {d.id: d for d in self._view.deployments()}
        current = {(d.id, d.plan.epoch.n, d.plan.epoch.proposer) for d in rows.values()}
        for key, task in list(self._links.items()):
            if not _succeeded(task):
                if task.done():
                    del self._links[key]
                continue
            link = task.result()
            if link.plan.stages[0].node not in members:
                link.lose(link.stage_lost("has left the cluster"))
            elif key not in current and not used(link):
                del self._links[key]
                self._close_soon(link)
            elif key not in current and key[0] in rows and rows[key[0]].state == "ready":
                # Its driver may be stopped and not know it: whoever waits for it goes to the one that serves.
                link.lose(link.stage_lost(f"was replaced by epoch {rows[key[0]].plan.epoch.n}"))

    async def close(self) -> None:
        """Close every stream: a driver cancels what it runs for a gateway that is gone."""
        links = [t.result() for t in self._links.values() if _succeeded(t)]
        tasks = list(self._links.values())
        self._links.clear()
        for task in tasks:
            task.cancel()
        closes: list[Awaitable[None]] = [link.close() for link in links]
        await asyncio.gather(*tasks, *closes, *self._closing, return_exceptions=True)


def _succeeded(task: asyncio.Task[DriverLink]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _alive(task: asyncio.Task[DriverLink]) -> bool:
    return _succeeded(task) and task.result().lost is None
