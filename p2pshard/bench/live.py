"""Runs requests against a deployment and takes the times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from p2pshard.bench.figures import Figures, Timeline
from p2pshard.bench.prompts import SAMPLE, draw_prompts
from p2pshard.client import AsyncClient, GenerateOptions
from p2pshard.errors import ContextExceeded, Internal, InvalidRequest
from p2pshard.planning.plan import Plan
from p2pshard.trace import Trace

__all__ = ["Measured", "measure"]

_PAUSE_S = 1.2
"""More than what parts two spells of a trace."""
_TRACE_S = 5.0
"""How long a finished spell's trace may take to reach the node that is asked; nodes gossip several times a second."""


@dataclass(frozen=True)
class Measured:
    """One number of streams."""

    figures: Figures
    trace: Trace | None
    """Of these rounds; None when the cluster was not seen to finish them on this plan, as with requests of others."""


async def measure(
    client: AsyncClient,
    model: str,
    plan: Plan,
    streams: Sequence[int],
    *,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    shared_prefix: bool = False,
    speculation: str | int = "off",
) -> AsyncIterator[Measured]:
    """Measure a deployed model with each number of streams in turn.

    Args:
        plan: of the deployment; bounds what may be asked.
        prompt_tokens: exact length of every prompt, at least 1.
        tokens: given to every prompt, end of text or not; at least 2.
        shared_prefix: prompts differ in their last tokens only, rather than from the first on.
        speculation: of every request, see `GenerateOptions`.

    Raises:
        ContextExceeded, InvalidRequest: the deployment has no room for such requests.
        P2PShardError: what a request failed with.
    """
    _check_room(plan, max(streams), prompt_tokens + tokens)
    known = await _token_ids(client, model, plan.context)
    rng = random.Random()
    for count in streams:
        await asyncio.sleep(_PAUSE_S)
        before = await _trace(client, model)
        prompts = draw_prompts(known, count * rounds, prompt_tokens, rng, shared_prefix=shared_prefix)
        options = GenerateOptions(max_tokens=tokens, temperature=0, ignore_eos=True, speculation=speculation)
        timelines = [
            await _round(client, model, prompts[i * count : (i + 1) * count], options) for i in range(rounds)
        ]
        trace = await _finished_trace(client, model, before.spell if before else 0)
        if trace is not None and any(
            phase and len(phase.stages) != len(plan.stages) for phase in (trace.decode, trace.prefill)
        ):
            trace = None
        yield Measured(Figures.of(timelines, prompt_tokens), trace)


def _check_room(plan: Plan, streams: int, length: int) -> None:
    if length > plan.context:
        raise ContextExceeded(
            f"prompt and answer have {length:,} tokens, the context of {plan.model} holds {plan.context:,}; "
            "use a smaller --prompt or --tokens, or deploy with more --context",
            context=plan.context,
        )
    blocks = streams * -(-length // plan.block_size)
    if blocks > plan.blocks:
        raise InvalidRequest(
            f"{streams} streams of {length:,} tokens need {blocks:,} KV blocks, the plan has {plan.blocks:,}; "
            "some would wait for others. Use fewer --streams, or deploy with more --concurrency or --context"
        )


async def _token_ids(client: AsyncClient, model: str, context: int) -> tuple[int, ...]:
    """Ids of ordinary tokens; also the request that nothing is measured on."""
    # A tokenizer may need one token a character, and begin with one more.
    stream = client.generate(model, SAMPLE[: max(1, context - 2)], max_tokens=1, temperature=0)
    await stream.result()
    return stream.prompt_ids


async def _round(
    client: AsyncClient, model: str, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> list[Timeline]:
    """All prompts at once; when one fails, the others are cancelled."""
    tasks = [asyncio.create_task(_request(client, model, p, options)) for p in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _request(
    client: AsyncClient, model: str, prompt: Sequence[int], options: GenerateOptions
) -> Timeline:
    times: list[float] = []
    began = time.perf_counter()
    stream = client.generate(model, prompt, **options)
    async for delta in stream:
        times += [time.perf_counter()] * len(delta.tokens)
    if len(times) != options["max_tokens"]:
        reason = (await stream.result()).finish_reason
        raise Internal(f"a request for {options['max_tokens']} tokens ended with {len(times)} ({reason})")
    return Timeline(began, tuple(times))


async def _trace(client: AsyncClient, model: str) -> Trace | None:
    deployment = (await client.status()).deployment(model)
    return deployment.trace if deployment else None


async def _finished_trace(client: AsyncClient, model: str, spell_before: int) -> Trace | None:
    """The trace of the spell after ``spell_before`` once it is over and counts no longer change."""
    deadline = time.monotonic() + _TRACE_S
    last: Trace | None = None
    while time.monotonic() < deadline:
        trace = await _trace(client, model)
        if trace is not None and trace.spell > spell_before and not trace.under_way and trace == last:
            return trace
        last = trace
        await asyncio.sleep(0.7)
    return None
