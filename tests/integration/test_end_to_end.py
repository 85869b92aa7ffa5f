"""Real daemons, workers and streams with a tiny model: what comes out equals plain transformers in one process."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pshard import Client
from p2pshard.errors import ContextExceeded
from tests.local_cluster import LocalCluster
from tests.tiny import reference_tokens, write_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)
PROMPTS = [
    "A",
    "The river",
    "One two three four",
    "x" * 150,
    "Hello there",
    "zzzz",
    "0123456789" * 4,
    "What now?",
]


def ids(text: str) -> list[int]:
    """The tiny tokenizer is one token a byte."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(_tokenizer_file)).encode(text).ids  # type: ignore[no-any-return]


_tokenizer_file = Path()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    global _tokenizer_file
    folder = tmp_path_factory.mktemp("e2e")
    write_tiny_llama(folder / "tiny", context=32768)
    _tokenizer_file = folder / "tiny" / "tokenizer.json"
    with LocalCluster(folder, "--memory", "700MB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client([node.address for node in cluster.nodes]) as client:
        client.deploy(
            str(cluster.folder.parent / "tiny"), context=24576, concurrency=2, nodes=3, dtype="float32"
        )
        yield client


def settle(client: Client, seconds: float = 3.0) -> None:
    """Nothing active, nothing held, on any stage."""

    def idle() -> bool:
        ps = client.ps()
        active = [r for r in ps["requests"] if r["state"] in ("waiting", "running")]
        return not active and all(row["blocks_used"] == 0 for row in ps["kv"])

    until(idle, seconds, lambda: f"idle: {client.ps()}")


def test_greedy_tokens_equal_the_reference(cluster: LocalCluster, client: Client) -> None:
    for prompt in PROMPTS[:4]:
        expected = reference_tokens(cluster.folder.parent / "tiny", ids(prompt), 24)
        got = client.generate("tiny", prompt, max_tokens=24, temperature=0, ignore_eos=True)
        assert list(got.token_ids) == expected
        assert got.finish_reason == "length"
    first, middle, last = (
        s["layers"] for s in client.status()["deployments"][0]["plan"]["replicas"][0]["stages"]
    )
    assert first[0] == 0 and last[1] == 5
    assert middle == [first[1] + 1, last[0] - 1]


def test_any_node_answers(cluster: LocalCluster, client: Client) -> None:
    texts = set()
    for node in cluster.nodes:
        with Client([node.address]) as other:
            texts.add(
                other.generate("tiny", "Any node", max_tokens=12, temperature=0, ignore_eos=True).token_ids
            )
    assert len(texts) == 1


def test_eight_at_once_each_equal_their_solo_output(client: Client) -> None:
    solo = [
        client.generate("tiny", p, max_tokens=30, temperature=0, ignore_eos=True).token_ids for p in PROMPTS
    ]
    for seed in range(2):
        order = list(range(8))
        random.Random(seed).shuffle(order)

        def one(i: int) -> tuple[int, ...]:
            return client.generate(
                "tiny", PROMPTS[i], max_tokens=30, temperature=0, ignore_eos=True
            ).token_ids

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            together = dict(zip(order, pool.map(one, order), strict=True))
        assert [together[i] for i in range(8)] == solo
    settle(client)


def test_seeded_sampling_repeats_and_differs_by_seed(client: Client) -> None:
    def run(seed: int) -> tuple[int, ...]:
        return client.generate(
            "tiny", "Seeds", max_tokens=24, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True
        ).token_ids

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_a_prompt_longer_than_the_context_is_refused_in_numbers(client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(ContextExceeded) as error:
        client.generate("tiny", "x" * 25_000, max_tokens=4)
    assert time.monotonic() - began < 2
    assert "25000" in str(error.value).replace(",", "")
    assert "24576" in str(error.value).replace(",", "")


@pytest.mark.slow
def test_a_long_prompt_passes_over_the_nodes(client: Client) -> None:
    got = client.generate("tiny", "y" * 20_000, max_tokens=3, temperature=0, ignore_eos=True)
    assert got.prompt_tokens == 20_000
    assert got.completion_tokens == 3
    settle(client)


def test_two_requests_with_room_for_one_run_one_after_the_other(
    cluster: LocalCluster, client: Client
) -> None:
    context = 24576

    # Each reserves more than half of the two contexts that the pool holds.
    def one(prompt: str) -> int:
        return client.generate(
            "tiny", prompt, max_tokens=40, temperature=0, ignore_eos=True
        ).completion_tokens

    long = "w" * (context - 41)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, [long[:9000], long[:9000], long[:9000]])) == [40, 40, 40]
    settle(client)


@pytest.mark.slow
def test_cancels_at_random_moments_leave_nothing(client: Client) -> None:
    rng = random.Random(3)

    def one(i: int) -> None:
        stream = client.generate(
            "tiny", f"Request {i}", max_tokens=200, temperature=0.8, seed=i, ignore_eos=True
        )
        stop_after = rng.randrange(0, 12)
        for count, _ in enumerate(stream):
            if count >= stop_after:
                break
        stream.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(1000)))
    settle(client, 5)
    assert (
        client.generate("tiny", "still there", max_tokens=3, temperature=0, ignore_eos=True).completion_tokens
        == 3
    )


def test_a_killed_worker_costs_time_and_no_token(cluster: LocalCluster, client: Client) -> None:
    whole = client.generate("tiny", "A long one", max_tokens=400, temperature=0, ignore_eos=True).token_ids
    middle = client.status()["deployments"][0]["plan"]["replicas"][0]["stages"][1]
    stream = client.generate("tiny", "A long one", max_tokens=400, temperature=0, ignore_eos=True)
    pieces = iter(stream)
    for _ in range(5):
        next(pieces)

    os.kill(middle["ranks"][0]["pid"], signal.SIGKILL)
    for _ in pieces:
        continue
    assert stream.result().token_ids == whole
    assert all(node.process and node.process.poll() is None for node in cluster.nodes)
    after = client.status()["deployments"][0]["plan"]["replicas"][0]["stages"]
    assert after[1]["ranks"][0]["pid"] != middle["ranks"][0]["pid"] and after[1]["layers"] == middle["layers"]
