"""The benchmarks' own arithmetic: what is run, what is read from it, and what is published of it."""

from __future__ import annotations

import argparse
import itertools
import json
import stat
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import growth
import interference
import report
from chart import Panel, draw
from contenders import LlamaCpp, LlamaCppRpc, Load, available_cores

LOAD = Load((1, 4, 8), 64, 24, 512)

FAKE_BENCH = """#!/usr/bin/env python3
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a line of the log")
for n in map(int, flags["-npl"].split(",")):
    room = int(flags["-c"]) // max(map(int, flags["-npl"].split(",")))
    assert room >= int(flags["-npp"]) + int(flags["-ntg"]), sys.argv
    print(json.dumps({"pl": n, "speed_tg": 10.0 * n, "speed_pp": float(flags["-npp"])}))
"""
FAKE_SERVER = """#!/usr/bin/env python3
import socket, sys, time
s = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])))
time.sleep(60)
"""


@pytest.fixture
def binaries(tmp_path: Path) -> Path:
    for name, text in (("llama-batched-bench", FAKE_BENCH), ("ggml-rpc-server", FAKE_SERVER)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_llama_cpp_is_asked_for_each_figure_and_read(binaries: Path) -> None:
    contender = LlamaCpp(available_cores(1), binaries)
    rates = contender.run(Path("/models/some.gguf"), LOAD)
    assert rates.decode == {1: 10.0, 4: 40.0, 8: 80.0}
    assert rates.prefill == 512.0
    decode, prefill = contender.commands
    assert decode.startswith("taskset -c ") and "-npl 1,4,8" in decode and "-t 1 -tb 1" in decode
    assert "-npp 512" in prefill and "/models" not in decode


def test_rpc_servers_run_on_a_core_each_and_end(binaries: Path) -> None:
    core = available_cores(1)[0]
    contender = LlamaCppRpc([core, core], binaries)
    assert contender.run(Path("some.gguf"), LOAD).prefill == 512.0
    contender.run(Path("some.gguf"), LOAD)
    servers = [c for c in contender.commands if "ggml-rpc-server" in c]
    assert servers == [f"taskset -c {core} ggml-rpc-server -t 1 -p PORT"]
    assert len(contender.commands) == 3, "commands of later runs are those of the first"
    assert "--rpc HOST:PORT,HOST:PORT -ngl 99 -sm layer -ts 1,1" in contender.commands[1]


def test_a_command_that_fails_tells_its_output(binaries: Path) -> None:
    (binaries / "llama-batched-bench").write_text("#!/bin/sh\necho cannot load >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"gave 3\n.*\ncannot load"):
        LlamaCpp(available_cores(1), binaries).run(Path("some.gguf"), LOAD)


# -- the report -----------------------------------------------------------------------------------
def row(
    name: str, dtype: str, decode: list[dict[str, float]], prefill: list[float], inside: Any = None
) -> Any:
    rounds = [
        {"decode": d, "prefill": p, "details": {"decode": inside}}
        for d, p in zip(decode, prefill, strict=True)
    ]
    return {"name": name, "dtype": dtype, "commands": [f"run {name}"], "rounds": rounds}


def inside(busy: list[float]) -> dict[str, Any]:
    spread = {"median": 20.0, "p95": 30.0}
    return {"ttft_ms": spread, "inter_token_ms": spread, "busy": busy, "hop_overhead_ms": 0.5}


RESULTS: Any = {
    "machine": {"cpu": "A <CPU>", "cores": "2", "extensions": "avx2", "system": "Linux", "commit": "abc"},
    "load": {"streams": [4, 8], "prompt": 64, "tokens": 24, "prefill": 512},
    "rounds": 3,
    "models": [
        {
            "file": "m.gguf",
            "bytes": 1,
            "contenders": [
                row("llama.cpp RPC, 2 servers", "of the file", [{"4": 10, "8": v} for v in (10, 20, 40)], [1, 1, 1]),
                row("p2pshard, 1 node", "int8", [{"4": v, "8": 1.0} for v in (20, 50, 60)], [2, 3, 4], inside={"8": inside([0.9])}),
                row("p2pshard, 2 nodes", "int8", [{"4": 5, "8": v} for v in (50, 60, 100)], [3, 3, 6], inside={"8": inside([0.9, 0.8])}),
            ],
        }
    ],
}  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    rpc, one, two = RESULTS["models"][0]["contenders"]
    assert report.ratio(two, rpc, "8") == 3.0  # of 5, 3 and 2.5
    assert report.ratio(two, rpc, "1") is None
    assert report.scaling(two, one, "8") == pytest.approx(50 / 60)  # of 50/40, 60/100 and 100/120
    assert report.scaling(two, one, "4") is None
    assert report.scaling(two, one, "prefill") == pytest.approx(0.75)


def test_the_document_says_what_was_measured_and_how() -> None:
    text = report.document(RESULTS)
    for part in (
        "| p2pshard, 2 nodes | int8 | 5.0 | 60.0 | 3.0 |",
        "| p2pshard, 2 nodes (int8) / llama.cpp RPC, 2 servers | 0.50 × | 3.00 × | 3.00 × |",
        "| p2pshard, 2 nodes (int8) / twice 1 node at half the streams | - | 0.83 × | 0.75 × |",
        "| p2pshard, 2 nodes (int8) | 8 | 20.0 | 20.0 / 30.0 | 90%, 80% | 0.50 |",
        "run p2pshard, 2 nodes",
        "abc",
    ):
        assert part in text, part


def test_growth_is_a_table_for_each_part() -> None:
    def row(**varied: Any) -> Any:
        return varied | {
            "streams": 8, "dtype": "int8", "tokens_per_second": 90.25, "prefill_tokens_per_second": 410.0,
            "ttft_ms": 12.0, "inter_token_ms": {"median": 8.0, "p95": 9.0}, "busy": [0.5, 0.625],
            "hop_overhead_ms": 0.456,
        }  # fmt: skip

    unseen = row(nodes=4) | {"tokens_per_second": None, "busy": None, "hop_overhead_ms": None}
    parts = {"nodes": [row(nodes=2), unseen], "links": [row(link="20mbit", prompt=2000)], "context": []}
    text = report.document(RESULTS, [{"file": "m.gguf", "parts": parts}])
    assert "| 2 | 8 | int8 | 90.2 | 410 | 12.0 | 8.0 / 9.0 | 50%, 62% | 0.46 |" in text
    assert "| 4 | 8 | int8 | - | 410 | 12.0 | 8.0 / 9.0 | - | - |" in text
    assert "| 20mbit | 2000 | 8 | int8 | 90.2" in text
    assert "How cost grows" not in report.document(RESULTS)


def test_the_chart_draws_every_figure_to_scale() -> None:
    panels = [Panel("m & <n>", ("decode", "prefill"), ((10.0, 5.0, None), (None, 300.0, 150.0)))]
    root = ElementTree.fromstring(draw(panels, ["a", "b", "c"], "tokens/s"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [r for r in root.iter(f"{name}rect") if r.get("y") and r.get("width") == "24"]
    heights = [float(b.get("height", 0)) for b in bars]
    assert len(bars) == 4
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.1) == pytest.approx(heights[2], abs=0.1)
    texts = [t.text for t in root.iter(f"{name}text")]
    assert {"10.0", "5.0", "300", "150", "decode", "prefill", "a", "b", "c"} <= set(texts)
    width, height = (float(root.get(k, 0)) for k in ("width", "height"))
    for bar in bars:
        assert 0 <= float(bar.get("x", -1)) <= width - 24
        assert float(bar.get("y", -1)) + float(bar.get("height", 0)) <= height


# -- growth and interference ----------------------------------------------------------------------
def test_growth_asks_bench_for_one_deployment_and_reads_it() -> None:
    asked: list[list[str]] = []
    stage = {"busy": 0.75}
    figures = {
        "streams": 1,
        "tokens_per_second": 9.0,
        "prefill_tokens_per_second": 90.0,
        "ttft_ms": {"median": 5.0},
        "inter_token_ms": {"median": 1.0, "p95": 2.0},
        "edges": [{"bytes_per_token": 2400.0}],
        "trace": {"decode": {"stages": [stage, stage], "hop_overhead_ms": {"median": 0.4}}},
    }

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return json.dumps({"plan": {"dtype": "int8"}, "results": [figures, figures | {"trace": None}]}) + "\n"

    options = argparse.Namespace(model=Path("m.gguf"), rounds=2, dtype="auto", tokens=64)
    rows = list(growth.bench(options, run, nodes=2, streams=(1, 8), prompt=64, room=2000))
    (argv,) = asked
    flags = dict(itertools.pairwise(argv))
    assert flags["--context"] == "2304" and int(flags["--context"]) % 256 == 0
    assert (flags["--concurrency"], flags["--streams"], flags["--prompt"]) == ("8", "1,8", "64")
    assert [r["busy"] for r in rows] == [[0.75, 0.75], None]
    assert rows[0]["hop_overhead_ms"] == 0.4 and rows[1]["bytes_per_token"] == [2400.0]


def test_interference_counts_the_gap_that_a_prompt_begins_in() -> None:
    times = [0.0, 0.1, 0.2, 0.9, 1.0, 1.1]  # a token is 600 ms late while a prompt runs from 0.25 to 0.95
    got = interference.outcome(times, 0.25, 0.95, prompt=700, alone=2000.0)
    assert got.quiet_p99_ms == pytest.approx(100)
    assert got.disturbed_p99_ms == pytest.approx(700)
    assert got.shared_prefill == pytest.approx(1000)
    assert got.disturbed_tokens_per_second == pytest.approx(1 / 0.7)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (99, 99), (100, 99), (200, 198)])
def test_p99_is_by_nearest_rank(count: int, expected: float) -> None:
    assert interference.p99([float(i) for i in range(count, 0, -1)]) == expected
