"""The plan that follows one whose nodes are gone in part: what is in memory stays where it is. Pure.

Best is a node for each that is gone, with just its layers: all others keep their stage, and nothing of theirs is loaded.
Else the nodes that are left share the layers anew, in the order they had, so that each keeps many of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from p2pshard.planning.plan import Plan
from p2pshard.planning.profiles import ModelProfile
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import Cluster, Fit, cut_best, least_context, problem_for, roomiest

__all__ = ["succeed"]


def succeed(before: Plan, cluster: Cluster, model: ModelProfile, settings: Settings) -> Fit | None:
    """A fit that keeps to ``before``; None where that cannot be, or is not what is asked for now."""
    same = (before.manifest, before.dtype, before.concurrency) == (
        model.manifest,
        model.dtype,
        settings.concurrency,
    )
    asked = settings.context in (None, before.context) and before.context <= model.max_context
    if not same or not asked or cluster.pins or len(before.replicas) != 1:
        return None
    if cluster.count not in (None, len(before.stages)):
        return None
    sizes = Fit((), before.context, before.concurrency, before.chunk_tokens)
    found = _substituted(before, cluster, model, sizes)
    if found is None and cluster.count is None:
        found = _among_survivors(before, cluster, model, settings, sizes)
    return found


def _substituted(before: Plan, cluster: Cluster, model: ModelProfile, sizes: Fit) -> Fit | None:
    """Every stage as it was, with another node where its own is gone; the fastest that fits."""
    problem = problem_for(cluster, model, sizes)
    numbers = {node.node: number for number, node in enumerate(cluster.nodes)}
    had = {stage.node for stage in before.stages}
    spares = [n for n, node in enumerate(cluster.nodes) if node.node not in had]
    spares.sort(key=lambda n: -problem.speeds[n])  # stable: among equals the one with most room

    def choices(place: int) -> Iterator[int]:
        stage = before.stages[place]
        own = numbers.get(stage.node)
        first, last = stage.layers
        for number in [own] if own is not None else spares:
            if problem.fits(number, first, last + 1):
                yield number

    def extend(order: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(order) == len(before.stages):
            return order if problem.linked[order[-1]][order[0]] else None
        for number in choices(len(order)):
            if number in order or (order and not problem.linked[order[-1]][number]):
                continue
            if (whole := extend((*order, number))) is not None:
                return whole
        return None

    order = extend(())
    if order is None:
        return None
    return replace(sizes, order=order, ends=tuple(stage.layers[1] + 1 for stage in before.stages))


def _among_survivors(
    before: Plan, cluster: Cluster, model: ModelProfile, settings: Settings, sizes: Fit
) -> Fit | None:
    """The layers shared anew by those that are left, with the context they had if it fits, else the largest that does."""
    numbers = {node.node: number for number, node in enumerate(cluster.nodes)}
    order = tuple(numbers[s.node] for s in before.stages if s.node in numbers)
    if not order or not cluster.ring(order):
        return None

    def at(chunk: int, context: int) -> Fit | None:
        return cut_best(cluster, model, replace(sizes, order=order, context=context, chunk_tokens=chunk))

    if (found := at(sizes.chunk_tokens, sizes.context)) is not None:
        return found
    least = least_context(model, settings)
    return roomiest(at, least, least if settings.context is not None else sizes.context)
