"""Zeroconf on this machine's real interfaces: announced, found, withdrawn, and never ended by a passing error."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from p2pshard import discovery as module
from p2pshard.discovery import Announcement, Discovery, browse, cluster_hash
from tests.waiting import come_true


def announcer(
    cluster: str, found: Callable[[Announcement], None] = lambda a: None, *, node: str = ""
) -> Discovery:
    return Discovery(
        node=node or uuid.uuid4().hex[:16],
        nonce=uuid.uuid4().hex[:16],
        cluster=cluster,
        version="0.1.0",
        port=7332,
        addresses=lambda: ["127.0.0.1"],
        found=found,
    )


async def test_two_find_each_other_and_a_client_finds_both() -> None:
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    seen: dict[str, list[Announcement]] = {"a": [], "b": []}
    a, b = (announcer(cluster, seen[k].append, node=k * 16) for k in "ab")
    a.start()
    b.start()
    try:
        await come_true(
            lambda: any(x.id == "b" * 16 for x in seen["a"]) and any(x.id == "a" * 16 for x in seen["b"])
        )
        announcement = next(x for x in seen["a"] if x.id == "b" * 16)
        assert announcement.addresses == (("127.0.0.1", 7332),)
        assert (announcement.protocol, announcement.version) == (module.PROTOCOL, "0.1.0")
        assert announcement.cluster == cluster_hash(cluster) and cluster not in repr(announcement)
        found = await browse(8.0, cluster=cluster, enough=2)
        assert {x.id for x in found} == {"a" * 16, "b" * 16}
        assert await browse(0.5, cluster="another") == []
    finally:
        await a.stop()
        await b.stop()
    assert await browse(1.0, cluster=cluster) == []  # withdrawn


async def test_a_copy_of_a_node_is_announced_beside_it() -> None:
    cluster = f"test-{uuid.uuid4().hex[:8]}"
    seen: list[Announcement] = []
    first, copy = (announcer(cluster, node="c" * 16) for _ in range(2))
    watcher = announcer(cluster, seen.append)
    for one in (first, copy, watcher):
        one.start()
    try:
        await come_true(lambda: sum(x.id == "c" * 16 for x in seen) >= 2)
    finally:
        for one in (first, copy, watcher):
            await one.stop()


@pytest.mark.parametrize("what", ["interfaces", "error"])
async def test_it_starts_anew_when_addresses_change_or_the_network_fails(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    interfaces = frozenset({"1/192.0.2.1"})
    sessions = 0
    fail = False
    opened = module._open

    async def counted() -> object:
        nonlocal sessions, fail
        sessions += 1
        if fail:
            fail = False
            raise OSError(101, "Network is unreachable")
        return await opened()

    monkeypatch.setattr(module, "_interfaces", lambda: interfaces)
    monkeypatch.setattr(module, "_open", counted)
    one = announcer("test-changes")
    one.start()
    try:
        await come_true(lambda: sessions == 1)
        fail = what == "error"
        interfaces = frozenset({"1/192.0.2.1", "2/198.51.100.7"})
        await come_true(lambda: sessions == (3 if what == "error" else 2))
        await come_true(lambda: one.trouble == "")
    finally:
        await one.stop()
