"""Model content from other members, by hash: the manifest, the tokenizer, and the tensors of our own layers.

Several at once, each from any member that holds it; a download resumes at the byte where it stopped, on
another member if need be, and is verified before it counts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from p2pshard.errors import DoesNotFit, Internal, ModelCorrupt, ModelNotFound, NodeUnreachable, P2PShardError
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.transport.channels import error_of
from p2pshard.transport.generated import control_pb2 as pb

from ..threads import in_thread
from .peers import Peers

__all__ = ["Fetcher"]

CONCURRENCY = 4
ROUNDS = 3
"""How often all sources of one tensor are tried."""
QUERY_HASHES = 512
_ASKED_WHY = 4
"""Members that are asked for a tensor that none holds: one may know what became of it."""
SILENCE_S = 10.0
"""A source that sends nothing for so long is left for another; one that is evicted, which is mostly sooner, then."""
MAX_MANIFEST = 64 << 20

_log = logging.getLogger("p2pshard.fetch")


@dataclass(eq=False)
class _Download:
    """One tensor on its way, for all who wait for it."""

    counts: list[Callable[[int], None]]
    task: asyncio.Task[None] | None = None
    askers: int = 0
    stage: bool = False
    """Whether one of them needs it for a stage of this node."""

    def count(self, nbytes: int) -> None:
        for count in self.counts:
            count(nbytes)


class Fetcher:
    """Downloads into a `ModelStore`; one per node. ``bytes_received`` counts tensor bytes."""

    def __init__(self, store: Any, peers: Peers) -> None:
        self._store, self._peers = store, peers
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._manifests: dict[str, asyncio.Task[Manifest]] = {}
        self._running: dict[str, _Download] = {}
        self.bytes_received = 0

    def _sources(self, holders: Iterable[str]) -> list[str]:
        """Members to ask, those said to hold the model first."""
        members = self._peers.member_ids() - {self._peers.id}
        first = [h for h in dict.fromkeys(holders) if h in members]
        rest = sorted(members - set(first))
        random.shuffle(rest)
        return first + rest

    async def manifest(self, digest: str, holders: Sequence[str] = ()) -> Manifest:
        """The manifest, from here or from a member. Raises `ModelNotFound` when nobody has it."""
        local = await asyncio.to_thread(self._store.get, digest)
        if local is not None:
            return local  # type: ignore[no-any-return]
        task = self._manifests.get(digest)
        if task is None:
            task = self._manifests[digest] = asyncio.create_task(self._fetch_manifest(digest, holders))
            task.add_done_callback(lambda t: self._have_manifest(digest, t))
        return await asyncio.shield(task)

    def _have_manifest(self, digest: str, task: asyncio.Task[Manifest]) -> None:
        del self._manifests[digest]
        if not task.cancelled():
            task.exception()  # seen by those who wait for it, if any still does

    async def close(self) -> None:
        """End what is on its way. Whoever waits for it is cancelled."""
        tasks = [*self._manifests.values(), *(d.task for d in self._running.values() if d.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_manifest(self, digest: str, holders: Sequence[str]) -> Manifest:
        for node in self._sources(holders):
            data = bytearray()
            try:
                call = self._peers.stub(node).Manifest(
                    pb.ManifestRequest(digest=digest), timeout=60.0, metadata=self._peers.metadata
                )
                async for piece in call:
                    data += piece.data
                    if len(data) > MAX_MANIFEST:
                        raise ModelCorrupt(
                            f"the manifest that node {node} sends is above {MAX_MANIFEST} bytes"
                        )
                return await asyncio.to_thread(self._store.add_manifest, bytes(data), digest)
            except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                _log.debug("no manifest %s from %s: %s", digest[:12], node, error)
            except P2PShardError as error:
                _log.warning("manifest from node=%s not taken: %s", node, error.message)
        raise ModelNotFound(
            f"no member has the model with manifest {digest[:12]}; the node that had it is gone"
        )

    async def ensure(
        self,
        digest: str,
        entries: Sequence[TensorEntry],
        holders: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Have every tensor here. ``progress(done, total)`` in bytes.

        Raises:
            ModelNotFound: naming what nobody holds.
            DoesNotFit: the tensor cache is full of what is in use.
            Internal: this node's disk does not take it.
        """
        await self._all({e.sha256: (e.nbytes, e.name) for e in entries}, holders, progress)

    async def extras(self, manifest: Manifest, holders: Sequence[str] = ()) -> None:
        """Have the tokenizer and other blobs here, so that this node can serve requests."""
        await self._all({sha: (size, "tokenizer") for sha, size in manifest.blobs.items()}, holders, None)

    async def _all(
        self,
        wanted: dict[str, tuple[int, str]],
        holders: Sequence[str],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        def missing_here() -> list[str]:
            return [sha for sha in wanted if not self._store.holds(sha)]

        missing = await asyncio.to_thread(missing_here)
        if not missing:
            return
        total = sum(wanted[sha][0] for sha in missing)
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        count(0)
        held = await self.who_holds(missing, holders)
        unheld = self._sources(holders)[:_ASKED_WHY]
        jobs = [
            asyncio.create_task(self._one(sha, *wanted[sha], held[sha] or unheld, count)) for sha in missing
        ]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def copy(self, entry: TensorEntry, sources: Sequence[str]) -> None:
        """Have a tensor here that is not for a stage of ours: not counted in ``bytes_received``. Raises as `ensure`."""
        try:
            await self._one(
                entry.sha256, entry.nbytes, entry.name, list(sources), lambda _: None, stage=False
            )
        finally:
            await in_thread(self._store.abandon, {entry.sha256})

    async def who_holds(self, hashes: Sequence[str], holders: Sequence[str] = ()) -> dict[str, list[str]]:
        """Which other members hold each of the hashes, likely ones first."""
        found: dict[str, list[str]] = {sha: [] for sha in hashes}
        sources = self._sources(holders)

        async def ask(node: str) -> dict[str, bool]:
            answer: dict[str, bool] = {}
            for start in range(0, len(hashes), QUERY_HASHES):
                part = hashes[start : start + QUERY_HASHES]
                try:
                    reply = await self._peers.stub(node).HasTensors(
                        pb.TensorQuery(sha256=part), timeout=10.0, metadata=self._peers.metadata
                    )
                except (grpc.aio.AioRpcError, NodeUnreachable) as error:
                    _log.debug("%s does not say what it holds: %s", node, error)
                    return answer
                answer.update(zip(part, reply.held, strict=False))
            return answer

        for node, answer in zip(sources, await asyncio.gather(*(ask(n) for n in sources)), strict=True):
            for sha in hashes:
                if answer.get(sha):
                    found[sha].append(node)
        return found

    async def _one(
        self,
        sha: str,
        nbytes: int,
        name: str,
        sources: list[str],
        count: Callable[[int], None],
        *,
        stage: bool = True,
    ) -> None:
        """One download at a time per hash, however many ask for it; it ends when none of them waits any more."""
        while (running := self._running.get(sha)) is not None and not running.askers:
            # Given up by its last asker: its file is closed before another may write it.
            assert running.task is not None, "made with it"
            await asyncio.wait([running.task])
        if running is None:
            running = self._running[sha] = _Download([])
            running.task = asyncio.create_task(self._gated(sha, nbytes, name, sources, running))
            running.task.add_done_callback(lambda task: self._ended(sha, task))
        assert running.task is not None, "made with it"
        running.counts.append(count)
        running.askers += 1
        running.stage |= stage
        try:
            await asyncio.shield(running.task)
        finally:
            running.askers -= 1
            running.counts.remove(count)
            if not running.askers and not running.task.done():
                running.task.cancel()
                await asyncio.wait([running.task])

    def _ended(self, sha: str, task: asyncio.Task[None]) -> None:
        del self._running[sha]
        if not task.cancelled():
            task.exception()  # seen by those who wait for it, if any still does

    async def _gated(self, sha: str, nbytes: int, name: str, sources: list[str], running: _Download) -> None:
        async with self._gate:
            await self._download(sha, nbytes, name, sources, running)

    async def _download(
        self, sha: str, nbytes: int, name: str, sources: list[str], running: _Download
    ) -> None:
        trouble = ""
        for attempt in range(ROUNDS):
            # Different tensors start at different members, so that all of them send.
            start = int(sha[:8], 16) % len(sources) if sources else 0
            for node in sources[start:] + sources[:start]:
                try:
                    await self._from(node, sha, nbytes, running)
                    return
                except grpc.aio.AioRpcError as error:
                    said = error_of(error)
                    if isinstance(said, ModelNotFound):  # another member may know more
                        continue
                    trouble = f"node {node}: {said.message}"
                except DoesNotFit:
                    raise  # here: no other source changes that
                except P2PShardError as error:
                    trouble = f"node {node}: {error.message}"
                except TimeoutError:
                    trouble = f"node {node} sent nothing for {SILENCE_S:.0f} s"
                except OSError as error:
                    raise Internal(f"tensor {name} cannot be kept on this node's disk: {error}") from error
                _log.warning("tensor interrupted name=%s reason=%s", name, trouble)
            await asyncio.sleep(0.5 * (attempt + 1))
        trouble = trouble or await in_thread(self._store.trouble, sha) or "no member holds it"
        raise ModelNotFound(
            f"tensor {name} ({nbytes} bytes) cannot be fetched from any member: {trouble}", sha256=sha
        )

    async def _from(self, node: str, sha: str, nbytes: int, running: _Download) -> None:
        async with _opened(self._store, sha, nbytes) as writer:
            got = writer.offset
            call = self._peers.stub(node).Tensor(
                pb.TensorRequest(sha256=sha, offset=got), metadata=self._peers.metadata
            )
            try:
                while got < nbytes:
                    async with asyncio.timeout(SILENCE_S):
                        piece = await call.read()
                    if piece is grpc.aio.EOF:
                        raise NodeUnreachable(f"it ended after {got} of {nbytes} bytes")
                    if got + len(piece.data) > nbytes:
                        raise ModelCorrupt(f"it sends more than the {nbytes} bytes of the tensor")
                    await in_thread(writer.write, piece.data)
                    got += len(piece.data)
                    self.bytes_received += len(piece.data) if running.stage else 0
                    running.count(len(piece.data))
            finally:
                call.cancel()
            await in_thread(writer.finish)


@asynccontextmanager
async def _opened(store: Any, sha: str, nbytes: int) -> AsyncIterator[Any]:
    """A writer of the store, closed when the work ends or is cancelled, even while it is being opened."""
    opened: list[Any] = []
    try:
        await in_thread(lambda: opened.append(store.writer(sha, nbytes)))
        yield opened[0]
    finally:
        for writer in opened:
            await in_thread(writer.close)
