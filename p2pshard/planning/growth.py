"""Whether nodes that a plan leaves idle would gain enough to move for, and the plan that has them. Pure.

The nodes that have stages keep their order, and a newcomer comes between two of them, so that most layers stay where they
are. It gains context, where none was asked for and the model has more, or speed for the requests that run now: a pipeline
helps many at once and is a burden to one alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from p2pshard.planning.ordering import Problem
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import (
    Cluster,
    Fit,
    choose_candidates,
    cut_best,
    least_context,
    plan_of,
    problem_for,
    roomiest,
)
from p2pshard.planning.wire import with_wires

__all__ = ["LEAST_GAIN", "Growth", "Pace", "grow", "tokens_per_s"]

LEAST_GAIN = 1.15
"""Predicted speed over speed now that a move is worth."""
LEAST_CONTEXT_GAIN = 1.25
_HOP_S = 1e-3
"""What a stage costs each step besides its computing, on a link without delay; measured: 0.5 to 1.1 ms."""
_PING_S = 2e-3
"""Of the time of a ping, what may be the daemons' own on busy machines."""
_UNMEASURED_GBPS = 10.0
_MANY = 4
"""Sequences from which the driver keeps several groups under way, of two at least."""
_ROWS_FREE = {"int8": 2.0, "int4": 2.0}
_ROWS_FREE_PLAIN = 16.0
"""Rows of a step from which it takes longer, for it multiplies rather than reads. Measured on processors: quantised kernels
take 3.5 to 3.7 times as long for 8 rows as for one."""


@dataclass(frozen=True)
class Pace:
    """What decoding takes under the plan in force, as measured: nodes are slower than their memory where they share
    their processors, and attention takes longer the more there is to look at."""

    step_s: float
    """All stages' computing for one step, summed."""
    rows: float
    """Of such a step."""


@dataclass(frozen=True)
class Growth:
    """What was found."""

    plan: Plan | None
    """To move to; None: stay."""
    why: str
    """For people: what it gains."""
    idle: Mapping[str, str]
    """Nodes that have no stage if nothing moves, by id, and why."""


@dataclass(frozen=True)
class _Option:
    fit: Fit
    speed: float


def tokens_per_s(
    problem: Problem,
    order: Sequence[int],
    ends: Sequence[int],
    dtype: str,
    streams: int,
    hop_s: float,
    slowness: float = 1.0,
) -> float:
    """Predicted for so many sequences at once; good for comparing plans of one model.

    ``slowness``: how many times longer computing takes than memory bandwidth says. A stage reads its weights for every
    group of sequences that passes, and needs longer for many rows. As many groups are under way as there are stages, so
    the slowest stage sets the pace, or the way around where there are few.
    """
    stages = len(order)
    groups = 1 if streams < _MANY else min(stages, streams // 2)
    times = [t * slowness for t in _times(problem, order, ends, dtype, streams / groups)]
    cycle = max(groups * max(times), sum(times) + (stages * hop_s if stages > 1 else 0.0))
    return streams / cycle


def _times(
    problem: Problem, order: Sequence[int], ends: Sequence[int], dtype: str, rows: float
) -> list[float]:
    """Seconds that each stage computes for a step of so many rows, by its memory bandwidth."""
    slower = max(1.0, rows / _ROWS_FREE.get(dtype, _ROWS_FREE_PLAIN))
    unit = 1e9 if any(speed != 1.0 for speed in problem.speeds) else _UNMEASURED_GBPS * 1e9
    times = []
    for number, start, end in zip(order, (0, *ends[:-1]), ends, strict=True):
        work = sum(problem.work[start:end]) + problem.head_work * (end == len(problem.work))
        times.append(work * slower / (problem.speeds[number] * unit))
    return times


def grow(
    before: Plan,
    nodes: Sequence[NodeBudget],
    model: ModelProfile,
    links: Iterable[LinkProfile],
    settings: Settings,
    epoch: Epoch,
    streams: int,
    pace: Pace | None = None,
) -> Growth:
    """``before``: the plan in force, of which every node is among ``nodes``; ``streams``: sequences that run at once;
    ``pace``: how long they take now, if that is known."""
    links = tuple(links)
    cluster = choose_candidates(nodes, model, links, settings)
    numbers = {node.node: number for number, node in enumerate(cluster.nodes)}
    had = {stage.node for stage in before.stages}
    spare = [n for n, node in enumerate(cluster.nodes) if node.node not in had]
    outside = {
        n.node: "excluded, or it does not compute in this dtype" for n in nodes if n.node not in numbers
    }
    if not spare or had - set(numbers):
        return Growth(None, "", outside)
    if fixed := _fixed(before, model, settings):
        return Growth(None, "", outside | {cluster.nodes[n].node: fixed for n in spare})
    sizes = Fit(
        tuple(numbers[s.node] for s in before.stages),
        before.context,
        before.concurrency,
        before.chunk_tokens,
        tuple(s.layers[1] + 1 for s in before.stages),
    )
    search = _Search(cluster, model, before.dtype, streams, _hop_s(links))
    if pace is not None:
        search = replace(search, slowness=search.compared(sizes, pace))
    idle = dict(outside)
    now = search.rate(sizes)
    found, why = _more_context(search, sizes, spare, settings), ""
    if found is not None:
        why = f"context {found.context:,} instead of {before.context:,}"
    else:
        option, gain = _faster(search, sizes, spare, now)
        if option is not None and gain >= LEAST_GAIN:
            found = option.fit
            why = f"{gain:.2f} times the speed with {search.streams} requests at once"
        for number in spare:
            idle[cluster.nodes[number].node] = _why_idle(option, gain, search.streams)
    if found is None:
        return Growth(None, "", idle)
    plan = with_wires(plan_of(found, cluster, model, epoch), settings.wire, links, model.hidden)
    return Growth(plan, why, {k: v for k, v in idle.items() if k not in plan.nodes})


def _fixed(before: Plan, model: ModelProfile, settings: Settings) -> str:
    """Why the plan takes no more nodes, whatever they offer; empty when it might."""
    if settings.nodes is not None:
        return f"--nodes {settings.nodes} was asked for"
    if settings.layers:
        return "layers were given to nodes by hand"
    if before.dtype != model.dtype or len(before.replicas) != 1:
        return "another dtype was asked for"
    if len(before.stages) >= model.layers:
        return "every stage has one layer"
    return ""


def _why_idle(option: _Option | None, gain: float, streams: int) -> str:
    if option is None:
        return "it has too little memory for a layer, or no link to the nodes beside it"
    return (
        f"the layers fit without it, and with {streams} request{'s'[: streams != 1]} at once it is predicted to make "
        f"{gain:.2f} times the speed; {LEAST_GAIN} is worth moving for"
    )


def _hop_s(links: Sequence[LinkProfile]) -> float:
    rtt_s = median(link.rtt_ms for link in links) / 1000 if links else 0.0
    return _HOP_S + max(0.0, rtt_s - _PING_S) / 2


@dataclass(frozen=True)
class _Search:
    cluster: Cluster
    model: ModelProfile
    dtype: str
    streams: int
    hop_s: float
    slowness: float = 1.0

    def compared(self, sizes: Fit, pace: Pace) -> float:
        """How many times longer computing takes than predicted."""
        assert sizes.ends is not None, "cut"
        times = _times(self.problem(sizes), sizes.order, sizes.ends, self.dtype, pace.rows)
        return pace.step_s / sum(times)

    def problem(self, sizes: Fit) -> Problem:
        return problem_for(self.cluster, self.model, sizes)

    def cut(self, fit: Fit) -> Fit | None:
        return cut_best(self.cluster, self.model, fit)

    def rate(self, fit: Fit) -> float:
        assert fit.ends is not None, "cut"
        return tokens_per_s(
            self.problem(fit), fit.order, fit.ends, self.dtype, self.streams, self.hop_s, self.slowness
        )

    def with_one(self, sizes: Fit, number: int) -> _Option | None:
        """The best place for one more node among those that there are."""
        best: _Option | None = None
        # behind the others first: of equals the first is kept, and the first stage's driver stays where it is
        for place in (*range(1, len(sizes.order) + 1), 0):
            order = (*sizes.order[:place], number, *sizes.order[place:])
            fit = self.cut(replace(sizes, order=order)) if self.cluster.ring(order) else None
            if fit is None:
                continue
            speed = self.rate(fit)
            if best is None or speed > best.speed * 1.001:
                best = _Option(fit, speed)
        return best


def _faster(search: _Search, sizes: Fit, spare: Sequence[int], now: float) -> tuple[_Option | None, float]:
    """The option with the best speed, one node more at a time, and how much faster it is."""
    best: _Option | None = None
    reached, left = sizes, list(spare)
    while left and len(reached.order) < search.model.layers:
        options = [(o, n) for n in left if (o := search.with_one(reached, n)) is not None]
        if not options:
            break
        option, number = max(options, key=lambda pair: pair[0].speed)
        if best is not None and option.speed < best.speed * LEAST_GAIN:
            break
        best, reached = option, option.fit
        left.remove(number)
    return best, best.speed / now if best is not None else 0.0


def _more_context(search: _Search, sizes: Fit, spare: Sequence[int], settings: Settings) -> Fit | None:
    """The first nodes more that give much more context, where people asked for none."""
    most = search.model.max_context
    if settings.context is not None or sizes.context * LEAST_CONTEXT_GAIN > most:
        return None
    reached = sizes
    for number in spare:
        option = search.with_one(reached, number)
        if option is None:
            continue
        reached = option.fit
        order = reached.order

        def at(chunk: int, context: int, order: tuple[int, ...] = order) -> Fit | None:
            return search.cut(Fit(order, context, sizes.concurrency, chunk))

        found = roomiest(at, least_context(search.model, settings), most)
        if found is not None and found.context >= sizes.context * LEAST_CONTEXT_GAIN:
            return found
    return None
