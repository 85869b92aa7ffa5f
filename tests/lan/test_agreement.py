"""The coordinator dies or stands still after one of three commits: two members are cut off before it sends them.

(The points before the commits are in tests/integration; only a network of its own can lose exactly a commit.)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.agreement_watch import Number, held, promise
from tests.lan.lab import Host, Lab
from tests.tiny import reference_tokens, write_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(600)]
PROMPT_IDS = [10, 20, 30, 40]
GENERATE = """
import json, sys
from p2pshard import Client
with Client(["127.0.0.1:7332"]) as client:
    print(json.dumps(client.generate("tiny", json.loads(sys.argv[1]), max_tokens=8, temperature=0, ignore_eos=True).token_ids))
"""


class Agreement:
    """A deployment on three of four hosts; the fourth coordinates."""

    def __init__(self, lab: Lab) -> None:
        lab.ipv6 = False
        self.hosts = [lab.host(name) for name in "abcd"]
        for host in self.hosts:
            host.up("--memory", "700MB")
        names = {h.name for h in self.hosts}
        for host in self.hosts:
            until(lambda h=host: h.members() == names, 60, lambda h=host: f"{h.name}\n{h.log()}")
        until(lambda: self._status().get("coordinator"), 10, "a coordinator")
        leader = self._status()["coordinator"]
        ids = {n["id"]: n["name"] for n in self._status()["nodes"]}
        self.first: Number = (1, leader)
        self.coordinator = next(h for h in self.hosts if h.name == ids[leader])
        self.members = [h for h in self.hosts if h is not self.coordinator]
        self.model = write_tiny_llama(self.members[0].folder / "tiny")
        until(
            lambda: all((h.folder / "data/probe.json").exists() and len(self.workers(h)) == 1 for h in self.members),
            90, self.describe,
        )  # fmt: skip

    def _status(self) -> dict[str, Any]:
        return self.hosts[0].status() or {}

    def workers(self, host: Host) -> list[int]:
        return host.pids("p2pshard_node.worker")

    def loaded(self, host: Host) -> list[int]:
        """Workers that listen for their neighbours."""
        return [pid for pid in self.workers(host) if host.listens(pid)]

    def deploy(self) -> subprocess.Popen[bytes]:
        argv = ("deploy", "/mnt/tiny", "--nodes", "3", "--exclude", self.coordinator.name, "--context", "512",
                "--dtype", "float32")  # fmt: skip
        return self.members[0].popen(sys.executable, "-m", "p2pshard.cli", *argv, log="deploy.log")

    def active(self) -> list[Number]:
        return [promise(h.folder / "data").active for h in self.members]

    def commit_one(self) -> None:
        """Bring the agreement to where the first member has committed and no commit has reached the others.

        The last prepare is the first member's, and when it comes the coordinator reaches nobody else any more.
        """
        slow, *others = self.members
        with held(self.workers(slow)):
            self.deploying = self.deploy()
            until(
                lambda: (
                    all(promise(h.folder / "data").promised == self.first for h in self.members)
                    and all(self.loaded(h) for h in others)
                ),
                60, self.describe, every=0.01,
            )  # fmt: skip
            for host in others:
                self.coordinator.cut(host)
        until(lambda: self.active()[0] == self.first, 20, self.describe, every=0.005)

    def shown(self, host: Host) -> Number | None:
        status = host.status()
        rows = (status or {}).get("deployments") or [{}]
        if rows[0].get("state") != "ready":
            return None
        epoch = rows[0]["plan"]["epoch"]
        return int(epoch["n"]), str(epoch["proposer"])

    def one_plan(self, *hosts: Host) -> Number:
        """The epoch in force, the same on every member's disk and in what every host given shows."""

        def agreed() -> bool:
            shown = [self.shown(h) for h in hosts]
            return all(e == shown[0] is not None for e in shown)

        until(agreed, 120, self.describe, every=0.5)
        epoch = self.shown(hosts[0])
        assert epoch is not None, self.describe()
        for host in self.members:
            record = promise(host.folder / "data")
            assert record.promised == record.active == epoch, self.describe()
            assert len(self.loaded(host)) == 1, self.describe()
        return epoch

    def answers(self, *hosts: Host) -> None:
        expected = reference_tokens(self.model, PROMPT_IDS, 8)
        for host in hosts:
            done = host.run(sys.executable, "-c", GENERATE, json.dumps(PROMPT_IDS), timeout=60)
            assert json.loads(done.stdout) == expected

    def describe(self) -> str:
        rows = [f"{h.name}: {promise(h.folder / 'data')} shows {self.shown(h)}" for h in self.members]
        return "\n".join([*rows, *(f"--- {h.name}\n{h.log()[-6000:]}" for h in self.hosts)])


def test_killed_after_one_of_three_commits_the_commit_is_sent_again(lab: Lab) -> None:
    agreement = Agreement(lab)
    agreement.commit_one()
    agreement.coordinator.kill()
    assert agreement.active() == [agreement.first, (0, ""), (0, "")]
    assert agreement.deploying.wait(timeout=120) == 0, agreement.describe()
    assert agreement.one_plan(*agreement.members) == agreement.first, agreement.describe()
    agreement.answers(*agreement.members)


def test_stopped_after_one_of_three_commits_and_continued_after_a_successor_acted(lab: Lab) -> None:
    agreement = Agreement(lab)
    agreement.commit_one()
    daemon = agreement.coordinator.processes[0].pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert agreement.active() == [agreement.first, (0, ""), (0, "")]
        assert agreement.deploying.wait(timeout=120) == 0, agreement.describe()
        assert agreement.one_plan(*agreement.members) == agreement.first, agreement.describe()
    finally:
        os.kill(daemon, signal.SIGCONT)
    for host in agreement.members[1:]:
        agreement.coordinator.heal(host)
    names = {h.name for h in agreement.hosts}
    until(lambda: agreement.coordinator.members() == names, 30, agreement.describe)
    epoch = agreement.one_plan(*agreement.hosts)
    assert epoch == agreement.first, agreement.describe()
    agreement.answers(*agreement.hosts)
