"""How long answers stand still when a node's layers go to another one, politely: three stages and a spare, one machine.

    python benchmarks/moving.py MODEL [--streams 8] [--prompt 64] [--tokens 600] [--dtype auto] [--json]

MODEL: a name in the models folder, or a .gguf file. While so many answers are under way, the middle stage's node is paused
and resumed, then the first stage's node leaves; each time after a fifth of the tokens. Prints, for each, how long that
took, the longest gap between two tokens of an answer, the longest one without any move beside it, and whether all
tokens are those of the undisturbed answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from contenders import end_in_order

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from p2pshard import Client
from p2pshard.bench.prompts import draw_prompts
from p2pshard.config import default_models_dir
from tests.local_cluster import LocalCluster, Node
from tests.town import Asking
from tests.waiting import until

_READY_S = 30.0
"""After a deployment, until a spare has begun to make itself ready for it."""
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Round:
    """Answers under way, and what happened meanwhile."""

    what: str
    took_s: float
    """Of the command."""
    longest_gap_s: float
    same_tokens: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    end_in_order()
    with tempfile.TemporaryDirectory() as folder:
        rounds = run(Path(folder), options)
    if options.json:
        print(json.dumps([asdict(r) for r in rounds]))
        return
    print(f"{'':24}{'took':>8}{'longest gap':>14}  tokens")
    for r in rounds:
        print(f"{r.what:24}{r.took_s:7.2f}s{r.longest_gap_s:13.2f}s  {'same' if r.same_tokens else 'DIFFER'}")


def compiling() -> bool:
    """Whether a node still makes itself ready for what it may be given."""
    return any("p2pshard_node.engine.fused.prepare" in p.info["cmdline"] for p in _processes())


def _processes() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]


def run(folder: Path, options: argparse.Namespace) -> list[Round]:
    path = Path(options.model)
    path = path if path.exists() else default_models_dir() / f"{options.model}.gguf"
    with LocalCluster(folder, nodes=4) as cluster:
        cluster.wait_measured()
        gateway = cluster.nodes[0]
        with Client([gateway.address]) as client:
            context = options.prompt + options.tokens + 16
            client.deploy(
                str(path), context=context, concurrency=options.streams, nodes=3, dtype=options.dtype
            )
            model = client.status().deployments[0].model
        prompts = draw_prompts(range(100, 1000), options.streams, options.prompt, random.Random(1))
        names = {n["id"]: n["name"] for n in cluster.status(gateway)["nodes"]}

        time.sleep(_READY_S)
        until(lambda: not compiling(), 300, "every node has its kernels", every=0.5)

        def holders() -> list[Node]:
            row = cluster.status(cluster.nodes[0])["deployments"][0]
            at = [names[s["ranks"][0]["node"]] for s in row["plan"]["replicas"][0]["stages"]]
            return [next(n for n in cluster.nodes if n.name == name) for name in at]

        asked = [(prompt, {"temperature": 0}) for prompt in prompts]

        def answered(act: Callable[[], Any]) -> tuple[float, float, list[tuple[int, ...]]]:
            """Seconds that `act` took, the longest gap since it began, and the tokens."""
            asking = Asking([gateway], options.tokens, model=model, asked=asked)
            asking.given(options.tokens // 5, _PATIENCE_S)
            asking.longest = [0.0] * options.streams  # what came before is the reading of prompts
            began = time.monotonic()
            act()
            took = time.monotonic() - began
            ids = [answer.token_ids for answer in asking.join(_PATIENCE_S)]
            return took, max(asking.longest), ids

        _, gap, undisturbed = answered(lambda: None)
        rounds = [Round("nothing", 0.0, gap, True)]

        def disturbed(what: str, act: Callable[[], Any]) -> None:
            took, gap, ids = answered(act)
            rounds.append(Round(what, took, gap, ids == undisturbed))

        middle = holders()[1]
        disturbed("pause the middle stage", lambda: middle.cli("pause", middle.name))
        middle.cli("resume", middle.name)
        first = next(n for n in holders() if n is not gateway)
        disturbed("another node leaves", lambda: first.cli("leave"))
        return rounds


if __name__ == "__main__":
    main()
