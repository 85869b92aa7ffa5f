"""`p2pshard bench` over real daemons: the cluster's own trace agrees with the client's clock."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from p2pshard.trace import Trace
from tests.local_cluster import LocalCluster
from tests.tiny import write_tiny_llama
from tests.waiting import until

FLAGS = ("--nodes", "2", "--context", "512", "--concurrency", "8", "--dtype", "float32")
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("bench")
    write_tiny_llama(folder / "tiny", context=2048)
    with LocalCluster(folder, "--memory", "700MB", "--no-warm-worker", nodes=2) as cluster:
        cluster.wait_measured()
        yield cluster


def test_bench_deploys_measures_and_accounts_for_every_step(cluster: LocalCluster) -> None:
    first = cluster.nodes[0]
    model = str(cluster.folder.parent / "tiny")
    shape = ["--streams", "1,4", "--prompt", "20", "--tokens", "24", "--rounds", "2"]
    document = json.loads(first.cli("bench", model, *FLAGS, *shape, "--json", timeout=200).stdout)
    hidden = 64
    for row in document["results"]:
        streams = row["streams"]
        trace = Trace.from_json(row["trace"])
        decode, prefill = trace.decode, trace.prefill
        assert decode is not None and prefill is not None
        # the trace is of these rounds and of nothing else
        assert prefill.tokens >= 2 * streams * 20
        assert decode.tokens + prefill.tokens == 2 * streams * (20 + 23)
        # a token that continues costs its float32 residual and a header one way, little the other
        back, forward = (stage.bytes_per_token for stage in decode.stages)
        assert hidden * 4 < forward < hidden * 4 + 400
        assert 0 < back < 300
        assert [e["bytes_per_token"] for e in row["edges"]] == [forward, back]
        # what the driver sees of a step is within what the client sees between two tokens
        assert all(0 < stage.busy <= 1 for stage in decode.stages)
        assert decode.stages[-1].sample_ms.median > 0 == decode.stages[0].sample_ms.p95
        assert decode.round_trip_ms.median <= row["inter_token_ms"]["p95"] * 1.5
        inside = sum(s.queue_ms.median + s.compute_ms.median for s in decode.stages)
        assert inside < decode.round_trip_ms.p95
        assert row["tokens_per_second"] > 0
    assert [e["from"] for e in document["results"][0]["edges"]] == [
        stage["ranks"][0]["node"] for stage in document["plan"]["replicas"][0]["stages"]
    ]


def test_any_node_shows_the_trace(cluster: LocalCluster) -> None:
    """After the test above; the node that does not drive knows it from gossip."""

    def traces() -> list[object]:
        return [cluster.status(node)["deployments"][0]["trace"] for node in cluster.nodes]

    until(lambda: traces()[0] and traces()[0] == traces()[1], 10, "the same trace at both nodes")


def test_a_long_prompt_is_refused_with_numbers(cluster: LocalCluster) -> None:
    model = str(cluster.folder.parent / "tiny")
    done = cluster.nodes[0].cli("bench", model, *FLAGS, "--prompt", "600", check=False)
    assert done.returncode == 1
    assert "664 tokens" in done.stderr and "512" in done.stderr
