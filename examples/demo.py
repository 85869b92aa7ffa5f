"""Three daemons on this machine run a model that none of them could hold alone: ``make demo``.

The daemons are real ones with their own data directories and memory budgets. They find each other by
zeroconf, agree on who holds which layers, and answer a question. However it ends, nothing of it is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from local_nodes import LocalNodes
from rich.console import Console

from p2pshard import Client, PlanResult
from p2pshard.cli.output import plan_table
from p2pshard.errors import DoesNotFit, P2PShardError
from p2pshard.units import format_bytes

MODEL = "smollm2-135m-instruct"
PROMPT = "What is the capital of France?"
CONTEXT = 2048
DTYPE = "float32"
"""In coarser dtypes this small model, whose two likeliest first words are nearly tied here, may begin otherwise."""


def main(console: Console) -> int:
    """Run the demo; the exit code."""
    nodes = LocalNodes()
    code = 1
    try:
        console.print(f"[bold]1. Pull {MODEL}[/] (once; about 100 MB)")
        pulled = subprocess.run([sys.executable, "-m", "p2pshard.cli", "pull", MODEL], check=False).returncode
        if pulled:
            return pulled
        code = _show(console, nodes)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stopped:  # SIGTERM, see below
        code = int(stopped.code or 0)
    except (P2PShardError, RuntimeError) as error:
        console.print(f"[bold red]failed:[/] {error}", markup=True)
        for node in nodes.nodes:
            console.print(f"--- {node.name}\n{node.tail()}", markup=False)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # stopping takes a second or two and must not be cut short
        console.print("[bold]6. Stop everything[/]")
        nodes.stop()
        left = nodes.left_behind()
        console.print(
            f"left behind: {', '.join(left)}" if left else "left behind: no process, no port, no directory"
        )
    return code or (1 if left else 0)


def _show(console: Console, nodes: LocalNodes) -> int:
    budget = _budget(console)
    console.print(
        f"[bold]3. Start three daemons[/], each with a budget of {format_bytes(budget)} for its workers"
    )
    for name in ("anna", "bert", "cleo"):
        nodes.start(name, "--memory", str(budget))
    console.print(f"   they found each other by zeroconf in {nodes.wait_for_members():.1f} s, start included")
    nodes.wait_until_measured()
    with nodes.client() as client:
        console.print("[bold]4. One of them alone cannot hold the model[/]")
        alone = client.plan(MODEL, context=CONTEXT, dtype=DTYPE, nodes=1)
        if alone.fits:
            raise RuntimeError("the plan for one node fits, which the budget should not allow")
        console.print(f"   {alone.reason} (short by {alone.shortfall_bytes:,} bytes)", markup=False)
        console.print("[bold]5. Together they do[/]")
        begin = time.monotonic()
        deployment = client.deploy(MODEL, context=CONTEXT, dtype=DTYPE, nodes=3)
        assert deployment.plan is not None
        console.print(plan_table(deployment.plan, client.status().names()))
        console.print(f"   loaded in {time.monotonic() - begin:.1f} s\n\n   > {PROMPT}\n   ", end="")
        stream = client.chat(deployment.model, PROMPT, max_tokens=48)
        for piece in stream:
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
        answer = stream.result()
        console.print(
            f"\n\n   {answer.completion_tokens} tokens at {answer.tokens_per_second:.1f} tokens/s, "
            f"the first after {answer.ttft_ms:.0f} ms"
        )
    return 0


def _budget(console: Console) -> int:
    """Bytes that hold a third of the model and not the whole of it.

    A daemon without a budget says what the whole takes: worker processes differ in size between machines.
    """
    console.print("[bold]2. Ask a daemon without a budget[/] what the whole model takes on one node")
    with LocalNodes() as nodes:
        nodes.start("whole")
        nodes.wait_for_members()
        nodes.wait_until_measured()
        with nodes.client() as client:
            whole = _plan_of_one(client)
    assert whole.plan is not None
    rank = whole.plan.stages[0].ranks[0]
    console.print(plan_table(whole.plan, {rank.node: "whole"}))
    return rank.base_bytes + rank.workspace_bytes + (rank.weight_bytes + rank.kv_bytes) * 11 // 20


def _plan_of_one(client: Client) -> PlanResult:
    plan = client.plan(MODEL, context=CONTEXT, dtype=DTYPE, nodes=1)
    if not plan.fits:
        raise DoesNotFit(
            f"too little free memory here for the demo: short by {format_bytes(plan.shortfall_bytes)}"
        )
    return plan


def stop(*_: object) -> None:
    """For SIGTERM: leave by way of the clean-up."""
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(Console(highlight=False)))
