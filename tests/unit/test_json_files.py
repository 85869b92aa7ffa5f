"""The daemon's state on disk: written beside the loop, newest value last, and tried again."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from p2pshard_node import json_files
from p2pshard_node.cluster import agreement
from p2pshard_node.cluster.state import Deployments, deployment_id
from p2pshard_node.identity import Identity
from p2pshard_node.json_files import JsonFiles, read_json, write_json

from p2pshard.errors import Conflict, Internal
from p2pshard.transport.generated import control_pb2 as pb


class Disk:
    """A disk that takes its time: writes wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.busy, self.written, self.full = threading.Event(), threading.Event(), [], False
        monkeypatch.setattr(json_files, "write_json", self.write)

    def write(self, path: Path, value: Any) -> None:
        self.busy.set()
        assert self.go.wait(10)
        if self.full:
            raise OSError(28, "No space left on device")
        self.written.append((path.name, value))
        write_json(path, value)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def test_of_each_file_the_newest_value_is_written_once(tmp_path: Path, disk: Disk) -> None:
    files, path, other = JsonFiles(), tmp_path / "a.json", tmp_path / "b.json"
    files.put(path, 0)
    await asyncio.to_thread(disk.busy.wait)
    for value in range(1, 50):
        files.put(path, value)
        files.put(other, -value)
    waiting = asyncio.create_task(files.saved())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "saved means saved"
    disk.go.set()
    await waiting
    assert disk.written == [("a.json", 0), ("a.json", 49), ("b.json", -49)]
    assert (read_json(path), read_json(other)) == (49, -49)


async def test_what_could_not_be_written_is_said_and_written_later(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    files, path = JsonFiles(), tmp_path / "a.json"
    disk.go.set()
    disk.full = True
    files.put(path, {"n": 1})
    with pytest.raises(Internal, match=r"cannot be written: .*No space left"):
        await files.saved()
    assert "No space left" in caplog.text and not path.exists()
    disk.full = False
    await files.saved()
    assert read_json(path) == {"n": 1}


async def test_one_who_stops_waiting_takes_nothing_back(tmp_path: Path, disk: Disk) -> None:
    files, path = JsonFiles(), tmp_path / "a.json"
    files.put(path, 1)
    waiting = asyncio.create_task(files.saved())
    await asyncio.to_thread(disk.busy.wait)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    disk.go.set()
    await files.saved()
    assert read_json(path) == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(Conflict, match=r"a\.json is damaged"):
        read_json(tmp_path / "a.json")
    assert read_json(tmp_path / "b.json") is None


def test_nothing_that_the_loop_calls_waits_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    disk.go.set()
    identity = Identity.open(tmp_path / "node")
    table = Deployments(tmp_path / "deployments.json", "a")
    ledger = agreement.Ledger.open(tmp_path / "epochs")
    disk.go.clear()
    began = time.monotonic()
    identity.exceed(7)
    table.write(pb.Deployment(id=deployment_id("m"), model="m", manifest="m", wanted=True, state="planning"))
    ledger.put(agreement.Record("d", promised=agreement.Epoch(3, "a"), promised_digest="x"))
    assert time.monotonic() - began < 1.0 and identity.incarnation == 8
    disk.go.set()
    table.flush()
    ledger.flush()
    identity.close()
    again = Identity.open(tmp_path / "node")
    assert (again.id, again.incarnation) == (identity.id, 9)
    again.close()
    assert len(Deployments(tmp_path / "deployments.json", "a").all()) == 1
    assert agreement.Ledger.open(tmp_path / "epochs").get("d").promised == agreement.Epoch(3, "a")
