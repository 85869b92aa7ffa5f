"""Three machines on one LAN, found by zeroconf alone, running models that none of them could hold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lan.lab import Host, Lab
from tests.waiting import until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(900)]
MB = 1 << 20
QUESTION = "What is the capital of France?"


def start_three(lab: Lab, *flags: str, memory: int | None = None) -> tuple[Host, Host, Host]:
    a, b, c = (lab.host(name, memory=memory) for name in "abc")
    for host in (a, b, c):
        host.up(*flags)
    for host in (a, b, c):
        until(
            lambda h=host: h.members() == {"a", "b", "c"}, 20, f"{host.name} sees three members\n{host.log()}"
        )
    return a, b, c


def put(host: Host, model: Path) -> str:
    """Copy `model` to `host` alone; its path as the host sees it."""
    shutil.copy(model, host.folder / model.name)
    return f"/mnt/{model.name}"


def deployment(host: Host) -> dict[str, object]:
    status = host.status()
    return status["deployments"][0] if status and status["deployments"] else {}


WATCH = """
import sys, time
from p2pshard import Client
from p2pshard.errors import P2PShardError
while True:
    try:
        with Client(["127.0.0.1:7332"], connect_timeout_s=0.5) as client:
            while len(client.status()["nodes"]) < 3:
                time.sleep(0.05)
        print(time.monotonic())
        break
    except P2PShardError:
        time.sleep(0.05)
"""


ENDLESS = """
import sys, time
from p2pshard import Client
from p2pshard.errors import P2PShardError
with Client(["127.0.0.1:7332"]) as client:
    try:
        stream = client.generate(sys.argv[1], "Once", max_tokens=int(sys.argv[2]), ignore_eos=True)
        for _ in stream:
            pass
        print(*stream.result().token_ids, file=sys.stderr)
    except P2PShardError as error:
        sys.exit(f"{error.code} {error.message} {error.details}")
"""


def generate_long(host: Host, model: str, tokens: int) -> subprocess.Popen[bytes]:
    """A client on `host` that reads `tokens` tokens, whatever the model thinks of ending."""
    argv = host.argv(sys.executable, "-c", ENDLESS, model, str(tokens))
    return subprocess.Popen(argv, stderr=subprocess.PIPE, env=host.env(), cwd="/")


def test_all_see_three_members_within_five_seconds_of_the_last_start(lab: Lab) -> None:
    hosts = [lab.host(name) for name in "abc"]
    for host in hosts[:2]:
        host.up()
    until(lambda: hosts[0].members() == {"a", "b"}, 20, "two members")
    until(
        lambda: all(n["memory_budget"] for n in hosts[0].status()["nodes"]),
        60,
        "both have measured themselves",
    )
    # Watchers that run already, so that no interpreter's start is in the figure; the clock is one for all.
    watchers = [
        subprocess.Popen(
            host.argv(sys.executable, "-c", WATCH), stdout=subprocess.PIPE, env=host.env(), cwd="/"
        )
        for host in hosts
    ]
    time.sleep(3)
    began = time.monotonic()
    hosts[2].up()
    seen = [float(watcher.communicate(timeout=30)[0]) - began for watcher in watchers]
    print(
        "three members, seconds after the last start:",
        *(f"{host.name} {s:.1f}" for host, s in zip(hosts, seen, strict=True)),
    )
    assert max(seen) < 5
    addresses = {n["name"]: n["addresses"][0] for n in hosts[0].status()["nodes"]}
    assert addresses["b"].startswith("10.77.0.2:"), "the LAN address wins over loopback"


@pytest.mark.model
def test_a_model_that_no_host_can_hold_is_answered_by_three(lab: Lab, qwen: Path) -> None:
    cap, budget = 1600 * MB, 1_200_000_000
    a, b, _ = start_three(lab, "--memory", "1200MB", memory=cap)
    path = put(a, qwen)
    refused = a.cli("plan", path, "--nodes", "1", "--context", "2048", "--json", check=False)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert json.loads(refused.stdout)["shortfall_bytes"] > 0
    a.cli("deploy", path, "--context", "2048", "--nodes", "3", timeout=400)
    answer = b.json(
        "run", qwen.stem, "Write a Python function that adds two numbers.", "--max-tokens", "40", timeout=400
    )
    print(answer["text"], f"{answer['tokens_per_second']:.1f} tokens/s")
    assert "def " in answer["text"]
    stages = answer["plan"]["replicas"][0]["stages"]
    assert len(stages) == 3
    ranks = [r for s in deployment(b)["plan"]["replicas"][0]["stages"] for r in s["ranks"]]
    for rank in ranks:
        print(rank["node"], "peak", rank["peak_bytes"] >> 20, "of", rank["budget_bytes"] >> 20, "MiB")
        assert rank["peak_bytes"] <= rank["budget_bytes"] <= budget


@pytest.mark.model
def test_the_model_file_on_one_host_is_enough_and_each_host_gets_its_own_layers_only(
    lab: Lab, smollm2: Path
) -> None:
    a, b, c = start_three(lab, "--memory", "1GB")
    path = put(a, smollm2)
    # Another model under the same name on the second host must never be used.
    (b.folder / "models" / smollm2.name).write_bytes(b"GGUF" + os.urandom(4096))
    before = {h.name: h.received_bytes() for h in (b, c)}
    answer = a.json(
        "run",
        path,
        QUESTION,
        "--context",
        "2048",
        "--dtype",
        "float32",
        "--max-tokens",
        "16",
        "--nodes",
        "3",
        timeout=300,
    )
    assert "Paris" in answer["text"]
    received = {n["name"]: n["bytes_received"] for n in a.status()["nodes"]}
    size = smollm2.stat().st_size
    assert received["a"] == 0
    for host in (b, c):
        wire = host.received_bytes() - before[host.name]
        print(
            f"{host.name} received {received[host.name]:,} tensor bytes, {wire:,} on the wire, of a file of {size:,}"
        )
        assert 0 < received[host.name] < size * 0.75
        assert wire < received[host.name] * 1.1 + 4 * MB, (
            "no more than its own layers, plus frames and gossip"
        )


@pytest.mark.model
def test_ready_means_ready(lab: Lab, smollm2: Path) -> None:
    a, _, c = start_three(lab, "--memory", "700MB")
    path = put(a, smollm2)
    loading = a.popen(*_cli("deploy", path, "--context", "2048", "--nodes", "3"), log="deploy.log")
    until(lambda: deployment(c).get("state") == "ready", 120, "ready", every=0.05)
    answer = c.json("run", smollm2.stem, QUESTION, "--max-tokens", "8", timeout=30)
    assert answer["completion_tokens"] >= 1
    assert loading.wait(timeout=10) == 0


@pytest.mark.model
@pytest.mark.parametrize("victim", ["worker", "daemon"])
def test_a_kill_in_mid_generation_costs_no_token(lab: Lab, smollm2: Path, victim: str) -> None:
    """A worker is started again; a host that is gone is waited for, as no other may take its stage."""
    a, b, c = start_three(lab, "--memory", "700MB")
    path = put(a, smollm2)
    a.cli("deploy", path, "--context", "2048", "--nodes", "3", timeout=200)
    _, whole = generate_long(a, smollm2.stem, 300).communicate(timeout=120)
    running = generate_long(a, smollm2.stem, 300)
    until(lambda: any(r["completion_tokens"] > 5 for r in a.json("ps")["requests"]), 60, "tokens flow")
    b.signal(signal.SIGKILL, "p2pshard_node.worker") if victim == "worker" else b.kill()
    if victim == "daemon":
        until(lambda: a.members() == {"a", "c"}, 10, "b is no member")
        assert "layers" in str(deployment(a)["reason"])
        assert running.poll() is None, "it waits"
        b.up("--memory", "700MB")
    _, after = running.communicate(timeout=90)
    assert running.returncode == 0, after
    assert after == whole
    assert a.status() is not None and c.status() is not None


@pytest.mark.model
def test_what_is_not_mended_in_time_is_a_typed_error(lab: Lab, smollm2: Path) -> None:
    a, b, _ = start_three(lab, "--memory", "700MB", "--recover-wait", "5")
    path = put(a, smollm2)
    a.cli("deploy", path, "--context", "2048", "--nodes", "3", timeout=200)
    running = generate_long(a, smollm2.stem, 1500)
    until(lambda: any(r["completion_tokens"] > 5 for r in a.json("ps")["requests"]), 60, "tokens flow")
    b.kill()
    began = time.monotonic()
    _, err = running.communicate(timeout=30)
    took = time.monotonic() - began
    print(f"error after {took:.1f} s: {err.decode()[-300:]}")
    assert running.returncode == 1 and 4.5 < took < 8
    assert err.startswith(b"stage_lost ") and "'layers': [" in err.decode()


@pytest.mark.model
def test_a_dropped_client_frees_everything(lab: Lab, smollm2: Path) -> None:
    a, _, c = start_three(lab, "--memory", "700MB")
    path = put(a, smollm2)
    a.cli("deploy", path, "--context", "2048", "--nodes", "3", timeout=200)
    running = generate_long(c, smollm2.stem, 1000)
    until(lambda: any(r["completion_tokens"] >= 20 for r in c.json("ps")["requests"]), 60, "20 tokens")
    running.kill()
    running.wait()
    began = time.monotonic()

    def idle() -> bool:
        ps = c.json("ps")
        active = [r for r in ps["requests"] if r["state"] in ("waiting", "running")]
        return not active and all(row["blocks_used"] == 0 for row in ps["kv"])

    until(idle, 10, "no request and no block left")
    took = time.monotonic() - began
    print(f"all free {took:.1f} s after the client was dropped")
    assert took < 2 + 1.5, "one or two calls of ps are in this figure"


@pytest.mark.model
def test_no_plan_uses_an_edge_that_is_cut(lab: Lab, smollm2: Path) -> None:
    """And what was ready before stays so: who loses sight of the coordinator does not begin to coordinate."""
    lab.ipv6 = False
    a, b, c = start_three(lab, "--memory", "700MB")
    path = put(a, smollm2)
    a.cli("deploy", path, "--context", "2048", "--layers", "a=0-14", "--layers", "b=15-29", timeout=200)
    before = a.status()["deployments"][0]
    assert before["state"] == "ready"
    b.cut(c)
    c.cut(b)
    time.sleep(12)
    done = a.cli("plan", path, "--nodes", "3", "--json", check=False)
    names = {n["id"]: n["name"] for n in a.status()["nodes"]}
    if done.returncode == 0:
        order = [
            names[s["ranks"][0]["node"]] for s in json.loads(done.stdout)["plan"]["replicas"][0]["stages"]
        ]
        edges = set(zip(order, order[1:] + order[:1], strict=True))
        assert ("b", "c") not in edges and ("c", "b") not in edges, order
    else:
        assert done.returncode == 3, done.stderr
    for host in (a, b, c):
        now = host.status()["deployments"][0]
        assert (now["state"], now["plan"]["epoch"]) == ("ready", before["plan"]["epoch"]), (host.name, now)
        assert sum("state=broken" in line for line in host.log().splitlines()) == 0
    # each end still answers, the one that does not reach the coordinator by way of the one that does
    for host in (a, b, c):
        answer = host.json("run", smollm2.stem, QUESTION, "--max-tokens", "8", timeout=200)
        assert "Paris" in answer["text"], host.name
    c.cli("undeploy", smollm2.stem, timeout=60)
    until(lambda: not a.status()["deployments"], 5, "the wish of c has reached a")


@pytest.mark.model
def test_slow_links_do_not_stall(lab: Lab, smollm2: Path) -> None:
    a, b, c = start_three(lab, "--memory", "700MB")
    path = put(a, smollm2)
    a.cli("deploy", path, "--context", "2048", "--nodes", "3", timeout=200)
    for host in (a, b, c):
        host.shape("20mbit")
    prompt = "The river runs through the old town. " * 120
    answer = a.json("run", smollm2.stem, prompt, "--max-tokens", "16", timeout=200)
    assert answer["completion_tokens"] >= 1
    assert answer["prompt_tokens"] > 900


def _cli(*argv: str) -> list[str]:
    return [sys.executable, "-m", "p2pshard.cli", *argv]
