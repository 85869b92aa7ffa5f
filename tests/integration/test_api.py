"""The HTTP API on a real port, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from p2pshard_node.api import body, server
from p2pshard_node.api.app import create_app
from p2pshard_node.api.server import Handle, serve
from p2pshard_node.gateway.gateway import Gateway, Limits

from tests.fake_driver import FakeCluster, FakeDriver, MemoryStore, make_plan, spells

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Api:
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    driver: FakeDriver
    cluster: FakeCluster
    gateway: Gateway
    handle: Handle


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    store = MemoryStore()
    driver = FakeDriver(make_plan(store.manifest.digest, context=512))
    await driver.start()
    cluster = FakeCluster(store, driver)
    gateway = Gateway("node-c", store, cluster, limits=Limits(ready_s=0.3))
    handle = await serve(create_app(gateway, cluster), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{handle.port}"
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        yield Api(client, http, driver, cluster, gateway, handle)
    await handle.stop()
    await gateway.close()
    await driver.kill()


async def quiet(api: Api, timeout: float = 1.0) -> None:
    async with asyncio.timeout(timeout):
        while api.driver.running or api.gateway.ps():
            await asyncio.sleep(0.01)


async def test_chat(api: Api) -> None:
    api.driver.next_token = spells("Paris 🇫🇷.")
    answer = await api.openai.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Paris 🇫🇷.",
        "stop",
    )
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    size = len("Paris 🇫🇷.".encode()) + 1
    assert (
        answer.usage.completion_tokens == size
        and answer.usage.total_tokens == answer.usage.prompt_tokens + size
    )
    (submit,) = api.driver.submits
    assert (submit.sampling.seed, submit.sampling.temperature) == (3, 0)


async def test_chat_stream_with_usage(api: Api) -> None:
    api.driver.next_token = spells("Paris 🇫🇷.")
    stream = await api.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == "Paris 🇫🇷." and not any("\ufffd" in p for p in pieces)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert (
        chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16
    )
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_completions(api: Api) -> None:
    answer = await api.openai.completions.create(model="tiny", prompt="hi")
    assert (
        answer.object == "text_completion" and answer.choices[0].text == "cdefghijklmnopqr"
    )  # 16: OpenAI's default
    assert answer.choices[0].finish_reason == "length"
    by_ids = await api.openai.completions.create(model="tiny", prompt=[*b"hi"], max_tokens=3)
    assert by_ids.choices[0].text == "cde"
    stream = await api.openai.completions.create(model="tiny", prompt=["hi"], max_tokens=5, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "cdefg"


async def test_stop_as_string_and_as_list(api: Api) -> None:
    api.driver.next_token = spells("one two three")
    for stop in ("two", ["nine", "two"]):
        answer = await api.openai.chat.completions.create(model="tiny", messages=MESSAGES, stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")


async def test_every_setting_reaches_the_driver(api: Api) -> None:
    await api.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=4,
        top_p=0.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=-1,
        user="someone",
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "ignore_eos": True,
            "speculation": "adaptive",
        },
    )
    (submit,) = api.driver.submits
    s = submit.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (1.0, 0.5, 7, 0.125)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.5, 0.25, -0.5)
    assert (s.seed, submit.max_tokens, list(submit.eos_ids)) == (2**64 - 1, 4, [])
    assert submit.draft == -1


async def test_chat_logprobs(api: Api) -> None:
    api.driver.next_token = spells("é!")
    answer = await api.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert b"".join(bytes(t.bytes or []) for t in content) == "é!".encode()  # the end token is no text
    assert content[2].token == "!" and content[2].logprob == -0.5
    assert [t.token for t in content[2].top_logprobs] == ["!", '"']
    stream = await api.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, stream=True
    )
    tokens = [
        t
        async for c in stream
        if c.choices and c.choices[0].logprobs
        for t in c.choices[0].logprobs.content or []
    ]
    assert b"".join(bytes(t.bytes or []) for t in tokens) == "é!".encode()
    assert all(t.top_logprobs == [] for t in tokens)


async def test_completion_logprobs(api: Api) -> None:
    answer = await api.openai.completions.create(model="tiny", prompt="hi", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["c", "d", "e"] and logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2] and logprobs.top_logprobs == [
        {"c": -0.5},
        {"d": -0.5},
        {"e": -0.5},
    ]


async def test_models_and_health(api: Api) -> None:
    (model,) = (await api.openai.models.list()).data
    assert model.id == "tiny" and model.owned_by == "p2pshard"
    extra: Any = model
    assert (extra.context, extra.state, extra.dtype, extra.nodes) == (512, "ready", "float32", 2)
    assert (await api.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await api.openai.models.retrieve("other")
    health = (await api.http.get("/health")).json()
    assert (health["status"], health["members"], health["deployments"]) == ("ok", 3, {"tiny": "ready"})


async def test_errors_have_the_classes_of_openais_client(api: Api) -> None:
    create = api.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="p2pshard deploy gpt-9") as missing:
        await create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="512") as long:
        await create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    assert long.value.code == "context_length_exceeded"
    api.cluster.state, api.cluster.reason = "broken", "node-b left"
    with pytest.raises(openai.InternalServerError, match="broken") as broken:
        await create(model="tiny", messages=MESSAGES)
    assert broken.value.status_code == 503


async def post(api: Api, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    base = {"model": "tiny", "messages": MESSAGES} if "chat" in path else {"model": "tiny", "prompt": "hi"}
    return await api.http.post(path, json={**base, **body})


REFUSED: list[Any] = [
    ("n", 2),
    ("n", True),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "auto"),
    ("response_format", {"type": "json_object"}),
    ("logit_bias", {"1": 5}),
    ("audio", {}),
    ("store", True),
    ("made_up", 1),
    ("temperature", "hot"),
    ("temperature", 3),
    ("top_p", 0),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("stream", 1),
    ("stop", [1]),
    ("stop", [""]),
    ("seed", 2**64),
    ("messages", []),
    ("messages", "hi"),
    ("model", ""),
    ("top_logprobs", 2),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"other": 1}),
]


async def test_what_is_not_done_is_refused_by_name(api: Api) -> None:
    for field, value in REFUSED:
        reply = await post(api, **{field: value})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"].startswith(field), error
        assert field.split("_")[0] in error["message"] or "stop string" in error["message"]
        assert api.driver.submits == []


MESSAGES_REFUSED: list[Any] = [
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "messages[0].content[0]",
    ),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ({"role": "king", "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": "x", "more": 1}, "messages[0].more"),
    ({"role": "tool", "content": "x"}, "messages[0].role"),
    ({"role": "user", "content": [1.5] * 5_000}, "messages[0].content"),
    ({"role": "user", "content": [1.5] * 100_000}, "messages[0].content"),
]


async def test_messages_that_a_text_model_cannot_take(api: Api) -> None:
    for message, param in MESSAGES_REFUSED:
        reply = await post(api, messages=[message])
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(param)


async def test_a_developers_message_is_a_systems(api: Api) -> None:
    said = {}
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "be brief"}, {"role": "user", "content": "x"}]
        assert (await post(api, messages=messages, max_tokens=1)).status_code == 200
        said[role] = list(api.driver.submits[-1].prompt_ids)
    assert said["system"] == said["developer"]


async def test_a_large_body_that_is_wrong_costs_next_to_nothing(api: Api) -> None:
    """Not an error for each of its items, and three forms tried for each."""
    for field, path in (("prompt", "/v1/completions"), ("messages", "/v1/chat/completions")):
        began = time.monotonic()
        reply = await post(api, path, **{field: [1.5] * 400_000})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(field)
        assert time.monotonic() - began < 1.0


COMPLETIONS_REFUSED: list[Any] = [
    ("echo", True),
    ("best_of", 2),
    ("suffix", "x"),
    ("prompt", ["a", "b"]),
    ("prompt", [1, True]),
    ("prompt", [[1], [2]]),
    ("prompt", {}),
]


async def test_completions_refuse_by_name(api: Api) -> None:
    for field, value in COMPLETIONS_REFUSED:
        reply = await post(api, "/v1/completions", **{field: value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field


async def test_what_says_nothing_is_taken(api: Api) -> None:
    reply = await post(
        api,
        n=1,
        tools=[],
        tool_choice=None,
        logit_bias={},
        response_format={"type": "text"},
        temperature=None,
        max_tokens=2,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": None,
            }
        ],
    )
    assert reply.status_code == 200, reply.text
    assert b"user\nab" in bytes(i for i in api.driver.submits[0].prompt_ids if i < 256)


NO_REQUESTS = [
    (b"{}", "text/plain", 415),
    (b"{", "application/json", 400),
    (b"[]", "application/json", 400),
    (b"\xff", "application/json", 400),
    (b'{"model": NaN}', "application/json", 400),
    (b"[" * 100_000, "application/json", 400),
    (rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}', "application/json", 400),
    (rb'{"model": "\udfff", "messages": [{"role": "user", "content": "a"}]}', "application/json", 400),
    (rb'{"model": "tiny", "\uDABCx": 1}', "application/json", 400),
    (json.dumps({str(i): i for i in range(2000)}).encode(), "application/json", 400),
    (
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": ""}] * 10_001}).encode(),
        "application/json",
        400,
    ),
    (b'"' + b"x" * (9 << 20) + b'"', "application/json", 413),
]


async def test_bodies_that_are_no_request(api: Api) -> None:
    for content, kind, status in NO_REQUESTS:
        reply = await api.http.post("/v1/chat/completions", content=content, headers={"content-type": kind})
        assert reply.status_code == status and reply.json()["error"]["message"], content[:20]


@pytest.mark.parametrize(
    ("kind", "part", "status", "said"),
    [
        ("application/json", b'{"model": ', 408, b"10 bytes"),
        ("application/json", b"[" * 2000, 413, b"1000 bytes"),
        ("text/plain", b"", 415, b"text/plain"),
    ],
)
async def test_a_body_that_is_not_read_to_its_end_ends_the_connection(
    api: Api, monkeypatch: pytest.MonkeyPatch, kind: str, part: bytes, status: int, said: bytes
) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.3)
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 1000)

    reader, writer = await asyncio.open_connection("127.0.0.1", api.handle.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: 3000\r\n\r\n"
    writer.write(head.encode() + part)
    async with asyncio.timeout(5):
        reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 %d " % status) and said in reply


@pytest.mark.parametrize("body", [{"prompt": "a" * (8_000_000)}, {"prompt": [1] * 2_000_000}])
async def test_a_prompt_without_end_is_refused_at_once_and_holds_up_nobody(
    api: Api, body: dict[str, Any]
) -> None:
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - before)

    content = json.dumps({"model": "tiny", **body}).encode()
    watcher = asyncio.create_task(watch())
    began = time.perf_counter()
    reply = await api.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    took = time.perf_counter() - began
    watcher.cancel()
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text
    assert took < 3 and longest < 1, (took, longest)  # encoding all of it takes ten seconds


async def test_a_client_that_leaves_within_its_body_is_no_fault(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", api.handle.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 3000\r\n\r\n{"model"'
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    await asyncio.sleep(0.3)
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []
    assert (await api.http.get("/health")).status_code == 200


async def test_idle_and_surplus_connections_are_closed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server, "FIRST_REQUEST_S", 0.5)

    async def ended(reader: asyncio.StreamReader, within: float) -> bool:
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(within):
                return await reader.read() == b""
        return True

    opened = [await asyncio.open_connection("127.0.0.1", api.handle.port) for _ in range(10)]
    opened[0][1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await opened[0][0].readline()).startswith(b"HTTP/1.1 200")
    assert all([await ended(reader, 0.4) for reader, _ in opened[4:]])
    assert all([await ended(reader, 2) for reader, _ in opened[1:4]])
    opened[0][1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # it has asked before
    async with asyncio.timeout(2):
        while b"HTTP/1.1 200" not in await opened[0][0].readline():
            pass
    for _, writer in opened:
        writer.close()


async def test_unknown_paths_and_methods_have_the_same_shape(api: Api) -> None:
    assert (await api.http.get("/v1/nothing")).json()["error"]["message"].startswith("GET /v1/nothing")
    wrong = await api.http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"


async def test_an_error_in_the_middle_is_an_event_and_never_a_silent_end(api: Api) -> None:
    api.driver.fail_at = 3
    stream = await api.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="layers 2-3"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert len(text) == 3
    with pytest.raises(openai.InternalServerError, match="layers 2-3") as whole:
        await api.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.value.status_code == 503 and whole.value.code == "stage_lost"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay", [0.01, 30.0], ids=["answering", "waiting"])
async def test_a_client_that_goes_away_cancels_within_a_second(api: Api, stream: bool, delay: float) -> None:
    api.driver.delay_s = delay
    body = {"model": "tiny", "prompt": "hi", "stream": stream, "max_tokens": 400}
    with contextlib.suppress(httpx.ReadTimeout):
        async with api.http.stream(
            "POST", "/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.5)
        ) as reply:
            async for _ in reply.aiter_bytes():
                break
    assert len(api.driver.submits) == 1
    await quiet(api)
    assert len(api.driver.cancelled) == 1


async def test_clients_at_once_get_each_its_own(api: Api) -> None:
    api.driver.delay_s = 0.001

    async def one(size: int) -> tuple[int, str]:
        answer = await api.openai.completions.create(model="tiny", prompt="x" * size, max_tokens=20)
        return size, answer.choices[0].text

    for size, text in await asyncio.gather(*(one(n) for n in range(1, 13))):
        assert text == "".join(chr(ord("a") + (size + i) % 26) for i in range(20))
    assert api.driver.streams == 1


async def test_stop_is_quick_with_an_answer_open_and_frees_the_port(api: Api) -> None:
    api.driver.delay_s = 0.05
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 400}
    started = 0.0
    with contextlib.suppress(httpx.HTTPError):
        async with api.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if "content" in line and not started:
                    started = time.monotonic()
                    await api.handle.stop()
    assert 0 < time.monotonic() - started < 3
    await quiet(api)
    again = await serve(create_app(api.gateway, api.cluster), "127.0.0.1", api.handle.port)
    await again.stop()


async def test_a_taken_port_is_an_error_and_kills_nobody(api: Api) -> None:
    with pytest.raises(OSError):
        await serve(create_app(api.gateway, api.cluster), "127.0.0.1", api.handle.port)
    assert (await api.http.get("/health")).status_code == 200


async def test_the_stream_is_server_sent_events(api: Api) -> None:
    reply = await post(api, stream=True, max_tokens=1)
    assert (
        reply.headers["content-type"].startswith("text/event-stream")
        and "content-length" not in reply.headers
    )
    events = reply.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(json.loads(e.removeprefix("data: "))["object"] == "chat.completion.chunk" for e in events[:-2])
