"""What one node can say of all: names that only others know, requests that others carry, how far others have loaded."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from p2pshard import Client
from p2pshard.errors import InvalidRequest, ModelNotFound
from tests.agreement_watch import held, workers
from tests.local_cluster import LocalCluster
from tests.tiny import reference_tokens, write_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)
PROMPT_IDS = [10, 20, 30, 40]
SETTINGS: dict[str, Any] = {"nodes": 3, "context": 4096, "dtype": "float32"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The second node alone has `tiny`; it and the third have different models that are called `twin`."""
    folder = tmp_path_factory.mktemp("names")
    write_tiny_llama(folder / "tiny", context=4096)
    write_tiny_llama(folder / "twin", seed=1)
    cluster = LocalCluster(folder, "--memory", "700MB", own_models=True)
    _, second, third = cluster.nodes
    shutil.copytree(folder / "tiny", second.models / "tiny")
    shutil.copytree(folder / "twin", second.models / "twin")
    write_tiny_llama(third.models / "twin", seed=2)
    with cluster:
        cluster.wait_measured()
        yield cluster


def ids(cluster: LocalCluster) -> list[str]:
    """Of the nodes, in their order."""
    found = {n["name"]: n["id"] for n in cluster.status(cluster.nodes[0])["nodes"]}
    return [found[n.name] for n in cluster.nodes]


def test_a_name_that_means_two_models_is_refused_and_the_asked_nodes_own_wins(cluster: LocalCluster) -> None:
    first, second, third = cluster.nodes
    manifests = {}
    for node in (second, third):
        with Client([node.address]) as client:
            plan = client.plan("twin", context=512).plan
            assert plan is not None
            manifests[node.name] = plan.manifest
    assert manifests[second.name] != manifests[third.name]
    with Client([first.address]) as client:
        with pytest.raises(InvalidRequest, match="means different models") as caught:
            client.plan("twin", context=512)
        for name, manifest in manifests.items():
            assert f"{manifest[:12]} on node {name}" in caught.value.message
        with pytest.raises(ModelNotFound, match="this node or on the 2 others"):
            client.plan("nowhere")
        _, b, c = ids(cluster)
        rows = {(m.name, m.digest, m.nodes) for m in client.models() if m.name == "twin"}
        assert rows == {("twin", manifests[second.name], (b,)), ("twin", manifests[third.name], (c,))}
    listed = first.cli("ls").stdout
    assert manifests[second.name][:12] in listed and manifests[third.name][:12] in listed


def test_every_node_shows_how_far_each_has_loaded_a_name_that_one_alone_has(cluster: LocalCluster) -> None:
    first, _, third = cluster.nodes
    assert third.process is not None
    (warm,) = until(lambda: workers(third.process.pid), 30, "a warm worker")  # type: ignore[union-attr]
    answer = []
    with held([warm]):
        deploying = first.popen("deploy", "tiny", "--nodes", "3", "--context", "4096", "--dtype", "float32")

        def loads(asked: Any) -> dict[str, dict[str, Any]]:
            rows = cluster.status(asked)["deployments"]
            return {p["node"]: p for p in rows[0]["progress"]} if rows else {}

        def told() -> bool:
            for node in cluster.nodes:
                seen = loads(node)
                if set(seen) != set(ids(cluster)):
                    return False
                if not all(seen[i]["done_bytes"] == seen[i]["total_bytes"] > 0 for i in ids(cluster)[:2]):
                    return False
            return True

        until(told, 60, lambda: str([loads(n) for n in cluster.nodes]))
        answer = [loads(n)[ids(cluster)[2]] for n in cluster.nodes]
    assert len({a["phase"] for a in answer}) == 1, "they all say where the slow one is"
    assert deploying.wait(timeout=60) == 0
    until(lambda: not any(loads(n) for n in cluster.nodes), 5, "what is in force is on its way no more")
    expected = reference_tokens(cluster.folder.parent / "tiny", PROMPT_IDS, 8)
    for node in cluster.nodes:
        with Client([node.address]) as client:
            got = client.generate("tiny", PROMPT_IDS, max_tokens=8, temperature=0, ignore_eos=True)
            assert list(got.token_ids) == expected


def test_ps_lists_the_requests_of_all_nodes_and_names_one_that_does_not_answer(cluster: LocalCluster) -> None:
    first, second, third = cluster.nodes
    _, b, c = ids(cluster)
    with Client([first.address]) as asked, Client([third.address]) as busy:
        busy.deploy("tiny", **SETTINGS)
        stream = busy.generate("tiny", PROMPT_IDS, max_tokens=3500, temperature=0, ignore_eos=True)
        pieces = iter(stream)
        next(pieces)
        (row,) = asked.ps().requests
        assert (row.node, row.model, row.state) == (c, "tiny", "running")
        second.kill(signal.SIGSTOP)
        try:
            began = time.monotonic()
            listed = asked.ps()
            assert time.monotonic() - began < 3
            assert [u.node for u in listed.unreachable] == [b]
        finally:
            second.kill(signal.SIGCONT)
        pieces.close()


def test_an_undeploy_alarms_nobody(cluster: LocalCluster) -> None:
    first = cluster.nodes[0]
    with Client([first.address]) as client:
        client.deploy("tiny", **SETTINGS)
        client.generate("tiny", PROMPT_IDS, max_tokens=4, temperature=0, ignore_eos=True).text  # noqa: B018
        before = len(first.log_path.read_text())
        client.undeploy("tiny")
        until(lambda: "the stream to the driver of tiny ended" in first.log(), 10, first.log)
    assert "lost the driver" not in first.log_path.read_text()[before:]
