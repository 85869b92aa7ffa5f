"""Two hosts with a slow link between them: what rounding hidden states to 8 bits gains, and that it is said."""

from __future__ import annotations

import time

import pytest

from tests.lan.lab import Host, Lab
from tests.tiny import write_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(600)]
PROMPT_TOKENS = 2000


def start_two(lab: Lab) -> tuple[Host, Host]:
    hosts = lab.host("a"), lab.host("b")
    for host in hosts:
        host.up("--memory", "1GB")
    until(lambda: all(h.members() == {"a", "b"} for h in hosts), 60, "two members")
    return hosts


def test_eight_bits_shorten_a_prompt_of_2000_tokens_over_20_mbit(lab: Lab) -> None:
    """Hidden size 1536, as Qwen2.5-1.5B has, and two layers, so that the link and not the processor sets the time."""
    a, b = start_two(lab)
    write_tiny_llama(a.folder / "models" / "wide", layers=2, hidden=1536, context=4096)
    path = "/mnt/models/wide"
    spent: dict[str, float] = {}
    sent: dict[str, int] = {}
    for wire in ("raw", "q8"):
        for host in (a, b):
            host.shape("1gbit")
        plan = a.json("plan", path, "--nodes", "2", "--context", "4096", "--dtype", "float32", "--wire", wire)
        assert plan["plan"]["numerics"] == "tolerant"
        assert [row["wire"] for row in plan["wires"]] == [wire]
        a.cli(
            "deploy", path, "--nodes", "2", "--context", "4096", "--dtype", "float32", "--wire", wire,
            timeout=200,
        )  # fmt: skip
        deployment = a.json("status")["deployments"][0]
        stages = deployment["plan"]["replicas"][0]["stages"]
        assert [stage.get("wire", "raw") for stage in stages] == [wire, "raw"]
        assert deployment["plan"]["numerics"] == "tolerant"
        for host in (a, b):
            host.shape("20mbit")
        receiver = b if stages[0]["ranks"][0]["node"] == _id(a) else a
        times = []
        for letter in "xyz":  # other text each time: nothing of it is kept from the time before
            before, begun = receiver.received_bytes(), time.monotonic()
            answer = a.json("run", "wide", letter * PROMPT_TOKENS, "--raw", "--max-tokens", "1", timeout=200)
            times.append(time.monotonic() - begun)
            sent[wire] = receiver.received_bytes() - before
            assert answer["prompt_tokens"] >= PROMPT_TOKENS
        spent[wire] = min(times)
        a.cli("undeploy", "wide")
    print(f"2,000 prompt tokens over 20 Mbit/s: {spent}, bytes {sent}")
    assert sent["raw"] > PROMPT_TOKENS * 1536 * 4
    assert sent["q8"] < 0.35 * sent["raw"]
    # 4.9 s on the link become 1.3 s; the rest is the command and the processors.
    assert spent["raw"] - spent["q8"] > 1.5, spent


def _id(host: Host) -> str:
    status = host.status()
    assert status is not None
    return next(node["id"] for node in status["nodes"] if node["name"] == host.name)
