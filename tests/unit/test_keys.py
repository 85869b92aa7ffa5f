"""Keys of the HTTP API: kept as hashes, limited, revoked."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from p2pshard_node.keys import MAX_KEYS, PREFIX, ApiKeys

from p2pshard.errors import Conflict, InvalidRequest, Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_key_is_kept_as_its_hash_in_a_private_file_and_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = ApiKeys(path)
    key, secret = await keys.create("phone", per_minute=60, at_once=2)
    assert secret.startswith(PREFIX) and len(secret) > 40
    assert secret not in path.read_text() and secret[len(PREFIX) :] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = ApiKeys(path)
    assert again.find(secret) == key and again.all() == [key] and "sha256" not in key.to_json()
    assert again.find("") is None and again.find(secret + "x") is None and again.find("p2psk-ÿ\udcff") is None
    await again.revoke("phone")
    assert again.find(secret) is None and ApiKeys(path).all() == []
    with pytest.raises(InvalidRequest, match="no key 'phone'"):
        await again.revoke("phone")


@pytest.mark.parametrize("name", ["", "-x", "a b", "../x", "x" * 64, "ключ"])
async def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await ApiKeys(tmp_path / "keys.json").create(name)


async def test_a_name_is_used_once_and_there_is_an_end_to_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    await keys.create("a")
    with pytest.raises(Conflict, match="already"):
        await keys.create("a")
    assert MAX_KEYS > 1
    monkeypatch.setattr("p2pshard_node.keys.MAX_KEYS", 1)
    with pytest.raises(Conflict, match="revoke some"):
        await keys.create("b")
    for bad in ({"per_minute": -1}, {"at_once": 10**9}):
        with pytest.raises(InvalidRequest):
            await keys.create("c", **bad)


async def test_limits_say_when_to_come_again(tmp_path: Path) -> None:
    clock = Clock()
    keys = ApiKeys(tmp_path / "keys.json", clock=clock)
    key, _ = await keys.create("a", per_minute=3, at_once=2)
    with keys.use(key), keys.use(key):
        with pytest.raises(Overloaded, match="2 requests under way") as full, keys.use(key):
            pass
        assert full.value.details["retry_after_s"] == 1.0
    with keys.use(key):
        pass
    with pytest.raises(Overloaded, match="3 requests a minute") as often, keys.use(key):
        pass
    assert often.value.details["retry_after_s"] == 20
    clock.now += 20
    with keys.use(key):
        pass
    clock.now += 3600
    for _ in range(3):  # a minute's worth is the most that is saved up
        with keys.use(key):
            pass
    with pytest.raises(Overloaded), keys.use(key):
        pass


async def test_a_key_without_limits_has_none(tmp_path: Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    key, _ = await keys.create("a")
    for _ in range(1000):
        with keys.use(key):
            pass


@pytest.mark.parametrize("text", ["{", "[1]", '[{"name": "a"}]'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(Conflict, match="damaged"):
        ApiKeys(tmp_path / "keys.json")
