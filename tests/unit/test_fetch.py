"""Downloads shared between those who wait for them, and given up when nobody does."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from p2pshard_node.cluster import fetch
from p2pshard_node.cluster.connection import Connection
from p2pshard_node.cluster.fetch import Fetcher
from p2pshard_node.models.cache import BlobWriter
from p2pshard_node.models.store import ModelStore

from p2pshard.errors import DoesNotFit, Internal, ModelCorrupt, ModelNotFound, P2PShardError
from p2pshard.models.manifest import TensorEntry
from p2pshard.transport.channels import abort_with, bind, make_channel, make_server
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc

DATA = bytes(range(256)) * 64
ENTRY = TensorEntry("blk.0.attn_q.weight", "F32", (64, 64), len(DATA), hashlib.sha256(DATA).hexdigest())


class Holder(rpc.ClusterServicer):
    """Has one tensor, and sends its second half when told to."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), asyncio.Event()
        self.offsets: list[int] = []
        """From which each call wanted the tensor."""
        self.address = ""
        self.refusal: P2PShardError | None = None
        """What it says instead of having the tensor."""
        self.asked_for_manifest = asyncio.Event()

    async def HasTensors(self, request: Any, context: Any) -> pb.TensorQueryReply:
        return pb.TensorQueryReply(held=[self.refusal is None] * len(request.sha256))

    async def Manifest(self, request: Any, context: Any) -> AsyncIterator[pb.Blob]:
        self.asked_for_manifest.set()
        await self.go.wait()
        yield pb.Blob()

    async def Tensor(self, request: Any, context: Any) -> AsyncIterator[pb.Blob]:
        if self.refusal is not None:
            await abort_with(context, self.refusal)
        self.offsets.append(request.offset)
        half = max(request.offset, len(DATA) // 2)
        yield pb.Blob(data=DATA[request.offset : half])
        self.asked.set()
        await self.go.wait()
        yield pb.Blob(data=DATA[half:])


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[tuple[Holder, Fetcher, ModelStore]]:
    holder, server = Holder(), make_server()
    rpc.add_ClusterServicer_to_server(holder, server)
    port = bind(server, None, "127.0.0.1")
    await server.start()
    channel = make_channel(f"127.0.0.1:{port}", None)
    peers: Any = SimpleNamespace(
        id="me", metadata=(), member_ids=lambda: {"me", "other"}, stub=lambda node: rpc.ClusterStub(channel)
    )
    store = ModelStore(tmp_path / "data", [])
    holder.address = f"127.0.0.1:{port}"
    yield holder, Fetcher(store, peers), store
    holder.go.set()
    await channel.close()
    await server.stop(None)


def ask(fetcher: Fetcher) -> asyncio.Task[None]:
    return asyncio.create_task(fetcher.ensure("m" * 64, [ENTRY]))


async def test_a_download_outlives_its_first_asker(lab: tuple[Holder, Fetcher, ModelStore]) -> None:
    holder, fetcher, store = lab
    async with asyncio.timeout(10):
        first, second = ask(fetcher), ask(fetcher)
        await holder.asked.wait()
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        holder.go.set()
        await second
    assert store.holds(ENTRY.sha256) and len(holder.offsets) == 1


async def test_a_download_that_nobody_waits_for_ends_and_may_be_begun_again(
    lab: tuple[Holder, Fetcher, ModelStore],
) -> None:
    holder, fetcher, store = lab
    async with asyncio.timeout(10):
        first = ask(fetcher)
        await holder.asked.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        holder.go.set()
        await ask(fetcher)
    assert store.holds(ENTRY.sha256) and len(holder.offsets) == 2


async def test_who_asks_while_a_download_that_was_given_up_closes_its_file_waits_for_that(
    lab: tuple[Holder, Fetcher, ModelStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder, fetcher, store = lab
    closing, go, plain = threading.Event(), threading.Event(), BlobWriter.close

    def slow(writer: BlobWriter) -> None:
        closing.set()
        go.wait(5)
        plain(writer)

    monkeypatch.setattr(BlobWriter, "close", slow)
    async with asyncio.timeout(10):
        first = ask(fetcher)
        await holder.asked.wait()
        first.cancel()
        await asyncio.to_thread(closing.wait)
        holder.go.set()
        second = ask(fetcher)
        await asyncio.sleep(0.1)
        go.set()
        await second
    assert store.holds(ENTRY.sha256) and not caplog.records, "it never met the other's half of the file"


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_file_is_closed_after_the_write_that_was_under_way(
    lab: tuple[Holder, Fetcher, ModelStore], monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    _, fetcher, _ = lab
    story: list[str] = []
    writing, go, write, close = threading.Event(), threading.Event(), BlobWriter.write, BlobWriter.close

    def slow_write(writer: BlobWriter, data: bytes) -> None:
        writing.set()
        go.wait(5)
        write(writer, data)
        story.append("written")

    def noted_close(writer: BlobWriter) -> None:
        story.append("closed")
        close(writer)

    monkeypatch.setattr(BlobWriter, "write", slow_write)
    monkeypatch.setattr(BlobWriter, "close", noted_close)
    async with asyncio.timeout(10):
        first = ask(fetcher)
        await asyncio.to_thread(writing.wait)
        (running,) = fetcher._running.values()
        assert running.task is not None
        for _ in range(cancels):
            running.task.cancel()
            await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(first, return_exceptions=True)
    assert story == ["written", "closed"]


async def test_a_source_that_is_evicted_is_left_for_another_at_the_byte_that_came(
    lab: tuple[Holder, Fetcher, ModelStore],
) -> None:
    holder, fetcher, store = lab
    peers: Any = fetcher._peers
    links = {
        n: Connection(make_channel(holder.address, None, own_connection=True), n) for n in ("other", "third")
    }
    peers.member_ids, peers.stub = lambda: {"me", *links}, lambda node: links[node].stub
    async with asyncio.timeout(8):  # less than it waits for a silent one
        asked = ask(fetcher)
        await holder.asked.wait()
        while not fetcher.bytes_received:
            await asyncio.sleep(0.01)
        await next(link for link in links.values() if link._calls).close()
        holder.go.set()
        await asked
    assert store.holds(ENTRY.sha256) and holder.offsets == [0, len(DATA) // 2]
    for link in links.values():
        await link.close()


async def test_what_this_nodes_own_disk_refuses_is_no_sources_fault(
    lab: tuple[Holder, Fetcher, ModelStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, fetcher, store = lab
    holder.go.set()
    fetcher._store = ModelStore(tmp_path / "small", [], cache_bytes=ENTRY.nbytes - 1)
    with pytest.raises(DoesNotFit, match="larger --tensor-cache"):
        await ask(fetcher)
    fetcher._store = store

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlobWriter, "write", full)
    with pytest.raises(Internal, match=r"cannot be kept on this node's disk: .*No space left"):
        await ask(fetcher)
    assert holder.offsets == [0], "neither was tried again"
    monkeypatch.undo()
    await ask(fetcher)
    assert store.holds(ENTRY.sha256)


async def test_nothing_is_on_its_way_after_closing(lab: tuple[Holder, Fetcher, ModelStore]) -> None:
    holder, fetcher, store = lab
    tensor, manifest = ask(fetcher), asyncio.create_task(fetcher.manifest("d" * 64))
    async with asyncio.timeout(10):
        await asyncio.gather(holder.asked.wait(), holder.asked_for_manifest.wait())
        await fetcher.close()
        assert not fetcher._running and not fetcher._manifests
        await asyncio.gather(tensor, manifest, return_exceptions=True)
    assert tensor.cancelled() and manifest.cancelled()
    store.writer(ENTRY.sha256, ENTRY.nbytes).close()  # nobody writes it


async def test_a_file_that_was_being_opened_when_its_asker_left_is_closed(
    lab: tuple[Holder, Fetcher, ModelStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, fetcher, store = lab
    opening, go, plain = threading.Event(), threading.Event(), store.writer

    def slow(sha: str, nbytes: int) -> Any:
        opening.set()
        go.wait(5)
        return plain(sha, nbytes)

    monkeypatch.setattr(store, "writer", slow)
    async with asyncio.timeout(10):
        first = ask(fetcher)
        await asyncio.to_thread(opening.wait)
        first.cancel()
        go.set()
        await asyncio.gather(first, return_exceptions=True)
        holder.go.set()
        await ask(fetcher)
    assert store.holds(ENTRY.sha256)


@pytest.mark.parametrize("where", ["here", "there", "nowhere"])
async def test_what_nobody_holds_any_more_is_told_with_what_became_of_it(
    lab: tuple[Holder, Fetcher, ModelStore], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    holder, fetcher, store = lab
    fault = ModelCorrupt("m.gguf changed or vanished after it was hashed; deploy the model again")
    unknown = ModelNotFound("content is not on this node")
    holder.refusal = fault if where == "there" else unknown
    if where == "here":
        monkeypatch.setattr(store, "_locate_file", lambda sha: (None, fault.message))
    monkeypatch.setattr(fetch, "ROUNDS", 1)
    said = "no member holds it" if where == "nowhere" else "changed or vanished"
    async with asyncio.timeout(10):
        with pytest.raises(ModelNotFound, match=f"attn_q.*cannot be fetched.*{said}"):
            await ask(fetcher)
