"""The door of the HTTP API: who comes in, and what the others read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from p2pshard_node.api.app import error_response
from p2pshard_node.api.guard import Guard
from p2pshard_node.api.origins import Origins
from p2pshard_node.keys import ApiKeys
from starlette.responses import JSONResponse

Answer = tuple[int, dict[str, Any], httpx.Headers]


class Door:
    def __init__(self, folder: Path, *allowed: str) -> None:
        self.keys = ApiKeys(folder / "keys.json")
        self.under_way = 0
        self.asked: list[str] = []
        self.guard = Guard(
            self.app,
            origins=Origins(lambda: {"desk"}, allowed),
            keys=self.keys,
            is_local=lambda host: host == "127.0.0.1",
            answer=error_response,
        )

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        await JSONResponse({"ok": True})(scope, receive, send)

    async def ask(
        self, client: str = "127.0.0.1", host: str = "localhost:7331", method: str = "GET", **headers: str
    ) -> Answer:
        transport = httpx.ASGITransport(app=self.guard, client=(client, 1234))  # type: ignore[arg-type]
        given = {"host": host, **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
            reply = await http.request(method, "/v1/models", headers=given)
        return reply.status_code, reply.json() if reply.content else {}, reply.headers


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def test_programs_of_this_machine_need_nothing(door: Door) -> None:
    assert (await door.ask())[0] == 200
    assert (await door.ask(authorization="Bearer none"))[0] == 200, "clients that must send something"


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"host": ""}],
)
async def test_foreign_pages_get_403_on_loopback_too(door: Door, headers: dict[str, str]) -> None:
    status, body, answered = await door.ask(**headers)
    assert status == 403 and "--allow-origin" in body["error"]["message"] and door.asked == []
    assert "access-control-allow-origin" not in answered
    assert (await door.ask(method="OPTIONS", **headers))[0] == 403


async def test_own_pages_may_read_the_answers(door: Door) -> None:
    status, _, headers = await door.ask(origin="http://localhost:3000")
    assert status == 200 and headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "origin" in headers["vary"].lower()
    status, _, headers = await door.ask(method="OPTIONS", origin="http://localhost:3000")
    assert status == 204 and "POST" in headers["access-control-allow-methods"]
    assert len(door.asked) == 1, "a browser's question is answered here"
    assert "access-control-allow-origin" not in (await door.ask())[2]


async def test_pages_that_were_allowed(tmp_path: Path) -> None:
    door = Door(tmp_path, "https://chat.example")
    assert (await door.ask(origin="https://chat.example"))[0] == 200
    assert (await door.ask(host="chat.example"))[0] == 200
    assert (await door.ask(origin="https://other.example"))[0] == 403


async def test_other_machines_need_a_key(door: Door) -> None:
    _, secret = await door.keys.create("phone")
    status, body, headers = await door.ask("10.0.0.9")
    assert (
        status == 401
        and headers["www-authenticate"] == "Bearer"
        and "keys create" in body["error"]["message"]
    )
    assert body["error"]["code"] == "unauthenticated" and body["error"]["type"] == "authentication_error"
    for wrong in ("Bearer x", f"Basic {secret}", f"Bearer {secret}x", "Bearer", secret):
        assert (await door.ask("10.0.0.9", authorization=wrong))[0] == 401
    assert door.asked == []
    assert (await door.ask("10.0.0.9", authorization=f"Bearer {secret}"))[0] == 200
    assert (await door.ask("10.0.0.9", authorization=f"bearer  {secret} "))[0] == 200
    await door.keys.revoke("phone")
    assert (await door.ask("10.0.0.9", authorization=f"Bearer {secret}"))[0] == 401


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded", "x_real_ip"])
async def test_whom_a_proxy_speaks_for_is_elsewhere(door: Door, header: str) -> None:
    assert (await door.ask(**{header: "10.0.0.9"}))[0] == 401


async def test_limits_of_a_key(door: Door) -> None:
    _, secret = await door.keys.create("phone", per_minute=2)
    given = {"authorization": f"Bearer {secret}"}
    assert [(await door.ask("10.0.0.9", **given))[0] for _ in range(3)] == [200, 200, 429]
    status, body, headers = await door.ask("127.0.0.1", **given)
    assert status == 429 and headers["retry-after"] == "30", (
        "a key that is sent counts wherever it comes from"
    )
    assert body["error"]["code"] == "overloaded"


async def test_refusals_are_logged_once_each_and_never_with_the_key(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await door.ask("10.0.0.9", authorization="Bearer p2psk-secret")
            await door.ask("10.0.0.8")
    lines = [r.getMessage() for r in caplog.records if r.name == "p2pshard.api"]
    assert len(lines) == 2 and "10.0.0.9" in lines[0] and "10.0.0.8" in lines[1]
    assert "p2psk-secret" not in caplog.text
