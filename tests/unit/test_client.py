"""The client library against a Node service of this process."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pshard import AsyncClient, Client
from p2pshard.client.references import is_this_machine, resolve_reference
from p2pshard.discovery import PROTOCOL, Announcement, cluster_hash
from p2pshard.errors import (
    ContextExceeded,
    DeadlineExceeded,
    DoesNotFit,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    NotReady,
    ProtocolError,
    StageLost,
)
from tests.fake_node import PLAN, FakeNode


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.fixture
def client(node: FakeNode) -> Iterator[Client]:
    with Client(node.address) as client:
        yield client


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def test_an_answer_arrives_in_pieces_and_as_a_whole(client: Client) -> None:
    stream = client.chat("tiny", "What is the capital of France?")
    pieces = list(stream)
    assert [str(p) for p in pieces] == ["The ", "capital ", "is ", "Paris."]
    assert [t.id for p in pieces for t in p.tokens] == [100, 101, 102, 103]
    whole = stream.result()
    assert whole.text == stream.text == "The capital is Paris."
    assert whole.token_ids == (100, 101, 102, 103)
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("stop", 3, 4)
    assert (whole.ttft_ms, whole.tokens_per_second, whole.plan) == (12.5, 34.5, PLAN)


def test_the_request_says_what_was_asked(client: Client, node: FakeNode) -> None:
    client.generate(
        "tiny", [5, 6], max_tokens=9, temperature=0.5, top_k=3, seed=0, stop="END", logprobs=2
    ).result()
    asked = node.asked[-1]
    assert (asked.WhichOneof("input"), list(asked.prompt_ids.ids)) == ("prompt_ids", [5, 6])
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_k) == (9, 0.5, 3)
    assert asked.has_seed  # seed 0 is a seed
    assert (list(asked.stop), asked.sampling.logprobs, asked.sampling.top_p) == (["END"], 2, 1.0)
    client.generate("tiny", "", speculation="adaptive", ignore_eos=True).result()
    assert (node.asked[-1].WhichOneof("input"), node.asked[-1].has_seed) == ("prompt", False)
    assert (asked.draft, asked.ignore_eos) == (0, False)
    assert (node.asked[-1].draft, node.asked[-1].ignore_eos) == (-1, True)
    client.chat("tiny", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]).result()
    assert [(m.role, m.content) for m in node.asked[-1].chat.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
     ({"deadline_s": -1}, "deadline_s"), ({"seed": 2**64}, "seed"), ({"speculation": 17}, "speculation")],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_before_anything_is_sent(
    client: Client, node: FakeNode, options, field
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate("tiny", "x", **options)
    assert refused.value.details["field"] == field
    assert node.asked == []


def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("tiny", "x", temprature=1)  # type: ignore[call-arg]


def test_a_chat_message_with_something_else_in_it_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="exactly 'role' and 'content'"):
        client.chat("tiny", [{"role": "user", "content": "x", "name": "me"}])


def test_break_cancels_the_request(client: Client, node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    stream = client.generate("tiny", "x")
    for _ in stream:
        break
    assert node.cancelled.wait(2)
    assert (stream.finish_reason, stream.completion_tokens, stream.text) == ("cancelled", 1, "a")


def test_close_and_context_manager_cancel(client: Client, node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    with client.generate("tiny", "x") as stream:
        next(iter(stream))
    assert node.cancelled.wait(2)
    node.cancelled.clear()
    client.generate("tiny", "x").close()
    assert node.cancelled.wait(2)


def test_a_stream_that_nobody_holds_is_cancelled(client: Client, node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    stream = client.generate("tiny", "x")
    del stream
    gc.collect()
    assert node.cancelled.wait(2)


async def test_break_in_an_async_loop_cancels(node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    async with AsyncClient(node.address) as client:
        stream = client.generate("tiny", "x")
        async for _ in stream:
            break
        assert await asyncio.to_thread(node.cancelled.wait, 2)
        assert (await stream).finish_reason == "cancelled"


async def test_a_cancelled_task_cancels(node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    async with AsyncClient(node.address) as client:
        task = asyncio.create_task(client.generate("tiny", "x").result())
        assert await asyncio.to_thread(node.was_asked.wait, 5)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(node.cancelled.wait, 2)


async def test_awaiting_a_stream_gives_the_whole(node: FakeNode) -> None:
    async with AsyncClient(node.address) as client:
        assert (await client.chat("tiny", "x")).text == "The capital is Paris."


async def test_closing_from_elsewhere_ends_the_loop(node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    async with AsyncClient(node.address) as client:
        stream = client.generate("tiny", "x")

        first = asyncio.Event()

        async def read() -> int:
            count = 0
            async for _ in stream:
                count += 1
                first.set()
            return count

        task = asyncio.create_task(read())
        await first.wait()
        await stream.aclose()
        assert await asyncio.wait_for(task, 2) >= 1


@pytest.mark.parametrize(
    "error",
    [
        ContextExceeded("prompt has 9,000 tokens, the context is 2,048", prompt_tokens=9000, context=2048),
        NotReady("loading", state="loading", reason="node b loads"),
        ModelNotFound("no model of that name"),
    ],
)
def test_errors_come_back_as_they_were_raised(client: Client, node: FakeNode, error) -> None:
    node.error = error
    with pytest.raises(type(error)) as caught:
        client.generate("tiny", "x")
    assert caught.value.message == error.message
    assert caught.value.details == error.details


def test_an_error_in_the_middle_keeps_its_type_and_what_came(client: Client, node: FakeNode) -> None:
    node.break_after, node.break_with = 2, StageLost("node b is gone", node="b", layers=[10, 19])
    stream, came = client.generate("tiny", "x"), []
    with pytest.raises(StageLost) as caught:
        for piece in stream:
            came.append(piece.text)
    assert caught.value.details["layers"] == [10, 19]
    assert came == ["The ", "capital "]
    with pytest.raises(StageLost):  # it is not forgotten
        stream.result()


def test_an_answer_without_an_end_is_an_error(client: Client, node: FakeNode) -> None:
    node.finishes = False
    with pytest.raises(ProtocolError, match="without a finish reason"):
        client.generate("tiny", "x").result()


def test_a_node_that_dies_in_the_middle_is_named(node: FakeNode) -> None:
    node.words, node.between_s = ["a"] * 10_000, 0.01
    with Client(node.address) as client:
        stream = client.generate("tiny", "x")
        pieces = iter(stream)
        next(pieces)
        node.stop()
        with pytest.raises(NodeUnreachable, match=node.address):
            for _ in pieces:
                pass


def test_the_second_address_is_tried(node: FakeNode) -> None:
    with Client([closed_port(), node.address]) as client:
        assert client.status().nodes[0].name == "a"
        assert client.connect() == node.address


def test_a_node_that_goes_away_is_replaced_by_the_next(node: FakeNode) -> None:
    with FakeNode() as second, Client([node.address, second.address]) as client:
        assert client.connect() == node.address
        node.stop()
        assert client.generate("tiny", "x").text == "The capital is Paris."
        assert client.connect() == second.address


def test_what_a_node_says_of_another_is_not_taken_for_its_own_silence(node: FakeNode) -> None:
    with FakeNode() as second, Client([node.address, second.address]) as client:
        node.error = NodeUnreachable("the cluster has no coordinator after 10 s", tried=[])
        for call in (client.status, lambda: client.generate("tiny", "x").text):
            with pytest.raises(NodeUnreachable, match="no coordinator after 10 s"):
                call()
        assert client.connect() == node.address


def test_nor_is_what_it_says_in_the_middle_of_an_answer_or_of_a_time_that_passed(
    client: Client, node: FakeNode
) -> None:
    node.break_after, node.break_with = 2, NodeUnreachable("layers 10-19 have no node")
    with pytest.raises(NodeUnreachable) as broken:
        client.generate("tiny", "x").result()
    assert broken.value.message == "layers 10-19 have no node"
    node.error = DeadlineExceeded("node b did not answer within 5 s")
    with pytest.raises(DeadlineExceeded, match="node b did not answer within 5 s"):
        client.status()


def test_the_last_node_that_broke_off_is_the_cause_that_no_daemon_answers(node: FakeNode) -> None:
    async def ask() -> None:
        async with AsyncClient([node.address]) as client:
            await client.connect()
            node.stop()
            await client.status()

    with pytest.raises(NodeUnreachable, match="no daemon answers") as caught:
        asyncio.run(ask())
    assert isinstance(caught.value.__cause__, NodeUnreachable)
    assert node.address in caught.value.__cause__.message


def test_unreachable_says_what_was_tried() -> None:
    first, second = closed_port(), closed_port()
    with Client([first, second]) as client, pytest.raises(NodeUnreachable) as caught:
        client.status()
    assert caught.value.details["tried"] == [first, second]
    assert first in caught.value.message
    assert "p2pshard up" in caught.value.message


def test_zeroconf_is_asked_when_no_daemon_runs_here(node: FakeNode, monkeypatch) -> None:
    asked: list[tuple[float, str]] = []

    async def browse(timeout: float, *, cluster: str, enough: int) -> list[Announcement]:
        asked.append((timeout, cluster))
        # an address of another network beside the one that works
        addresses = (("::1", 9), ("127.0.0.1", node.port))
        return [Announcement("id-a", cluster_hash(cluster), PROTOCOL, "0.1", addresses)]

    monkeypatch.setattr("p2pshard.discovery.browse", browse)
    monkeypatch.setenv("P2PSHARD_PORT", closed_port().rpartition(":")[2])
    monkeypatch.setenv("P2PSHARD_CLUSTER", "home")
    with Client() as client:
        assert client.connect() == node.address
    assert [cluster for _, cluster in asked] == ["home"]


def test_zeroconf_is_not_asked_when_a_daemon_runs_here(node: FakeNode, monkeypatch) -> None:
    async def browse(*_: object, **__: object) -> list[Announcement]:
        raise AssertionError("not needed")

    monkeypatch.setattr("p2pshard.discovery.browse", browse)
    monkeypatch.setenv("P2PSHARD_PORT", str(node.port))
    with Client() as client:
        assert client.status().nodes


def test_a_silent_address_costs_its_timeout_only(node: FakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with Client([address, node.address], connect_timeout_s=0.5) as client:
            client.status()
        assert time.monotonic() - begin < 2


def test_deploy_reports_progress_and_returns_when_ready(client: Client, node: FakeNode) -> None:
    seen: list[str] = []
    deployment = client.deploy(
        "tiny", context=512, layers={"a": (0, 9)}, on_progress=lambda d: seen.append(d.state)
    )
    assert seen == ["loading", "ready"]
    assert (deployment.model, deployment.plan) == ("tiny", PLAN)
    assert '"context": 512' in node.asked[-1].settings_json
    assert '"layers": {"a": [0, 9]}' in node.asked[-1].settings_json


def test_deploy_that_ends_otherwise_is_an_error(client: Client, node: FakeNode) -> None:
    node.progress = [{"state": "broken", "model": "tiny", "reason": "node b refused: no memory"}]
    with pytest.raises(NotReady, match="no memory") as caught:
        client.deploy("tiny")
    assert caught.value.details["state"] == "broken"


def test_deploy_that_does_not_fit_keeps_the_numbers(client: Client, node: FakeNode) -> None:
    node.error = DoesNotFit("short", shortfall_bytes=123, terms=[], suggestions=["use a smaller context"])
    with pytest.raises(DoesNotFit) as caught:
        client.deploy("tiny")
    assert caught.value.details["shortfall_bytes"] == 123


def test_status_and_ps_are_typed(client: Client) -> None:
    status = client.status()
    assert [n.name for n in status.nodes] == ["a", "b", "c"]
    deployment = status.deployment("tiny")
    assert deployment is not None
    assert (deployment.plan, deployment.measured[0].pid) == (PLAN, 4242)
    assert status["not_joined"][0]["address"] == status.not_joined[0].address == "10.0.0.9:7332"
    requests = client.ps()
    assert (requests.requests[0].completion_tokens, requests.kv[0].blocks_total) == (7, 128)
    assert (requests.requests[0].node, requests.unreachable[0].node) == ("id-b", "id-c")
    models = client.models()
    assert (len(models), models[0].nodes, models.unreachable) == (1, ("a",), ())


def test_many_threads_share_a_client(client: Client) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(client.generate("tiny", "x").text)) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert texts == ["The capital is Paris."] * 8


def test_a_closed_client_says_so_and_leaves_no_thread(node: FakeNode) -> None:
    before = threading.active_count()
    client = Client(node.address)
    client.status()
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(InvalidRequest, match="closed"):
        client.status()


def test_a_path_is_made_absolute_for_this_machine(
    client: Client, node: FakeNode, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"x")
    client.plan("./m.gguf")
    assert node.asked[-1].model == str(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound, match="does not exist"):
        client.plan("other.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    client.plan("folder")
    assert node.asked[-1].model == str(tmp_path / "folder")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    client.plan("model.safetensors")
    assert node.asked[-1].model == str(tmp_path / "model.safetensors")
    client.plan("tiny")
    assert node.asked[-1].model == "tiny"


def test_a_path_and_a_remote_node_is_refused_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"192\.0\.2\.7:7332 is another one"):
        resolve_reference("./m.gguf", "192.0.2.7:7332")
    assert resolve_reference("tiny", "192.0.2.7:7332") == "tiny"
    for text, fault in (("", "empty"), ("a\0b", "NUL"), ("x" * 5000, "5000 characters")):
        with pytest.raises(InvalidRequest, match=fault):
            resolve_reference(text, "127.0.0.1:7332")
    assert is_this_machine("127.0.0.1:1")
    assert is_this_machine("localhost:1")
    assert not is_this_machine("no-such-host.invalid:1")


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, p2pshard, p2pshard.client, p2pshard.config, p2pshard.cli.app as m\n"
        "for verb in m._VERBS: m.cli.get_command(None, verb)\n"
        "p2pshard.Client; p2pshard.Plan\n"
        "bad = {'torch', 'transformers', 'p2pshard_node'} & {n.partition('.')[0] for n in sys.modules}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_request_larger_than_a_message_is_refused_and_not_called_a_full_queue(node: FakeNode) -> None:
    with Client(node.address) as client, pytest.raises(InvalidRequest, match="larger than a message may be"):
        client.generate("tiny", "x" * (9 << 20)).result()
