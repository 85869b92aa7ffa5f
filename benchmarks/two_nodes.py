"""Decode and prefill speed of one model over one-core nodes, through real daemons on this machine.

    python benchmarks/two_nodes.py MODEL [--nodes 2] [--streams 1,8] [--prompt 64] [--tokens 48] [--dtype float32]

Every daemon (and so its worker) is pinned to a core of its own, one thread each. Prints, per number of streams,
tokens/s over all streams (median of three rounds) and the time to the first token. The client shares the cores; no
spare worker is kept warm, for loading it would take a core during the first rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2pshard import Client
from tests.local_cluster import LocalCluster


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory", default="4GB")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(
            Path(folder), "--memory", options.memory, "--no-warm-worker", nodes=options.nodes
        )
        for index, node in enumerate(cluster.nodes):
            node.core = cores[index % len(cores)]
        with cluster, Client([cluster.nodes[0].address]) as client:
            model = str(options.model.resolve())
            client.deploy(model, nodes=options.nodes, dtype=options.dtype, context=2048, concurrency=8)
            name = client.status()["deployments"][0]["model"]
            prompt = " ".join(["river"] * options.prompt)
            rows = []
            for streams in (int(s) for s in options.streams.split(",")):
                rates = [round_of(client, name, prompt, streams, options.tokens) for _ in range(3)]
                rate, ttft = (statistics.median(column) for column in zip(*rates, strict=True))
                rows.append(
                    {"streams": streams, "tokens_per_second": round(rate, 1), "ttft_ms": round(ttft, 1)}
                )
            print(
                json.dumps(
                    {"model": name, "dtype": options.dtype, "nodes": options.nodes, "rows": rows}, indent=1
                )
            )


def round_of(client: Client, model: str, prompt: str, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens per second over all streams after the slowest first token, and the median time to first token in ms."""

    def one(_: int) -> tuple[float, float, float]:
        began = time.perf_counter()
        done = client.generate(model, prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
        first = None
        for _piece in done:
            first = first or time.perf_counter()
        return began, first or began, time.perf_counter()

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        spans = list(pool.map(one, range(streams)))
    start = max(first for _, first, _ in spans)
    end = max(last for _, _, last in spans)
    return streams * (tokens - 1) / (end - start), statistics.median((f - b) * 1e3 for b, f, _ in spans)


if __name__ == "__main__":
    main()
