"""Real daemon processes on this machine: who joins whom, how fast silence is noticed, who is refused and why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from p2pshard.discovery import PROTOCOL
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc
from p2pshard.version import __version__
from tests.local_cluster import free_port
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)
START_S = 60.0
"""For importing a daemon on a machine that runs other tests as well."""


class Node:
    """One daemon with its own folder, ports and log."""

    def __init__(self, folder: Path, name: str, cluster: str) -> None:
        self.name, self.cluster = name, cluster
        self.data_dir = folder / name
        self.log_path = folder / f"{name}.log"
        self.port, self.api_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *peers: Node, mdns: bool = False, bind: str = "127.0.0.1") -> Node:
        """As a daemon that has probed its machine before: these tests are not about workers."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        probe = {
            "key": [__version__, "auto", os.cpu_count()],
            "devices": [{"device": "cpu"}],
            "base_bytes": 1,
        }
        (self.data_dir / "probe.json").write_text(json.dumps(probe))
        env = {
            **os.environ,
            "P2PSHARD_NAME": self.name,
            "P2PSHARD_DATA_DIR": str(self.data_dir),
            "P2PSHARD_MODELS_DIR": str(self.data_dir / "models"),
            "P2PSHARD_PORT": str(self.port),
            "P2PSHARD_API_PORT": str(self.api_port),
            "P2PSHARD_DATA_PORTS": "0-0",
            "P2PSHARD_BIND": bind,
            "P2PSHARD_CLUSTER": self.cluster,
            "P2PSHARD_MDNS": str(mdns).lower(),
            "P2PSHARD_WARM_WORKER": "false",
            "P2PSHARD_PEERS": ",".join(p.address for p in peers),
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "p2pshard_node.daemon"],
                env=env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """Empty while the daemon does not answer."""
        with grpc.insecure_channel(self.address, [("grpc.enable_http_proxy", 0)]) as channel:
            try:
                return json.loads(rpc.NodeStub(channel).Status(pb.Empty(), timeout=1.0).json)  # type: ignore[no-any-return]
            except grpc.RpcError:
                return {}

    def names(self) -> set[str]:
        return {n["name"] for n in self.status().get("nodes", ())}

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    nodes: list[Node] = []
    default = f"test-{uuid.uuid4().hex[:8]}"

    def make_one(name: str, *, cluster: str = default) -> Node:
        nodes.append(Node(tmp_path, name, cluster))
        return nodes[-1]

    yield make_one
    for node in nodes:
        if node.process is not None and node.process.poll() is None:
            node.end()


def up(*nodes: Node) -> None:
    until(lambda: all(n.status() for n in nodes), START_S, lambda: "\n".join(n.log()[-2000:] for n in nodes))


def joined(*nodes: Node, seconds: float = 5.0) -> None:
    everybody = {n.name for n in nodes}
    until(
        lambda: all(n.names() == everybody for n in nodes),
        seconds,
        lambda: "\n".join(f"{n.name} sees {n.names()}\n{n.log()[-2000:]}" for n in nodes),
    )


def three(make: Make) -> list[Node]:
    nodes = [make(name) for name in ("ann", "bob", "cid")]
    for node in nodes:
        node.start(*(n for n in nodes if n is not node))
    up(*nodes)
    joined(*nodes)
    return nodes


def test_three_daemons_join_by_one_static_peer_and_gossip_and_leave_in_order(make: Make) -> None:
    ann, bob, cid = make("ann"), make("bob"), make("cid")
    ann.start()
    up(ann)
    bob.start(ann)
    cid.start(ann)  # bob and cid learn of each other from ann
    up(bob, cid)
    joined(ann, bob, cid)
    status = ann.status()
    assert len({n["id"] for n in status["nodes"]}) == 3
    assert all(n["incarnation"] == 1 for n in status["nodes"])
    until(lambda: all(n["memory_budget"] > 0 for n in ann.status()["nodes"]), 5, "budgets are gossiped")
    until(
        lambda: len({n.status().get("coordinator") or n.name for n in (ann, bob, cid)}) == 1,
        6,
        "one coordinator",
    )
    assert cid.end() == 0
    until(lambda: ann.names() == {"ann", "bob"}, 1.5, "a goodbye is heard at once")
    assert bob.end() == 0 and ann.end() == 0
    assert "said goodbye" in ann.log()
    for node in (ann, bob, cid):
        node.start()  # ports and data directories are free again
    up(ann, bob, cid)
    assert all(n.status()["nodes"][0]["incarnation"] == 2 for n in (ann, bob, cid))


def test_daemons_find_each_other_by_zeroconf(make: Make) -> None:
    nodes = [make(name).start(mdns=True, bind="0.0.0.0") for name in ("ann", "bob", "cid")]
    up(*nodes)
    joined(*nodes)
    assert all(
        not n["address"].startswith("127.") or n["addresses"][0].startswith("127.")
        for n in nodes[0].status()["nodes"]
        if not n["this"]
    ), "loopback never wins over another address"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_silence_is_noticed_within_five_seconds_and_who_returns_is_a_member_again(
    make: Make, number: signal.Signals
) -> None:
    ann, bob, cid = three(make)
    bob.send(number)
    began = time.monotonic()
    until(lambda: ann.names() == cid.names() == {"ann", "cid"}, 5.0, lambda: ann.log()[-2000:], every=0.05)
    if number is signal.SIGSTOP:
        assert time.monotonic() - began > 1.0, "a pause is not yet an end"
        bob.send(signal.SIGCONT)
        joined(ann, bob, cid, seconds=8)
    else:
        assert bob.process is not None
        bob.process.wait()
        bob.start()  # nobody else is restarted, and bob is told of nobody
        up(bob)
        joined(ann, bob, cid)


def test_a_second_daemon_on_one_data_directory_is_refused_naming_the_first(
    make: Make, tmp_path: Path
) -> None:
    ann = make("ann").start()
    up(ann)
    second = make("ann")
    second.log_path = tmp_path / "second.log"
    second.start()
    assert second.process is not None and ann.process is not None
    assert second.process.wait(timeout=START_S) == 1
    assert f"pid {ann.process.pid}" in second.log() and "--data-dir" in second.log()
    assert ann.names() == {"ann"}


def test_a_copy_of_a_data_directory_is_refused_naming_both_addresses(make: Make) -> None:
    ann, bob = make("ann"), make("bob")
    ann.start()
    bob.start(ann)
    up(ann, bob)
    joined(ann, bob)
    copy = make("copy")
    shutil.copytree(bob.data_dir, copy.data_dir)
    copy.start(ann)
    up(copy)

    def refused() -> bool:
        rows = [*ann.status()["not_joined"], *copy.status()["not_joined"]]
        reasons = [r["reason"] for r in rows if r.get("code") == "duplicate"]
        return (
            len(rows) >= 2
            and all(bob.address in r and copy.address in r for r in reasons)
            and len(reasons) >= 2
        )

    until(refused, 10, lambda: f"{ann.status()['not_joined']} {copy.status()['not_joined']}")
    assert ann.names() == bob.names() == {"ann", "bob"} and copy.names() == {"copy"}
    bob.send(signal.SIGKILL)  # the original is gone: the copy may take its place
    until(lambda: ann.names() == {"ann", "copy"}, 15, lambda: f"{ann.status()} {ann.log()[-1500:]}")


def test_another_cluster_is_listed_on_both_sides_with_what_to_do(make: Make) -> None:
    ann = make("ann")
    eve = make("eve", cluster="elsewhere")
    ann.start()
    eve.start(ann)
    up(ann, eve)
    for node, other in ((ann, "elsewhere"), (eve, "elsewhere")):
        row = until(lambda n=node: (n.status().get("not_joined") or [None])[0], 5, "a row")  # type: ignore[misc]
        assert other in row["reason"] and "--cluster" in row["reason"] and row["code"] == "cluster"
    assert ann.names() == {"ann"}


def test_another_protocol_is_refused_and_listed_with_both_versions(make: Make) -> None:
    ann = make("ann").start()
    up(ann)
    stranger = pb.NodeInfo(
        id="f" * 16, name="new", incarnation=1, nonce="abc", protocol=PROTOCOL + 1, version="9.9.9", cluster=ann.cluster,
        addresses=[pb.Address(host="127.0.0.1", port=9)],
    )  # fmt: skip
    with grpc.insecure_channel(ann.address, [("grpc.enable_http_proxy", 0)]) as channel:
        reply = rpc.ClusterStub(channel).Handshake(pb.HandshakeRequest(sender=stranger), timeout=5)
    assert not reply.accepted and reply.code == "protocol"
    (row,) = ann.status()["not_joined"]
    assert (
        "9.9.9" in row["reason"] and __version__ in row["reason"] and "same p2pshard version" in row["reason"]
    )


def test_a_stranger_may_shake_hands_and_ping_and_nothing_else(make: Make) -> None:
    ann = make("ann").start()
    up(ann)
    me = pb.NodeInfo(id="e" * 16, nonce="n", protocol=PROTOCOL, version=__version__, cluster=ann.cluster)
    with grpc.insecure_channel(ann.address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = rpc.ClusterStub(channel)
        assert not stub.Ping(pb.PingRequest(sender=me), timeout=5).member
        calls = [
            lambda: stub.State(pb.StateRequest(), timeout=5),
            lambda: stub.Want(pb.WantDeployment(model="m"), timeout=5),
            lambda: stub.Unwant(pb.UndeployRequest(model="m"), timeout=5),
            lambda: stub.Commit(pb.CommitRequest(deployment="d"), timeout=5),
            lambda: stub.Abort(pb.AbortRequest(deployment="d"), timeout=5),
            lambda: stub.Epochs(pb.EpochQuery(deployment="d"), timeout=5),
            lambda: stub.Report(pb.StageEvent(deployment="d"), timeout=5),
            lambda: stub.HasTensors(pb.TensorQuery(), timeout=5),
            lambda: stub.Leave(pb.Goodbye(id=me.id), timeout=5),
            lambda: list(stub.Prepare(pb.PrepareRequest(deployment="d"), timeout=5)),
            lambda: list(stub.Manifest(pb.ManifestRequest(digest="../../etc/passwd"), timeout=5)),
            lambda: list(stub.Tensor(pb.TensorRequest(sha256="0" * 64), timeout=5)),
            lambda: stub.Measure(iter([pb.Blob(data=b"x")]), timeout=5),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        bad = pb.NodeInfo(id="../x", nonce="n", protocol=PROTOCOL, version=__version__, cluster=ann.cluster)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Handshake(pb.HandshakeRequest(sender=bad), timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ann.names() == {"ann"}


def test_dead_and_silent_peers_delay_nobody(make: Make) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        ann, bob = make("ann").start(), make("bob")
        up(ann)
        dead = [make(f"dead{i}") for i in range(20)]
        mute = make("mute")
        mute.port = silent.getsockname()[1]
        bob.start(*dead, mute, ann)
        up(bob)
        joined(ann, bob)
        until(lambda: len(bob.status()["not_joined"]) == 21, 15, lambda: str(bob.status()["not_joined"]))
        rows = {r["address"]: r["reason"] for r in bob.status()["not_joined"]}
        assert "refused" in rows[dead[0].address] and "silent" in rows[mute.address]
        assert ann.names() == {"ann", "bob"}


def test_a_lonely_daemon_says_why_that_may_be_and_what_to_type(make: Make) -> None:
    ann = make("ann").start()
    up(ann)
    until(lambda: "no peer after" in ann.log(), 13, lambda: ann.log())
    line = next(x for x in ann.log().splitlines() if "no peer after" in x)
    assert f"p2pshard up --peer {ann.address}" in line and "multicast" in line
