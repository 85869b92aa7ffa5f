"""Deployments over real daemons and workers: a coordinator that dies, a node that is lost and returns, a clean end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pshard import Client
from p2pshard.errors import ModelNotFound, P2PShardError
from tests import agreement_watch
from tests.local_cluster import LocalCluster, Node
from tests.tiny import write_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    write_tiny_llama(tmp_path / "tiny")
    with LocalCluster(tmp_path, "--memory", "700MB") as cluster:
        yield cluster


def model(cluster: LocalCluster) -> str:
    return str(cluster.folder.parent / "tiny")


def deployment(cluster: LocalCluster, node: Node) -> dict[str, Any]:
    rows = cluster.status(node).get("deployments") or [{}]
    return dict(rows[0])


def workers(node: Node) -> set[int]:
    assert node.process is not None
    return agreement_watch.workers(node.process.pid)


def by_id(cluster: LocalCluster, wanted: str) -> Node:
    rows = cluster.status(cluster.nodes[0])["nodes"]
    name = next(n["name"] for n in rows if n["id"] == wanted)
    return next(n for n in cluster.nodes if n.name == name)


@pytest.mark.slow
def test_a_coordinator_killed_while_its_plan_loads_is_succeeded_and_one_plan_serves(
    cluster: LocalCluster,
) -> None:
    first = cluster.nodes[0]
    until(lambda: cluster.status(first).get("coordinator"), 10, "a coordinator")
    leader = by_id(cluster, cluster.status(first)["coordinator"])
    rest = [n for n in cluster.nodes if n is not leader]
    failures: list[P2PShardError] = []

    def deploy() -> None:
        try:
            with Client([rest[0].address]) as client:
                client.deploy(model(cluster), nodes=2, context=512, dtype="float32")
        except P2PShardError as error:
            failures.append(error)

    asking = threading.Thread(target=deploy)
    asking.start()
    until(lambda: deployment(cluster, rest[0]).get("state") == "loading", 60, "loading", every=0.02)
    leader.kill()
    asking.join(timeout=150)
    assert not asking.is_alive() and not failures, f"{failures}\n" + "\n".join(n.log() for n in rest)
    plans = [deployment(cluster, n)["plan"] for n in rest]
    assert plans[0]["epoch"] == plans[1]["epoch"]
    nodes = {r["node"] for s in plans[0]["replicas"][0]["stages"] for r in s["ranks"]}
    # The leader may still be listed, as suspected: what it had is given away before it is evicted.
    assert nodes == {n["id"] for n in cluster.status(rest[0])["nodes"] if n["name"] != leader.name}
    with Client([rest[1].address]) as client:
        assert (
            client.generate("tiny", "hello", max_tokens=4, temperature=0, ignore_eos=True).completion_tokens
            == 4
        )


@pytest.mark.slow
def test_a_lost_node_is_named_with_its_layers_and_its_return_mends_it(cluster: LocalCluster) -> None:
    asked = cluster.nodes[0]
    with Client([asked.address]) as client:
        client.deploy(model(cluster), nodes=3, context=512, dtype="float32")
        before = client.generate("tiny", "again", max_tokens=6, temperature=0, ignore_eos=True).token_ids
        stages = deployment(cluster, asked)["plan"]["replicas"][0]["stages"]
        ids = {n["name"]: n["id"] for n in cluster.status(asked)["nodes"]}
        victim = cluster.nodes[2]
        first, last = next(s["layers"] for s in stages if s["ranks"][0]["node"] == ids[victim.name])
        victim.kill()
        began = time.monotonic()
        row = until(
            lambda: (r := deployment(cluster, asked)).get("state") == "broken" and r, 5, "broken", every=0.05
        )
        assert f"layers {first}-{last}" in row["reason"], row["reason"]
        until(lambda: len(cluster.status(asked)["nodes"]) == 2, 6 - (time.monotonic() - began), "two members")
        until(lambda: "2 can be used" in deployment(cluster, asked)["reason"], 20, "why it is not mended")
        assert deployment(cluster, asked)["state"] == "broken"
        victim.start(peers=[asked])
        until(lambda: deployment(cluster, asked)["state"] == "ready", 90, lambda: asked.log())
        assert (
            client.generate("tiny", "again", max_tokens=6, temperature=0, ignore_eos=True).token_ids == before
        )


@pytest.mark.slow
def test_undeploy_and_stop_leave_no_process_and_a_restart_brings_back_what_is_wanted(
    cluster: LocalCluster,
) -> None:
    asked = cluster.nodes[1]
    with Client([asked.address]) as client:
        with pytest.raises(ModelNotFound):
            client.undeploy("tiny")
        client.deploy(model(cluster), nodes=3, context=512, dtype="float32", concurrency=2)
        began = time.monotonic()
        client.deploy(model(cluster))  # what is ready is what was asked for: nothing is loaded again
        assert time.monotonic() - began < 2
        loaded = {
            r["pid"] for s in deployment(cluster, asked)["plan"]["replicas"][0]["stages"] for r in s["ranks"]
        }
        pids = {pid for node in cluster.nodes for pid in workers(node)}
        assert len(loaded) == 3 and loaded <= pids
    for node in cluster.nodes:  # all at once, in the middle of everything
        assert node.process is not None
        node.process.send_signal(signal.SIGINT)
    for node in cluster.nodes:
        assert node.process is not None and node.process.wait(timeout=15) == 0, node.log()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    for node in cluster.nodes:
        node.start(peers=[n for n in cluster.nodes if n is not node])
    until(lambda: deployment(cluster, asked).get("state") == "ready", 120, lambda: asked.log())
    with Client([asked.address]) as client:
        client.undeploy("tiny")
        until(lambda: not cluster.status(cluster.nodes[2])["deployments"], 3, "the tombstone is everywhere")
        until(
            lambda: all(len(workers(n)) <= 1 for n in cluster.nodes),
            6,
            "but for a warm one, no worker is left",
        )
        pinned = "what was deployed no longer holds its tensors in the cache"
        until(
            lambda: not [f for n in cluster.nodes for f in (n.data_dir / "sources").glob("*.json")], 6, pinned
        )


@pytest.mark.slow
def test_a_first_load_that_compiles_kernels_loses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one core for a daemon and the compiler of its worker, as on the smallest machine."""
    write_tiny_llama(tmp_path / "tiny")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    cluster = LocalCluster(tmp_path, "--memory", "700MB", "--no-warm-worker", nodes=2)
    for core, node in enumerate(cluster.nodes):
        node.core = core
    with cluster:
        cluster.wait_measured()
        done = threading.Event()
        phases: set[str] = set()

        def watch() -> None:
            while not done.is_set():
                for node in cluster.status(cluster.nodes[1]).get("deployments", ()):
                    phases.update(p.get("phase", "") for p in node.get("progress", ()))
                time.sleep(0.2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        cluster.nodes[0].cli("deploy", model(cluster), "--nodes", "2", "--dtype", "int8", timeout=240)
        done.set()
        watcher.join()
        assert any("compiling" in phase for phase in phases), phases  # else this tests nothing
        for node in cluster.nodes:
            log = node.log_path.read_text()
            assert "peer suspected" not in log and "not joined" not in log, log
        assert {n["state"] for n in cluster.status(cluster.nodes[0])["nodes"]} == {"member"}
