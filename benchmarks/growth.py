"""How our cost grows: with nodes, streams, context, and slower links.

    python benchmarks/growth.py MODEL.gguf [--part nodes]... [--rounds 3] [--dtype auto] [--out growth.json]

Parts: `nodes` (1 to 4, one stream and eight), `streams` (1 to 32 on two nodes), `context` (prompts of 128 to 8,000
tokens on two nodes), `links` (two hosts over links that are shaped to 1 Gbit/s, 100 Mbit/s and 20 Mbit/s; network
namespaces, so it needs root). A node has a core to itself while there are enough; more nodes than cores share them, which
shows what the extra hops cost and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contenders import context_for, end_in_order, json_lines, pinned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.lan.lab import HOME, Lab, unavailable
from tests.local_cluster import LocalCluster
from tests.waiting import until

_LIMIT_S = 3600
NODES = (1, 2, 3, 4)
STREAMS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 512, 2048, 8000)
LINKS = (None, "1gbit", "100mbit", "20mbit")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[argparse.Namespace, Path], Iterator[Row]]] = {
        "nodes": by_nodes,
        "streams": by_streams,
        "context": by_context,
        "links": by_links,
    }
    parser.add_argument("model", type=Path)
    parser.add_argument("--part", action="append", choices=list(parts), help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--out", type=Path, default=Path("growth.json"))
    options = parser.parse_args()
    end_in_order()
    options.model = options.model.resolve()
    result: Row = {"file": options.model.name, "rounds": options.rounds, "parts": {}}
    for name in options.part or parts:
        result["parts"][name] = rows = []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for row in parts[name](options, Path(folder)):
                rows.append(row)
                print(name, json.dumps({k: v for k, v in row.items() if k != "trace"}), flush=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")


def by_nodes(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for count in NODES:
        with pinned_cluster(options, folder / str(count), count) as cluster:
            for row in bench(options, local(cluster), nodes=count, streams=(1, 8), prompt=64):
                yield {"nodes": count, **row}


def by_streams(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    with pinned_cluster(options, folder, 2) as cluster:
        yield from bench(options, local(cluster), nodes=2, streams=STREAMS, prompt=64)


def by_context(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    with pinned_cluster(options, folder, 2) as cluster:
        for length in CONTEXTS:
            for row in bench(
                options, local(cluster), nodes=2, streams=(1,), prompt=length, room=max(CONTEXTS)
            ):
                yield {"prompt": length, **row}


def by_links(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    if reason := unavailable():
        print(f"links: left out, {reason}")
        return
    cores = sorted(os.sched_getaffinity(0))
    with Lab(folder) as lab:
        hosts = [lab.host(name) for name in ("a", "b")]
        shutil.copyfile(options.model, hosts[0].folder / "models" / options.model.name)
        for index, host in enumerate(hosts):
            up = [sys.executable, "-m", "p2pshard.cli", "up", "--name", host.name, "--no-warm-worker"]
            argv = pinned(up, [cores[index % len(cores)]])
            host.popen(*argv, "--memory", options.memory, "--data-dir", str(host.data_dir), log="daemon.log")

        def measured() -> bool:
            nodes = (hosts[0].status() or {}).get("nodes", ())
            return len(nodes) == len(hosts) and all(n["memory_budget"] for n in nodes)

        until(measured, 120, "two members that have measured their memory", every=0.5)

        def run(argv: list[str]) -> str:
            return hosts[0].cli(*argv, timeout=_LIMIT_S).stdout

        reference = str(HOME / "models" / options.model.name)
        for rate in LINKS:
            if rate is not None:
                for host in hosts:
                    host.shape(rate)
            for streams, prompt in (((1, 8), 64), ((1,), 2000)):
                load = {"streams": streams, "prompt": prompt, "room": 2000, "concurrency": 8}
                for row in bench(options, run, nodes=2, reference=reference, **load):
                    yield {"link": rate or "not shaped", "prompt": prompt, **row}


def pinned_cluster(options: argparse.Namespace, folder: Path, nodes: int) -> LocalCluster:
    cluster = LocalCluster(folder, "--memory", options.memory, "--no-warm-worker", nodes=nodes)
    cores = sorted(os.sched_getaffinity(0))
    for index, node in enumerate(cluster.nodes):
        node.core = cores[index % len(cores)]
    return cluster


def local(cluster: LocalCluster) -> Callable[[list[str]], str]:
    cluster.wait_measured()
    return lambda argv: cluster.nodes[0].cli(*argv, timeout=_LIMIT_S).stdout


def bench(
    options: argparse.Namespace,
    run: Callable[[list[str]], str],
    *,
    nodes: int,
    streams: tuple[int, ...],
    prompt: int,
    room: int = 0,
    concurrency: int = 0,
    reference: str = "",
) -> Iterator[Row]:
    """``p2pshard bench`` through `run`.

    ``room`` and ``concurrency``: of the longest prompt and the most streams to come, so that one deployment serves all.
    """
    context = context_for(max(room, prompt) + options.tokens)
    argv = [
        *("bench", reference or str(options.model), "--json", "--rounds", str(options.rounds)),
        *("--nodes", str(nodes), "--dtype", options.dtype, "--context", str(context)),
        *("--concurrency", str(concurrency or max(streams)), "--streams", ",".join(map(str, streams))),
        *("--prompt", str(prompt), "--tokens", str(options.tokens)),
    ]
    begun = time.monotonic()
    (document,) = json_lines(run(argv))
    for row in document["results"]:
        decode = (row["trace"] or {}).get("decode")
        yield {
            "streams": row["streams"],
            "dtype": document["plan"]["dtype"],
            "tokens_per_second": row["tokens_per_second"],
            "prefill_tokens_per_second": row["prefill_tokens_per_second"],
            "ttft_ms": row["ttft_ms"]["median"],
            "inter_token_ms": row["inter_token_ms"],
            "bytes_per_token": [e["bytes_per_token"] for e in row["edges"]],
            "busy": [round(s["busy"], 3) for s in decode["stages"]] if decode else None,
            "hop_overhead_ms": decode["hop_overhead_ms"]["median"] if decode else None,
            "seconds": round(time.monotonic() - begun),
        }


if __name__ == "__main__":
    main()
