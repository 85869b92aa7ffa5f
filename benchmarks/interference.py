"""One user is given tokens while another sends a long prompt: what each loses by the other.

    python benchmarks/interference.py MODEL.gguf [--prompt 4000] [--rounds 3] [--nodes 2] [--dtype auto] [--json]

Nodes of one core each on this machine. Prints the 99th percentile of the gaps between the first user's tokens while the
prompt is under way, beside the same without it, and the prompt's prefill rate beside its rate alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

from contenders import available_cores, context_for, end_in_order

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2pshard import AsyncClient
from p2pshard.bench.prompts import SAMPLE, draw_prompts
from tests.local_cluster import LocalCluster

_SHORT = 16
"""Tokens of the first user's prompt."""
_AHEAD_S = 1.0
"""For which the first user is alone."""


@dataclass(frozen=True)
class Outcome:
    """One round."""

    quiet_p99_ms: float
    """Gaps before the long prompt."""
    disturbed_p99_ms: float
    """Gaps that overlap with it."""
    disturbed_tokens_per_second: float
    """Of the first user, meanwhile."""
    alone_prefill: float
    """Tokens per second of a long prompt alone."""
    shared_prefill: float


def p99(values: Sequence[float]) -> float:
    """By nearest rank; 0 of none."""
    return sorted(values)[ceil(0.99 * len(values)) - 1] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(
            Path(folder), "--memory", options.memory, "--no-warm-worker", nodes=options.nodes
        )
        for node, core in zip(cluster.nodes, available_cores(options.nodes), strict=True):
            node.core = core
        with cluster:
            cluster.wait_measured()
            outcomes = asyncio.run(measure(cluster.nodes[0].address, options))
    middle = {k: median(getattr(o, k) for o in outcomes) for k in Outcome.__dataclass_fields__}
    middle["kept_prefill"] = median(o.shared_prefill / o.alone_prefill for o in outcomes)
    if options.json:
        print(json.dumps({"prompt": options.prompt, "rounds": [vars(o) for o in outcomes], "median": middle}))
        return
    for name, value in middle.items():
        print(f"{name:30} {value:10.2f}")


async def measure(address: str, options: argparse.Namespace) -> list[Outcome]:
    rng = random.Random(7)
    async with AsyncClient([address]) as client:
        deployment = await client.deploy(
            str(options.model.resolve()),
            nodes=options.nodes,
            dtype=options.dtype,
            context=context_for(options.prompt + 512),
            concurrency=2,
        )
        model = deployment.model
        first = client.generate(model, SAMPLE, max_tokens=1)
        await first.result()
        outcomes = []
        for _ in range(options.rounds):
            alone, shared = draw_prompts(first.prompt_ids, 2, options.prompt, rng)
            (short,) = draw_prompts(first.prompt_ids, 1, _SHORT, rng)
            began, given = await prefill(client, model, alone)
            alone_rate = options.prompt / (given - began)
            times: list[float] = []
            # More tokens than it will be given: it is cancelled when the prompt is done.
            listening = asyncio.create_task(listen(client, model, short, options.prompt, times))
            await asyncio.sleep(_AHEAD_S)
            began, given = await prefill(client, model, shared)
            if listening.done():
                raise SystemExit(
                    f"the first user's answer ended before the prompt did: {listening.exception()}"
                )
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            outcomes.append(outcome(times, began, given, options.prompt, alone_rate))
        return outcomes


async def prefill(client: AsyncClient, model: str, prompt: Sequence[int]) -> tuple[float, float]:
    """When the prompt was sent and when its first token came."""
    began = time.perf_counter()
    await client.generate(model, prompt, max_tokens=1, temperature=0, ignore_eos=True).result()
    return began, time.perf_counter()


async def listen(
    client: AsyncClient, model: str, prompt: Sequence[int], tokens: int, times: list[float]
) -> None:
    async for delta in client.generate(model, prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        times += [time.perf_counter()] * len(delta.tokens)


def outcome(times: Sequence[float], began: float, given: float, prompt: int, alone: float) -> Outcome:
    """``times``: of the first user's tokens. The long prompt was under way from ``began`` to ``given``."""
    gaps = list(itertools.pairwise(times))
    quiet = [(b - a) * 1e3 for a, b in gaps if b <= began]
    disturbed = [(b - a) * 1e3 for a, b in gaps if b > began and a < given]
    during = sum(began < t <= given for t in times)
    return Outcome(p99(quiet), p99(disturbed), during / (given - began), alone, prompt / (given - began))


if __name__ == "__main__":
    main()
