"""The coordinator is killed or stopped at chosen points of an agreement, between real daemons.

Four daemons, and a plan for the three that do not coordinate, so that whoever follows can go on without the
one that is gone. The points are reached by holding workers: a member whose worker does nothing has promised
and not prepared. (The commits are in tests/lan, where a network can be cut.)
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from p2pshard import Client
from p2pshard.errors import P2PShardError
from tests.agreement_watch import Number, held, loaded, promise, workers
from tests.local_cluster import LocalCluster, Node
from tests.tiny import reference_tokens, write_tiny_llama
from tests.waiting import until

pytestmark = pytest.mark.timeout(280)
PROMPT_IDS = [10, 20, 30, 40]


@dataclass
class Agreement:
    """A deployment on three members that is being agreed on."""

    cluster: LocalCluster
    coordinator: Node
    members: list[Node]
    first: Number
    """The epoch that the coordinator proposes."""
    failures: list[P2PShardError] = field(default_factory=list)
    asking: threading.Thread = field(default_factory=threading.Thread)

    def begin(self) -> None:
        """Ask for the deployment, as a client of one of the members."""

        def deploy() -> None:
            try:
                with Client([self.members[0].address]) as client:
                    client.deploy(
                        str(self.cluster.folder.parent / "tiny"),
                        nodes=3, exclude=[self.coordinator.name], context=512, dtype="float32",
                    )  # fmt: skip
            except P2PShardError as error:
                self.failures.append(error)

        self.asking = threading.Thread(target=deploy)
        self.asking.start()

    def warm(self, node: Node) -> set[int]:
        assert node.process is not None
        return workers(node.process.pid)

    def prepared(self) -> list[Node]:
        """Members whose worker has loaded."""
        return [n for n in self.members if loaded(self.warm(n))]

    def until_prepared(self, count: int) -> None:
        """Every member has promised the first epoch, exactly `count` have loaded it, none has committed it."""
        until(
            lambda: (
                all(promise(n.data_dir).promised == self.first for n in self.members)
                and len(self.prepared()) == count
            ),
            60, self.describe, every=0.01,
        )  # fmt: skip
        assert not any(promise(n.data_dir).active[0] for n in self.members), self.describe()

    def one_plan(self) -> Number:
        """The epoch in force: the same for every member in what it shows, what it has on disk and what it runs."""

        def agreed() -> bool:
            plans = [self.shown(n) for n in self.members]
            return all(p == plans[0] is not None for p in plans)

        until(agreed, 150, self.describe)
        epoch = self.shown(self.members[0])
        assert epoch is not None
        for node in self.members:
            record = promise(node.data_dir)
            assert record.promised == record.active == epoch, self.describe()
            assert len(loaded(self.warm(node))) == 1, self.describe()
        return epoch

    def shown(self, node: Node) -> Number | None:
        """The epoch that a node calls ready."""
        rows = self.cluster.status(node).get("deployments") or [{}]
        if rows[0].get("state") != "ready":
            return None
        epoch = rows[0]["plan"]["epoch"]
        return int(epoch["n"]), str(epoch["proposer"])

    def answers(self, *nodes: Node) -> None:
        """Every node given has the reference's tokens."""
        expected = reference_tokens(self.cluster.folder.parent / "tiny", PROMPT_IDS, 8)
        for node in nodes:
            with Client([node.address]) as client:
                got = client.generate("tiny", PROMPT_IDS, max_tokens=8, temperature=0, ignore_eos=True)
                assert list(got.token_ids) == expected

    def done(self) -> None:
        self.asking.join(timeout=60)
        assert not self.asking.is_alive() and not self.failures, f"{self.failures}\n{self.describe()}"

    def describe(self) -> str:
        rows = [f"{n.name}: {promise(n.data_dir)} shows {self.shown(n)}" for n in self.members]
        return "\n".join([*rows, *(f"--- {n.name}\n{n.log()}" for n in self.cluster.nodes)])


@pytest.fixture
def agreement(tmp_path: Path) -> Iterator[Agreement]:
    write_tiny_llama(tmp_path / "tiny")
    with LocalCluster(tmp_path, "--memory", "700MB", nodes=4) as cluster:
        asked = cluster.nodes[0]
        until(lambda: cluster.status(asked).get("coordinator"), 10, "a coordinator")
        status = cluster.status(asked)
        name = next(n["name"] for n in status["nodes"] if n["id"] == status["coordinator"])
        coordinator = next(n for n in cluster.nodes if n.name == name)
        members = [n for n in cluster.nodes if n is not coordinator]
        found = Agreement(cluster, coordinator, members, (1, status["coordinator"]))
        cluster.wait_measured()
        until(lambda: all(len(found.warm(n)) == 1 for n in members), 30, found.describe)
        yield found


@pytest.mark.slow
def test_killed_after_one_of_three_prepares(agreement: Agreement) -> None:
    with held(pid for node in agreement.members[1:] for pid in agreement.warm(node)):
        agreement.begin()
        agreement.until_prepared(1)
        agreement.coordinator.kill()
    agreement.done()
    n, proposer = agreement.one_plan()
    assert n > 1 and proposer != agreement.first[1]
    agreement.answers(*agreement.members)


def stop_with_all_prepared(agreement: Agreement) -> None:
    """The coordinator is stopped while it waits for the last prepare, which then comes."""
    with held(agreement.warm(agreement.members[2])):
        agreement.begin()
        agreement.until_prepared(2)
        agreement.coordinator.kill(signal.SIGSTOP)
    agreement.until_prepared(3)


@pytest.mark.slow
def test_killed_after_all_prepares(agreement: Agreement) -> None:
    stop_with_all_prepared(agreement)
    agreement.coordinator.kill()
    agreement.done()
    n, proposer = agreement.one_plan()
    assert n > 1 and proposer != agreement.first[1]
    agreement.answers(*agreement.members)


@pytest.mark.slow
def test_stopped_before_its_commits_and_continued_after_a_successor_acted(agreement: Agreement) -> None:
    with ExitStack() as stack:
        stop_with_all_prepared(agreement)
        stack.callback(agreement.coordinator.kill, signal.SIGCONT)
        agreement.done()
        epoch = agreement.one_plan()
        assert epoch[0] > 1 and epoch[1] != agreement.first[1]
    cluster, returned = agreement.cluster, agreement.coordinator
    cluster.wait_members(4, 20)
    until(lambda: agreement.shown(returned) == epoch, 10, agreement.describe)
    refused = r"state=broken epoch=1 reason=.*(only members of the cluster|commit of epoch 1 of \w+ refused)"
    followed = rf"coordinator node={epoch[1]}"
    assert re.search(f"{refused}|{followed}", returned.log()), (
        "its commits were refused, or it heard of its successor before it sent them\n" + agreement.describe()
    )
    assert agreement.one_plan() == epoch
    agreement.answers(*agreement.members, returned)
