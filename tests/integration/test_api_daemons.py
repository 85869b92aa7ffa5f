"""The HTTP API of real daemons: OpenAI's client at a node, a model over two of them."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from p2pshard import Client
from tests.local_cluster import LocalCluster, Node
from tests.tiny import reference_tokens, write_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)
PROMPT = "The river"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("api")
    write_tiny_llama(folder / "tiny", context=4096)
    cluster = LocalCluster(folder, "--memory", "700MB", "--recover-wait", "3", "--no-copies", nodes=3)
    # Only the first has the model's file; the last could not take over, so that its end is the model's.
    cluster.nodes[2].flags = (*cluster.nodes[2].flags, "--memory", "300MB")
    with cluster:
        with Client([cluster.nodes[0].address]) as client:
            until(
                lambda: all(n["memory_budget"] for n in client.status()["nodes"]),
                60,
                "every node is measured",
            )
            client.deploy(str(folder / "tiny"), context=4096, concurrency=2, nodes=2, dtype="float32")
        yield cluster


@pytest.fixture(scope="module")
def outsider(cluster: LocalCluster) -> Node:
    """The node that holds no part of the model: it fetched the tokenizer."""
    status = cluster.status(cluster.nodes[0])
    (deployment,) = status["deployments"]
    holders = {r["node"] for s in deployment["plan"]["replicas"][0]["stages"] for r in s["ranks"]}
    names = {n["name"] for n in status["nodes"] if n["id"] not in holders}
    return next(n for n in cluster.nodes if n.name in names)


def openai_client(node: Node) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{node.api_port}/v1", api_key="none", max_retries=0)


def settle(node: Node, seconds: float) -> None:
    """No request, and no block held on any stage."""
    with Client([node.address]) as client:
        ps = client.ps()

        def idle() -> bool:
            nonlocal ps
            ps = client.ps()
            return not ps["requests"] and bool(ps["kv"]) and all(row["blocks_used"] == 0 for row in ps["kv"])

        until(idle, seconds, lambda: f"idle: {ps}")


def busy(node: Node) -> bool:
    with Client([node.address]) as client:
        return bool(client.ps()["requests"])


def tokenizer(cluster: LocalCluster) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(cluster.folder.parent / "tiny" / "tokenizer.json"))


def test_greedy_text_at_a_node_that_holds_nothing_equals_the_reference(
    cluster: LocalCluster, outsider: Node
) -> None:
    encoder = tokenizer(cluster)
    ids = encoder.encode(PROMPT).ids
    expected = reference_tokens(Path(cluster.folder.parent / "tiny"), ids, 24)
    with openai_client(outsider) as client:
        extra = {"ignore_eos": True}
        whole = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, extra_body=extra
        )
        assert whole.choices[0].text == encoder.decode(expected)
        assert whole.usage is not None and whole.usage.completion_tokens == 24
        stream = client.completions.create(
            model="tiny", prompt=ids, max_tokens=24, temperature=0, stream=True, extra_body=extra
        )
        assert "".join(c.choices[0].text for c in stream) == encoder.decode(expected)


def test_a_chat_with_a_seed_repeats_on_every_node(cluster: LocalCluster) -> None:
    texts = set()
    for node in cluster.nodes:
        with openai_client(node) as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=16,
                seed=5,
                logprobs=True,
            )
            assert answer.choices[0].logprobs is not None
            texts.add(answer.choices[0].message.content)
            assert [m.id for m in client.models.list().data] == ["tiny"]
    assert len(texts) == 1


def test_a_client_that_leaves_frees_every_stage_within_two_seconds(
    cluster: LocalCluster, outsider: Node
) -> None:
    with openai_client(outsider) as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        for _, _ in zip(range(20), stream, strict=False):
            pass
        assert busy(outsider)
        stream.close()
    settle(outsider, 2.0)


def test_a_client_that_never_reads_holds_up_nobody(cluster: LocalCluster, outsider: Node) -> None:
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 3000,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 20,
        }
    ).encode()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", outsider.api_port))
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body)}", "", ""]
        lazy.sendall("\r\n".join(head).encode() + body)
        with openai_client(outsider) as client:
            answer = client.completions.create(
                model="tiny", prompt="other", max_tokens=50, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 50
    settle(outsider, 3.0)


def test_a_killed_node_in_the_middle_is_an_error_event_that_names_its_layers(
    cluster: LocalCluster, outsider: Node
) -> None:
    assert outsider is cluster.nodes[2]
    victim = cluster.nodes[0]
    with openai_client(outsider) as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        started = 0.0
        with pytest.raises(openai.APIError, match="layers") as caught:
            for number, _ in enumerate(stream):
                if number == 20:
                    started = time.monotonic()
                    victim.kill(signal.SIGKILL)
        assert started and 2.5 < time.monotonic() - started < 8, "it waited for the node to return"
        assert caught.value.code in ("stage_lost", "unreachable")
    with openai_client(outsider) as client:  # it still answers
        assert client.models.list().data is not None
