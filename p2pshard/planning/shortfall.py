"""Why a model does not fit, in numbers, and what would make it fit: suggestions that the solver tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from p2pshard.errors import DoesNotFit
from p2pshard.planning.memory import BLOCK_SIZE, CHUNK_TOKENS, blocks_for, kv_bytes, workspace_bytes
from p2pshard.planning.ordering import EXACT_NODES
from p2pshard.planning.profiles import LinkProfile, ModelProfile, NodeBudget
from p2pshard.planning.settings import Settings
from p2pshard.planning.solver import Cluster, choose_candidates, fit, least_context, problem_of
from p2pshard.units import format_bytes

__all__ = ["refusal", "terms"]

_MOST = 1 << 50
"""No budget that we try is above this."""
_NEW = "\0new"
"""Id of the node that is not there yet."""


def refusal(
    cluster: Cluster,
    nodes: Sequence[NodeBudget],
    model: ModelProfile,
    links: Iterable[LinkProfile],
    settings: Settings,
    smaller: Sequence[ModelProfile] = (),
) -> DoesNotFit:
    """The error for a request that `solver.fit` found no split for.

    ``smaller``: the same model in smaller dtypes, to be suggested when one fits.
    """
    links = tuple(links)
    needed = replace(settings, context=least_context(model, settings))  # growing a context is not asked here
    shortfall = _shortfall(cluster, model, needed)
    suggestions = [
        *_smaller_context(cluster, model, needed),
        *_less_concurrency(cluster, model, needed),
        *_smaller_dtype(nodes, links, needed, smaller),
        *_one_more_node(cluster, model, needed),
        *_without(nodes, model, links, needed),
        *_missing_links(cluster, model, needed),
    ]
    if not cluster.nodes:
        reason = f"none of {len(nodes)} members may be used" if nodes else "the cluster has no members"
    elif cluster.count is not None and cluster.count > len(cluster.nodes):
        reason = f"{cluster.count} nodes are asked for and {len(cluster.nodes)} can be used"
    elif shortfall:
        used = cluster.count or len(cluster.nodes)
        reason = f"{format_bytes(shortfall)} short on {used} node{'s'[: used > 1]}"
    elif _fits(_all_linked(cluster), model, needed):
        reason = "the nodes that have the memory cannot all reach each other"
    elif cluster.pins:
        reason = "the layers that --layers gives to no node have no node left that could take them"
    else:
        reason = "layers and nodes cannot be matched"
    return DoesNotFit(
        f"{model.name or 'the model'} in {model.dtype} with context {needed.context} x {needed.concurrency} "
        f"does not fit: {reason}",
        shortfall_bytes=shortfall,
        terms=terms(cluster, model, needed),
        suggestions=suggestions,
    )


def terms(cluster: Cluster, model: ModelProfile, settings: Settings) -> list[dict[str, Any]]:
    """Rows of bytes per term and node, filling the nodes in turn; a last row of what is then left over."""
    context, chunk = least_context(model, settings), CHUNK_TOKENS[-1]
    blocks = blocks_for(context, settings.concurrency)
    problem = problem_of(cluster, model, context, settings.concurrency, chunk)
    rows: list[dict[str, Any]] = []
    start = 0
    for number, node in enumerate(cluster.nodes):
        end = start
        while end < model.layers and problem.fits(number, start, end + 1):
            end += 1
        pin = problem.candidates[number].pin
        if pin is not None and problem.fits(number, start, pin[1] + 1):
            end = pin[1] + 1
        head = end == model.layers and end > start
        rows.append(
            {
                "node": node.name,
                "layers": f"{start}-{end - 1}" if end > start else "none",
                "weight_bytes": model.weight_bytes(start, end - 1) if end > start else 0,
                "kv_bytes": kv_bytes(model, start, end - 1, blocks) if end > start else 0,
                "workspace_bytes": workspace_bytes(model, context, chunk, head=head)
                + (model.padding_bytes(start, end - 1) if end > start else 0),
                "base_bytes": node.base_bytes,
                "budget_bytes": node.budget_bytes,
            }
        )
        start = end
    if start < model.layers:
        rows.append(
            {
                "node": "not placed",
                "layers": f"{start}-{model.layers - 1}",
                "weight_bytes": model.weight_bytes(start, model.layers - 1) - model.common_bytes,
                "kv_bytes": kv_bytes(model, start, model.layers - 1, blocks),
                "workspace_bytes": 0,
                "base_bytes": 0,
                "budget_bytes": 0,
            }
        )
    return rows


def _fits(cluster: Cluster, model: ModelProfile, settings: Settings) -> bool:
    return fit(cluster, model, settings) is not None


def _least(works: Callable[[int], bool], most: int) -> int | None:
    """The least number from 1 to ``most`` that works, if more always works as well."""
    if not works(most):
        return None
    low, high = 0, 1
    while high < most and not works(high):
        low, high = high, min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _shortfall(cluster: Cluster, model: ModelProfile, settings: Settings) -> int:
    """The fewest bytes that would do if one node had them more; of an empty cluster: all that is needed.

    0 when bytes are not what is missing.
    """
    if not cluster.nodes:
        return _least(lambda n: _fits(_joined(cluster, n), model, settings), _MOST) or 0
    best = 0
    count = len(cluster.nodes)
    for index in range(count if count <= EXACT_NODES else 1):  # with more: the one with the most room

        def works(extra: int, index: int = index) -> bool:
            node = cluster.nodes[index]
            more = replace(node, budget_bytes=node.budget_bytes + extra)
            return _fits(
                replace(cluster, nodes=(*cluster.nodes[:index], more, *cluster.nodes[index + 1 :])),
                model,
                settings,
            )

        if not best or works(best - 1):
            best = _least(works, (best or _MOST + 1) - 1) or best
    return best


def _joined(cluster: Cluster, budget: int) -> Cluster:
    """The cluster with one more node that all reach, its worker like the heaviest there is."""
    base = max((n.base_bytes for n in cluster.nodes), default=0)
    new = NodeBudget(_NEW, "new", budget_bytes=budget, base_bytes=base)
    pairs = cluster.pairs | {frozenset((_NEW, n.node)) for n in cluster.nodes}
    nodes = sorted((*cluster.nodes, new), key=lambda n: n.base_bytes - n.budget_bytes)
    return replace(cluster, nodes=tuple(nodes), pairs=pairs)


def _all_linked(cluster: Cluster) -> Cluster:
    """As if all nodes reached each other."""
    ids = [node.node for node in cluster.nodes]
    return replace(cluster, pairs=frozenset(frozenset((a, b)) for a in ids for b in ids if a != b))


def _smaller_context(cluster: Cluster, model: ModelProfile, settings: Settings) -> list[str]:
    asked = least_context(model, settings)

    def works(blocks: int) -> bool:
        return _fits(cluster, model, replace(settings, context=blocks * BLOCK_SIZE))

    low, high = 0, -(-asked // BLOCK_SIZE)
    if high < 2 or not works(1):
        return []
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return [f"a smaller context: --context {low * BLOCK_SIZE} fits"]


def _less_concurrency(cluster: Cluster, model: ModelProfile, settings: Settings) -> list[str]:
    low, high = 0, settings.concurrency  # low fits (or is none), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if _fits(cluster, model, replace(settings, concurrency=middle)) else (low, middle)
        )
    return [f"fewer full contexts at once: --concurrency {low} fits"] if low else []


def _smaller_dtype(
    nodes: Sequence[NodeBudget],
    links: tuple[LinkProfile, ...],
    settings: Settings,
    smaller: Sequence[ModelProfile],
) -> list[str]:
    for model in smaller:
        if _fits(choose_candidates(nodes, model, links, settings), model, settings):
            return [f"smaller weights: --dtype {model.dtype} fits"]
    return []


def _one_more_node(cluster: Cluster, model: ModelProfile, settings: Settings) -> list[str]:
    count = cluster.count
    if count is not None and count <= len(cluster.nodes):
        cluster = replace(cluster, count=None)
        if _fits(cluster, model, settings):
            return []  # the number of nodes is what is in the way
    megabytes = _least(lambda n: _fits(_joined(cluster, n * 10**6), model, settings), _MOST // 10**6)
    if megabytes is None:
        return []
    drop = " (and no --nodes)" if cluster.count != count else ""
    return [f"one more node with {megabytes} MB{drop}: p2pshard up --memory {megabytes}MB"]


def _without(
    nodes: Sequence[NodeBudget], model: ModelProfile, links: tuple[LinkProfile, ...], settings: Settings
) -> list[str]:
    """Wishes of the user without which it would fit."""
    options: list[tuple[str, Settings]] = []
    if settings.nodes is not None:
        options.append(("--nodes", replace(settings, nodes=None)))
    if settings.layers:
        options.append(("--layers", replace(settings, layers=())))
    options += [
        (f"--exclude {name}", replace(settings, exclude=tuple(n for n in settings.exclude if n != name)))
        for name in settings.exclude
    ]
    return [
        f"it fits without {what}"
        for what, changed in options
        if _fits(choose_candidates(nodes, model, links, changed), model, changed)
    ]


def _missing_links(cluster: Cluster, model: ModelProfile, settings: Settings) -> list[str]:
    names = {n.node: n.name for n in cluster.nodes}
    ids = sorted(names, key=lambda i: (names[i], i))
    absent = [(a, b) for i, a in enumerate(ids) for b in ids[i + 1 :] if not cluster.linked(a, b)]
    if not absent:
        return []
    if not _fits(_all_linked(cluster), model, settings):
        return []
    shown = ", ".join(f"{names[a]} and {names[b]}" for a, b in absent[:4])
    more = f" and {len(absent) - 4} more pairs" if len(absent) > 4 else ""
    return [f"it fits when these nodes reach each other: {shown}{more}"]
