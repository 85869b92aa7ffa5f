"""A LAN that falls apart and heals: each half serves what it can hold, and one plan is left when they meet."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lan.lab import Host, Lab
from tests.lan.test_three_hosts import QUESTION, generate_long
from tests.waiting import until

pytestmark = [pytest.mark.lan, pytest.mark.model, pytest.mark.timeout(900)]


def cut(halves: tuple[tuple[Host, ...], tuple[Host, ...]]) -> None:
    for here, there in (halves, halves[::-1]):
        for host in here:
            for other in there:
                host.cut(other)


def heal(halves: tuple[tuple[Host, ...], tuple[Host, ...]]) -> None:
    for here, there in (halves, halves[::-1]):
        for host in here:
            for other in there:
                host.heal(other)


def test_both_halves_of_a_cut_lan_serve_and_one_plan_is_left_after_it(lab: Lab, smollm2: Path) -> None:
    lab.ipv6 = False
    hosts = a, b, c, d = tuple(lab.host(name) for name in "abcd")
    for host in hosts:
        shutil.copy(smollm2, host.folder / "models" / smollm2.name)
        host.up("--memory", "1500MB")
    for host in hosts:
        until(lambda h=host: h.members() == set("abcd"), 30, f"{host.name} sees four members\n{host.log()}")
    a.cli("deploy", smollm2.stem, "--context", "2048", "--nodes", "2", timeout=300)
    _, whole = generate_long(a, smollm2.stem, 1200).communicate(timeout=200)
    running = [generate_long(host, smollm2.stem, 1200) for host in (a, c)]
    for host in (a, c):
        until(
            lambda h=host: any(r["completion_tokens"] > 20 for r in h.json("ps")["requests"]),
            60,
            "tokens flow",
        )
    halves = (a, b), (c, d)
    cut(halves)
    began = time.monotonic()
    for host in (a, c):
        answer = host.json("run", smollm2.stem, QUESTION, "--max-tokens", "8", timeout=60)
        assert "Paris" in answer["text"], host.name
        print(f"{host.name} answers {time.monotonic() - began:.1f} s after the cut")
    for host in hosts:
        host.watch()
    for half, expected in zip(halves, ({"a", "b"}, {"c", "d"}), strict=True):
        assert all(host.members() == expected for host in half)
    time.sleep(max(0.0, 20 - (time.monotonic() - began)))
    heal(halves)
    healed = time.monotonic()

    seen: list[dict[str, Any]] = []

    def one() -> bool:
        nonlocal seen
        seen = [host.watched() for host in hosts]
        rows = [next(iter(s.get("deployments", ())), {}) for s in seen]
        return (
            all(s["asked"] > healed and len(s.get("nodes", ())) == 4 for s in seen)
            and len({s["coordinator"] for s in seen}) == 1
            and {r.get("state") for r in rows} == {"ready"}
            and len({str(r["plan"]["epoch"]) for r in rows}) == 1
        )

    until(one, 30, lambda: str([(s.get("coordinator"), s.get("deployments")) for s in seen]), every=0.05)
    took = max(s["asked"] for s in seen) - healed
    print(f"one plan and one coordinator {took:.1f} s after they met")
    for process in running:
        _, got = process.communicate(timeout=200)
        assert process.returncode == 0, got
        assert got == whole
    for host in hosts:
        assert "Paris" in host.json("run", smollm2.stem, QUESTION, "--max-tokens", "8", timeout=60)["text"]
    assert took < 10
