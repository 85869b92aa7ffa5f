"""What a node does ahead, so that it can take over a stage whose node is lost: at rest, and with what nobody else needs.

Kernels are compiled for what is served, a model file that lies here under the same name is hashed, and tensors that only
one member has on its disk are fetched by one other, slowly, so that no member's end is the end of a model.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from p2pshard.errors import P2PShardError
from p2pshard.models.groups import grouped_as, has_groups
from p2pshard.models.layout import layer_of, needed_tensors
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.generated import control_pb2 as pb

from ..supervisor import Supervisor
from ..tasks import failure_of
from ..threads import in_thread
from .fetch import Fetcher
from .peers import Peers

__all__ = ["Standby", "copier", "layouts_of"]

SETTLED_S = 1.0
"""So long a deployment has been ready before anything is done ahead for it."""
COPY_S = 20.0
"""The same for copies, which take some of the network; and between two looks at who holds what."""
REST_S = 600.0
"""After a copy that failed: its disk may be full, or the tensor cache."""
DUTY = 0.25
"""Most of the time that copies take of the network."""

_log = logging.getLogger("p2pshard.standby")


def copier(sha256: str, members: Iterable[str], holders: Sequence[str], busy: frozenset[str]) -> str | None:
    """Which member is to keep a second copy of a tensor; None: it has two, or there is nobody to.

    Every member comes to the same answer by itself. Members that hold no stage come first: they are the ones that would
    take over, and have the memory and the time.
    """
    others = set(members) - set(holders)
    if len(holders) != 1 or not others:
        return None
    return min(others, key=lambda n: (n in busy, hashlib.sha256(f"{n} {sha256}".encode()).digest()))


def layouts_of(manifest: Manifest, dtype: str) -> list[str]:
    """Names of the layouts of grouped weights that a model needs kernels for."""
    if dtype != "int4":
        return []
    grouped = has_groups(manifest)
    found = set()
    for tensor in manifest.tensors:
        if len(tensor.shape) == 2:
            outer = layer_of(tensor.name, manifest.format) in ("embedding", "head")
            layout = grouped_as(tensor.dtype, tensor.shape[-1], outer=outer, grouped_file=grouped)
            found |= {layout.name} if layout is not None else set()
    return sorted(found)


class Standby:
    """One per node. ``look`` is told of every wanted row again and again."""

    def __init__(
        self,
        peers: Peers,
        store: Any,
        fetcher: Fetcher,
        supervisor: Supervisor,
        holders: Callable[[str], list[str]],
        *,
        copies: bool = True,
    ) -> None:
        self._peers, self._store, self._fetcher, self._supervisor = peers, store, fetcher, supervisor
        self._holders, self._copies = holders, copies
        self._since: dict[str, tuple[Epoch, float]] = {}
        self._prepared: set[tuple[str, str]] = set()
        """Manifests and dtypes for which this node has done all but copies."""
        self._due: dict[str, float] = {}
        """When it is next to be seen to that every tensor of a manifest has two holders; monotonic."""
        self._task: asyncio.Task[None] | None = None
        self.bytes_copied = 0

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self, row: pb.Deployment) -> None:
        """Do what is due for a deployment, one thing at a time."""
        if not row.wanted or row.state != "ready" or not row.plan.replicas:
            self._since.pop(row.id, None)
            return
        now, current = time.monotonic(), Epoch.from_proto(row.plan.epoch)
        epoch, since = self._since.get(row.id, (current, now))
        if epoch != current:
            since = now
        self._since[row.id] = current, since
        if self._task is not None and not self._task.done():
            return
        if (row.plan.manifest, row.plan.dtype) not in self._prepared:
            if now - since >= SETTLED_S:
                self._begin(self._prepare(Plan.from_proto(row.plan)))
        elif (
            self._copies
            and now - since >= COPY_S
            and now >= self._due.get(row.plan.manifest, 0.0)
            and len(self._peers.alive()) > 1
        ):
            self._begin(self._copy(Plan.from_proto(row.plan)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work, name="standby")
        self._task.add_done_callback(lambda t: failure_of(t, _log, "nothing was done ahead"))

    async def _prepare(self, plan: Plan) -> None:
        self._prepared.add((plan.manifest, plan.dtype))
        manifest = await self._fetcher.manifest(plan.manifest, self._holders(plan.manifest))
        await in_thread(self._store.recognise, plan.model, plan.manifest)
        if plan.dtype in ("int8", "int4"):
            await self._supervisor.compile(layouts_of(manifest, plan.dtype))
            self._supervisor.rehearse(plan.dtype, "cpu")

    async def _copy(self, plan: Plan) -> None:
        """Fetch what this node is to keep a copy of."""
        self._due[plan.manifest] = time.monotonic() + COPY_S
        manifest = await self._fetcher.manifest(plan.manifest, self._holders(plan.manifest))
        entries = {
            e.sha256: e for s in plan.stages for e in needed_tensors(manifest, *s.layers, s.embedding, s.head)
        }
        held = await self._held(entries)
        members, busy = self._peers.alive(), frozenset(plan.nodes)
        spared = {n for n in members if self._can_do_without(n, plan)}
        mine = [
            e
            for sha, e in entries.items()
            if copier(sha, members, held[sha], busy) == self._peers.id and spared.issuperset(held[sha])
        ]
        if not mine:
            return
        _log.info(
            "keeping a second copy of %d tensors of model=%s, %d bytes, that only one member has",
            len(mine),
            plan.model,
            sum(e.nbytes for e in mine),
        )
        for entry in mine:
            began = time.monotonic()
            try:
                await self._fetcher.copy(entry, held[entry.sha256])
            except P2PShardError as error:
                _log.warning("no second copy of tensor %s: %s", entry.name, error.message)
                self._due[plan.manifest] = time.monotonic() + REST_S
                return
            self.bytes_copied += entry.nbytes
            await asyncio.sleep((time.monotonic() - began) * (1 / DUTY - 1))
        self._due[plan.manifest] = time.monotonic() + COPY_S

    def _can_do_without(self, node: str, plan: Plan) -> bool:
        """Whether the members but one could hold the model: else copies of what that one has would be of no use."""
        needed = sum(r.weight_bytes + r.kv_bytes + r.workspace_bytes for s in plan.stages for r in s.ranks)
        infos = (self._peers.state.me, *(p.info for p in self._peers.state.members()))
        room = sum(
            max(0, d.budget_bytes - d.base_bytes) for i in infos if i.id != node for d in i.devices[:1]
        )
        return room >= needed

    async def _held(self, entries: Mapping[str, TensorEntry]) -> dict[str, list[str]]:
        """Members that have each tensor on their disk, this node included."""
        here = await in_thread(lambda: {sha for sha in entries if self._store.holds(sha)})
        others = await self._fetcher.who_holds(list(entries))
        return {sha: [*others[sha], *([self._peers.id] if sha in here else [])] for sha in entries}
