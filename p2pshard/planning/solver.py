"""Budgets, links and a model in; a plan out. Pure: equal inputs give equal plans.

The fewest nodes that fit, then the largest steps, then (when not asked for one) the largest context on those nodes;
within their budgets, layers are spread so that the slowest stage is as fast as can be. Up to `EXACT_NODES` candidates
a plan is found whenever there is one; with more the search is bounded and may miss a fit that only an unusual order has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from p2pshard.errors import Internal, InvalidRequest
from p2pshard.planning.memory import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    blocks_for,
    kv_bytes,
    workspace_bytes,
)
from p2pshard.planning.ordering import Capacity, Problem, balance, find_order
from p2pshard.planning.plan import Epoch, Plan, Rank, Replica, Stage
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.planning.wire import with_wires

__all__ = [
    "LEAST_CONTEXT",
    "Cluster",
    "Fit",
    "choose_candidates",
    "decode_speeds",
    "fit",
    "least_context",
    "make_plan",
    "problem_of",
    "roomiest",
]

LEAST_CONTEXT = 8192
"""Without a context asked for: at least this, or the model's maximum if that is less."""
_NOISE = 1.5
"""Two measurements of one busy machine differ by up to so much; plans should not."""
_LAYER_BESIDE = 2_500_000
"""What a layer costs beside what it reads (norms, attention, rounding of activations), as bytes read in that time: 0.1 to
0.2 ms a step on a core that gets through 15 to 20 GB of weights a second (docs/BENCHMARKS.md). It tells in small models
only: the head of SmolLM2-135M then counts as 4 layers, and as 3.3 by the time it takes."""
_ID_PREFIX = 6
"""Characters of an id that are taken for it."""
_KV_READ = 0.25
"""Of the room for keys and values, what a decode step reads beside all weights: half of the sequences, half full."""
_INVARIANT = ("int8", "int4")
"""Dtypes whose kernels are expected to give a row the same bits wherever and beside whatever it is computed."""


@dataclass(frozen=True)
class Cluster:
    """The nodes that may be used, most wanted first, with the user's pins resolved to ids."""

    nodes: tuple[NodeBudget, ...]
    pairs: frozenset[frozenset[str]]
    """Ids of nodes with a fresh link between them."""
    pins: tuple[tuple[str, int, int], ...] = ()
    """(node id, first, last)."""
    count: int | None = None
    """Exactly so many stages."""

    def ring(self, order: Sequence[int]) -> bool:
        """Whether each node of an order, by number, reaches the next, and the last the first."""
        return all(self.matrix[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True))

    def linked(self, a: str, b: str) -> bool:
        return a == b or frozenset((a, b)) in self.pairs

    @cached_property
    def matrix(self) -> tuple[tuple[bool, ...], ...]:
        """`linked` by number in ``nodes``."""
        return tuple(tuple(self.linked(a.node, b.node) for b in self.nodes) for a in self.nodes)


@dataclass(frozen=True)
class Fit:
    """A choice of nodes, in pipeline order, that holds the model with these sizes."""

    order: tuple[int, ...]
    """Numbers in ``Cluster.nodes``."""
    context: int
    concurrency: int
    chunk_tokens: int
    ends: tuple[int, ...] | None = None
    """One past the last layer of each; None: where they are best."""


def make_plan(
    nodes: Sequence[NodeBudget],
    model: ModelProfile,
    links: Iterable[LinkProfile],
    settings: Settings,
    epoch: Epoch,
    *,
    smaller: Sequence[ModelProfile] = (),
    before: Plan | None = None,
) -> Plan:
    """Give every layer to exactly one node, within every budget.

    ``before``: a plan that is to be replaced because some of its nodes are gone; see `succession`.
    ``smaller``: the same model in smaller dtypes; the first that fits is suggested when ``model`` does not.

    Raises:
        DoesNotFit: with ``shortfall_bytes``, ``terms`` and ``suggestions`` in its details.
        InvalidRequest: a node that is no member, a context above the model's, layers that it does not have.
    """
    links = tuple(links)
    cluster = choose_candidates(nodes, model, links, settings)
    if before is not None:
        from p2pshard.planning.succession import succeed  # it asks for problems of this module

        if (kept := succeed(before, cluster, model, settings)) is not None:
            return with_wires(plan_of(kept, cluster, model, epoch), settings.wire, links, model.hidden)
    found = fit(cluster, model, settings)
    if found is None:
        from p2pshard.planning.shortfall import refusal  # it asks "what if" of this module

        raise refusal(cluster, nodes, model, links, settings, smaller)
    return with_wires(plan_of(found, cluster, model, epoch), settings.wire, links, model.hidden)


def choose_candidates(
    nodes: Sequence[NodeBudget], model: ModelProfile, links: Iterable[LinkProfile], settings: Settings
) -> Cluster:
    """Check the settings against the members and keep the nodes that may be used. Raises `InvalidRequest`."""
    if settings.context is not None and settings.context > model.max_context:
        raise InvalidRequest(
            f"context {settings.context} is more than the model's own {model.max_context} tokens",
            field="context",
            context=settings.context,
            max_context=model.max_context,
        )
    if settings.nodes is not None and settings.nodes > model.layers:
        raise InvalidRequest(
            f"{settings.nodes} nodes for {model.layers} layers; each needs at least one", field="nodes"
        )
    members = {n.node: n.name for n in nodes}
    excluded = {member_called(members, name, "exclude") for name in settings.exclude}
    pins: list[tuple[str, int, int]] = []
    for pin in settings.layers:
        node = member_called(members, pin.node, "layers")
        can = {dtype for n in nodes if n.node == node for dtype in n.dtypes}
        if can and model.dtype not in can:
            raise InvalidRequest(
                f"{pin.node} is given layers, and computes in {', '.join(sorted(can))}, not in {model.dtype}; choose "
                "another --dtype, or give the layers to another node",
                field="layers",
            )
        if pin.last >= model.layers:
            raise InvalidRequest(
                f"layers {pin.first}-{pin.last} for {pin.node}: the model has layers 0-{model.layers - 1}",
                field="layers",
            )
        if node in excluded:
            raise InvalidRequest(f"{pin.node} has both layers and an exclusion", field="exclude")
        if node in (other for other, _, _ in pins):
            raise InvalidRequest(
                f"{pin.node} is given layers twice; a node holds one run of layers", field="layers"
            )
        pins.append((node, pin.first, pin.last))
    if settings.nodes is not None and len(pins) > settings.nodes:
        raise InvalidRequest(f"layers name {len(pins)} nodes and nodes is {settings.nodes}", field="nodes")

    able = [n for n in nodes if n.node not in excluded and (not n.dtypes or model.dtype in n.dtypes)]
    able.sort(key=lambda n: (n.base_bytes - n.budget_bytes, -n.bandwidth_gbps, -n.gflops, n.node, n.device))
    one_device = {n.node: n for n in reversed(able)}  # of each node the device with the most room
    chosen = tuple(n for n in able if one_device[n.node] is n)
    pairs = frozenset(frozenset((link.a, link.b)) for link in links if link.fresh)
    return Cluster(chosen, pairs, tuple(pins), settings.nodes)


def member_called(members: Mapping[str, str], name: str, field: str) -> str:
    """The id of the one member that a user means by a name, an id or the beginning of one, as `status` shows it.

    Args:
        members: names by id.
        field: the setting that names it.

    Raises:
        InvalidRequest: no member is called so, or several are.
    """
    found = [node for node, called in members.items() if name in (node, called)]
    if not found and len(name) >= _ID_PREFIX:
        found = [node for node in members if node.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(
            f"{field}: {len(found)} members are called {name!r}; use an id: {', '.join(found)}", field=field
        )
    names = ", ".join(dict.fromkeys(members.values())) or "none"
    raise InvalidRequest(f"{field}: no member is called {name!r}; members are {names}", field=field)


def least_context(model: ModelProfile, settings: Settings) -> int:
    """The context that must fit."""
    return settings.context or min(LEAST_CONTEXT, model.max_context)


def fit(cluster: Cluster, model: ModelProfile, settings: Settings) -> Fit | None:
    """The best choice, or None when nothing fits."""
    least, concurrency = least_context(model, settings), settings.concurrency
    smallest = problem_of(cluster, model, least, concurrency, CHUNK_TOKENS[-1])
    counts = range(1, len(cluster.nodes) + 1) if cluster.count is None else (cluster.count,)
    count = next((n for n in counts if find_order(smallest, n)), None)  # larger steps only need more
    if count is None:
        return None

    def at(chunk: int, context: int) -> Fit | None:
        order = find_order(problem_of(cluster, model, context, concurrency, chunk), count)
        return Fit(order, context, concurrency, chunk) if order else None

    return roomiest(at, least, least if settings.context is not None else model.max_context)


def roomiest(fit_at: Callable[[int, int], Fit | None], least: int, most: int) -> Fit | None:
    """The largest steps that fit with a context of ``least`` and, with them, the largest context up to ``most``.

    ``fit_at(chunk_tokens, context)`` says whether so much fits.
    """
    for chunk in CHUNK_TOKENS:
        if found := fit_at(chunk, least):
            return _largest_context(partial(fit_at, chunk), found, most) if most > least else found
    return None


def _largest_context(fit_at: Callable[[int], Fit | None], found: Fit, most: int) -> Fit:
    """Grow a fit to the largest context up to ``most``: less context never needs more memory."""
    whole = fit_at(most)
    if whole is not None:
        return whole
    low, high = found.context // BLOCK_SIZE, -(-most // BLOCK_SIZE)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        option = fit_at(middle * BLOCK_SIZE)
        if option is None:
            high = middle
        else:
            low, found = middle, option
    return found


def problem_for(cluster: Cluster, model: ModelProfile, sizes: Fit) -> Problem:
    """`problem_of` with the sizes of a fit."""
    return problem_of(cluster, model, sizes.context, sizes.concurrency, sizes.chunk_tokens)


def cut_best(cluster: Cluster, model: ModelProfile, fit: Fit) -> Fit | None:
    """A fit with its order cut where it is fastest; None where that does not hold the model."""
    ends = balance(problem_for(cluster, model, fit), fit.order)
    return replace(fit, ends=ends) if ends is not None else None


def problem_of(
    cluster: Cluster, model: ModelProfile, context: int, concurrency: int, chunk_tokens: int
) -> Problem:
    """The search problem: what each layer costs, and what each node has left for layers."""
    blocks = blocks_for(context, concurrency)
    kv = [kv_bytes(model, i, i, blocks) for i in range(model.layers)]
    costs = tuple(model.layer_bytes[i] + kv[i] + model.padding_bytes(i, i) for i in range(model.layers))
    plain = workspace_bytes(model, context, chunk_tokens, head=False)
    headed = workspace_bytes(model, context, chunk_tokens, head=True)
    pins = {node: (first, last) for node, first, last in cluster.pins}
    candidates = []
    for node in cluster.nodes:
        left = node.budget_bytes - node.base_bytes - model.common_bytes
        last = left - headed - model.head_bytes
        candidates.append(
            Capacity(
                middle=left - plain,
                first=left - plain - model.embedding_bytes,
                last=last,
                only=last - model.embedding_bytes + model.shared_saving_bytes,
                pin=pins.get(node.node),
            )
        )
    return Problem(
        costs,
        tuple(candidates),
        cluster.matrix,
        work=tuple(model.layer_bytes[i] + kv[i] * _KV_READ + _LAYER_BESIDE for i in range(model.layers)),
        head_work=model.head_bytes,
        speeds=decode_speeds([node.bandwidth_gbps for node in cluster.nodes]),
    )


def decode_speeds(bandwidths: Sequence[float]) -> tuple[float, ...]:
    """How fast each node decodes, in any one unit: by the speed at which it reads weights and KV.

    Nodes of which none is `_NOISE` times another's bandwidth get one speed. Where a bandwidth was not measured
    (0), nothing can be compared: all are taken for equal.
    """
    if not all(bandwidths):
        return (1.0,) * len(bandwidths)
    speeds: dict[float, float] = {}
    fastest = 0.0
    for bandwidth in sorted(bandwidths, reverse=True):
        if bandwidth * _NOISE < fastest or not fastest:
            fastest = bandwidth
        speeds[bandwidth] = fastest
    return tuple(speeds[bandwidth] for bandwidth in bandwidths)


def plan_of(found: Fit, cluster: Cluster, model: ModelProfile, epoch: Epoch) -> Plan:
    """A fit with its bytes."""
    blocks = blocks_for(found.context, found.concurrency)
    whole = found if found.ends else cut_best(cluster, model, found)
    if whole is None or whole.ends is None:
        raise Internal(f"the order {found.order} was found to hold the model and has no cut that does")
    stages = tuple(
        _stage(cluster.nodes[number], model, start, end - 1, found, blocks)
        for number, start, end in zip(found.order, (0, *whole.ends[:-1]), whole.ends, strict=True)
    )
    plan = Plan(
        replicas=(Replica(stages),),
        epoch=epoch,
        numerics="invariant" if model.dtype in _INVARIANT else "tolerant",
        manifest=model.manifest,
        model=model.name,
        dtype=model.dtype,
        context=found.context,
        concurrency=found.concurrency,
        block_size=BLOCK_SIZE,
        blocks=blocks,
        chunk_tokens=found.chunk_tokens,
        layers=model.layers,
    )
    plan.check()
    return plan


def _stage(node: NodeBudget, model: ModelProfile, first: int, last: int, found: Fit, blocks: int) -> Stage:
    head = last == model.layers - 1
    rank = Rank(
        node=node.node,
        device=node.device,
        weight_bytes=model.weight_bytes(first, last),
        kv_bytes=kv_bytes(model, first, last, blocks),
        workspace_bytes=workspace_bytes(model, found.context, found.chunk_tokens, head=head)
        + model.padding_bytes(first, last),
        base_bytes=node.base_bytes,
        budget_bytes=node.budget_bytes,
    )
    return Stage((first, last), first == 0, head, (rank,))
