"""What a node does ahead for stages that it does not have."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.cluster import standby
from p2pshard_node.cluster.links import Links
from p2pshard_node.cluster.peers import REFUSED_S, SILENT_S, Peers
from p2pshard_node.cluster.standby import Standby, copier, layouts_of

from p2pshard.errors import DoesNotFit
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.transport.generated import control_pb2 as pb
from tests.waiting import come_true

NAMES = st.sets(st.sampled_from("abcdefgh"), min_size=1)


@given(
    members=NAMES, held=st.lists(st.sampled_from("abcdefgh"), unique=True), busy=NAMES, sha=st.integers(0, 99)
)
def test_one_member_copies_what_one_holds_and_a_free_one_first(
    members: set[str], held: list[str], busy: set[str], sha: int
) -> None:
    chosen = copier(str(sha), members, held, frozenset(busy))
    others = members - set(held)
    if len(held) != 1 or not others:
        assert chosen is None
        return
    assert chosen in others
    assert chosen not in busy or others <= busy
    assert copier(str(sha), members, [*held, chosen], frozenset(busy)) is None, "two have it then"


def test_copies_are_shared_out() -> None:
    chosen = [copier(str(i), "abcd", ["a"], frozenset("ab")) for i in range(200)]
    assert set(chosen) == {"c", "d"} and 60 < chosen.count("c") < 140


def entry(name: str, dtype: str, shape: tuple[int, ...], sha: str) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 16, sha * 64)


MANIFEST = Manifest(
    "gguf",
    {"num_hidden_layers": 2},
    (
        entry("token_embd.weight", "Q6_K", (256, 256), "0"),
        entry("blk.0.attn_q.weight", "Q4_K", (256, 256), "1"),
        entry("blk.0.attn_norm.weight", "F32", (256,), "2"),
        entry("blk.1.attn_q.weight", "Q5_0", (256, 256), "3"),
        entry("output_norm.weight", "F32", (256,), "4"),
    ),
    tokenizer="",
)


def test_kernels_that_a_model_needs() -> None:
    assert layouts_of(MANIFEST, "int8") == [] and layouts_of(MANIFEST, "float32") == []
    assert layouts_of(MANIFEST, "int4") == ["Q4_K", "Q5_0", "Q6_K"]


def plan(n: int = 1) -> Plan:
    stages = (
        Stage((0, 0), True, False, (Rank("a", weight_bytes=40, kv_bytes=10),)),
        Stage((1, 1), False, True, (Rank("b", weight_bytes=40, kv_bytes=10),)),
    )
    return Plan(
        (Replica(stages),), Epoch(n, "a"), "tolerant", MANIFEST.digest, "m", "int4", 64, 1, 16, 4, 32, 2
    )


def row(state: str = "ready", n: int = 1) -> pb.Deployment:
    return pb.Deployment(
        id="d", model="m", manifest=MANIFEST.digest, wanted=True, state=state, plan=plan(n).to_proto()
    )


class Rig:
    """Node c beside a plan of a and b; a alone has the model's file."""

    def __init__(self, budgets: dict[str, int]) -> None:
        self.done: list[Any] = []
        self.held = {e.sha256: ["a"] for e in MANIFEST.tensors}

        def info(node: str) -> pb.NodeInfo:
            return pb.NodeInfo(id=node, devices=[pb.DeviceProfile(budget_bytes=budgets[node])])

        peers: Any = SimpleNamespace(
            id="c", alive=lambda: set(budgets),
            state=SimpleNamespace(me=info("c"), members=lambda: [SimpleNamespace(info=info(n)) for n in "ab"]),
        )  # fmt: skip
        fetcher: Any = SimpleNamespace(manifest=self.manifest, who_holds=self.who_holds, copy=self.copy)
        supervisor: Any = SimpleNamespace(
            compile=self.compile, rehearse=lambda *a: self.done.append(("rehearse", *a))
        )
        store: Any = SimpleNamespace(
            holds=lambda sha: False, recognise=lambda *a: self.done.append("recognise")
        )
        self.full = False
        self.standby = Standby(peers, store, fetcher, supervisor, lambda m: ["a"])

    async def manifest(self, *_: object) -> Manifest:
        return MANIFEST

    async def who_holds(self, hashes: list[str]) -> dict[str, list[str]]:
        return {h: self.held[h] for h in hashes}

    async def compile(self, layouts: list[str]) -> None:
        self.done.append(tuple(layouts))

    async def copy(self, found: TensorEntry, sources: list[str]) -> None:
        if self.full:
            raise DoesNotFit("the tensor cache is full")
        assert sources == ["a"]
        self.held[found.sha256] = ["a", "c"]
        self.done.append(found.name)

    async def look_until(self, condition: Any, state: str = "ready") -> None:
        async def look() -> None:
            while True:
                self.standby.look(row(state))
                await asyncio.sleep(0.01)

        looking = asyncio.create_task(look())
        try:
            await come_true(condition, 3)
        finally:
            looking.cancel()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLED_S", "COPY_S"):
        monkeypatch.setattr(standby, name, 0.05)


async def test_a_spare_is_readied_and_then_copies_what_only_one_has() -> None:
    rig = Rig({"a": 70, "b": 60, "c": 80})
    rig.standby.look(row("loading"))
    await asyncio.sleep(0.1)
    assert rig.done == [], "nothing is done for what is not ready"
    await rig.look_until(lambda: all(len(h) == 2 for h in rig.held.values()))
    assert rig.done[:3] == ["recognise", ("Q4_K", "Q5_0", "Q6_K"), ("rehearse", "int4", "cpu")]
    assert sorted(rig.done[3:]) == sorted(e.name for e in MANIFEST.tensors)
    assert rig.standby.bytes_copied == 16 * len(MANIFEST.tensors)
    before = list(rig.done)
    await asyncio.sleep(0.2)
    assert rig.done == before, "once is enough"
    await rig.standby.close()


async def test_nothing_is_copied_that_nobody_could_use() -> None:
    """Without a, the others cannot hold the model: 50 + 40 of 100 bytes."""
    rig = Rig({"a": 100, "b": 50, "c": 40})
    await rig.look_until(lambda: ("rehearse", "int4", "cpu") in rig.done)
    await asyncio.sleep(0.3)
    assert all(h == ["a"] for h in rig.held.values())
    await rig.standby.close()


async def test_a_full_disk_is_left_alone_for_a_while() -> None:
    rig = Rig({"a": 70, "b": 60, "c": 80})
    rig.full = True
    await rig.look_until(lambda: rig.standby._due.get(MANIFEST.digest, 0) > time.monotonic() + 100)
    await rig.standby.close()


def test_silence_is_what_nobody_has_heard_for_so_long(tmp_path: Path) -> None:
    from p2pshard_node.cluster import membership as m

    peers = cast(Any, Peers.__new__(Peers))
    now = time.monotonic()

    def peer(heard: float, refused: float | None = None, phase: str = m.SUSPECT) -> m.Peer:
        return m.Peer(pb.NodeInfo(id="x"), phase=phase, heard=now - heard, refused_since=refused)

    def judge(found: m.Peer, elsewhere: float | None = None) -> tuple[bool, bool]:
        peers.state = m.State(pb.NodeInfo(id="me"), peers={"x": found})
        peers.links = Links()
        if elsewhere is not None:
            peers.links.observe("other", "x", now - elsewhere, 1.0)
        peers.links.observe("me", "x", now, 1.0)  # what this node itself saw stands in `heard`
        return peers.silent("x"), peers.refuses("x")

    assert judge(peer(SILENT_S + 0.1)) == (True, False)
    assert judge(peer(SILENT_S - 0.3)) == (False, False)
    assert judge(peer(SILENT_S + 9, phase=m.MEMBER)) == (False, False)
    assert judge(peer(SILENT_S + 0.1), elsewhere=0.5) == (False, False), "another member hears it"
    assert judge(peer(REFUSED_S + 0.1, refused=now)) == (True, True)
    assert judge(peer(REFUSED_S - 0.2, refused=now)) == (False, False), "it may just be starting again"
    assert judge(peer(REFUSED_S + 0.1, refused=now), elsewhere=0.1) == (False, False)
