"""What the verbs print: tables for people on a console, and one JSON object for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from p2pshard.models.catalogue import CatalogueEntry
from p2pshard.planning.plan import Plan
from p2pshard.results import ClusterStatus, Deployment, ModelEntry, PlanResult, Requests, Unreachable
from p2pshard.units import format_bytes

__all__ = [
    "catalogue_table",
    "console",
    "console_err",
    "deployments_table",
    "kv_table",
    "make_table",
    "models_table",
    "nodes_table",
    "not_joined_table",
    "plan_table",
    "print_json",
    "requests_table",
    "say_unreachable",
    "show_refusal",
    "terms_table",
    "wire_lines",
]

console = Console(highlight=False)
console_err = Console(stderr=True, highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """One object, one line, on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def make_table(title: str, *columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """Narrow, so that a plan fits 80 columns. ``right``: columns of numbers; they, and those of ``whole``, are shown
    as they are however narrow the console is: others are wrapped instead."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        number = column in right
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number or column in whole,
            overflow="ellipsis" if number else "fold",
        )
    return table


def plan_table(plan: Plan, names: Mapping[str, str]) -> Table:
    """Which node holds which layers, with planned bytes per term. ``names``: node id to name."""
    sizes = ("weights", "KV", "work", "base", "total", "budget")
    table = make_table(
        f"{plan.model}: {plan.layers} layers in {len(plan.stages)} stage{'s'[: len(plan.stages) > 1]}, "
        f"{plan.dtype}, context {plan.context:,}, {plan.numerics}",
        "node",
        "device",
        "layers",
        *sizes,
        right=sizes,
        whole=("device", "layers"),
    )
    table.columns[0].min_width = 4
    for stage in plan.stages:
        # embedding and head under the layers they belong to: a row of its own is narrower than a longer one
        parts = [
            f"{stage.layers[0]}-{stage.layers[1]}",
            *["+ embed"] * stage.embedding,
            *["+ head"] * stage.head,
        ]
        for rank in stage.ranks:
            table.add_row(
                names.get(rank.node, rank.node[:12]),
                rank.device,
                "\n".join(parts),
                *(
                    format_bytes(n)
                    for n in (
                        rank.weight_bytes,
                        rank.kv_bytes,
                        rank.workspace_bytes,
                        rank.base_bytes,
                        rank.total_bytes,
                        rank.budget_bytes,
                    )
                ),
            )
    return table


def wire_lines(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """For each edge whose hidden states do not travel raw: what that helps and what it costs."""
    lines = []
    for row in rows:
        if row["wire"] == "raw":
            continue
        pair = " -> ".join(names.get(node, node[:12]) for node in (row["from"], row["to"]))
        gain = ""
        if row["prefill_ms"] is not None:
            gain = (
                f"; {row['prefill_tokens']:,} prompt tokens take its {row['bandwidth_mbps']:,.0f} Mbit/s "
                f"{row['prefill_ms'] / 1e3:.1f} s, not {row['raw_prefill_ms'] / 1e3:.1f} s"
            )
        lines.append(
            f"{pair}: hidden states as {row['wire']}, about {row['error_percent']:g} % off each{gain}"
        )
    return lines


def terms_table(terms: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of bytes per term and node, as the planner sent them."""
    columns = list(dict.fromkeys(key for row in terms for key in row))
    sized = [
        c
        for c in columns
        if any(isinstance(row.get(c), int) and not isinstance(row.get(c), bool) for row in terms)
    ]
    table = make_table("Why it does not fit", *(c.removesuffix("_bytes").replace("_", " ") for c in columns))
    for column, name in zip(table.columns, columns, strict=True):
        column.justify = "right" if name in sized else "left"
    for row in terms:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    return table


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and ("bytes" in column or abs(value) >= 1 << 20)
    ):
        return ("-" if value < 0 else "") + format_bytes(abs(value))
    return str(value)


def show_refusal(details: Mapping[str, Any] | PlanResult) -> None:
    """The table of a plan that does not fit, and what would make it fit; on standard error."""
    if isinstance(details, PlanResult):
        details = {
            "terms": details.terms,
            "suggestions": details.suggestions,
            "shortfall_bytes": details.shortfall_bytes,
        }
    terms = details.get("terms")
    if terms:
        console_err.print(terms_table(list(terms)))
    elif "terms" in (details.get("left_out") or ()):
        console_err.print("`p2pshard plan` with the same flags shows the bytes per node")
    shortfall = details.get("shortfall_bytes")
    if shortfall:
        console_err.print(f"short by {format_bytes(int(shortfall))} ({int(shortfall):,} bytes)")
    for suggestion in details.get("suggestions") or ():
        console_err.print(f"  - {suggestion}", markup=False)


def nodes_table(status: ClusterStatus) -> Table:
    table = make_table(
        "Nodes",
        "name",
        "id",
        "address",
        "device",
        "free",
        "budget",
        "received",
        right=("free", "budget", "received"),
    )
    for n in status.nodes:
        table.add_row(
            n.name if n.state == "member" else f"{n.name} ({n.state})",
            n.id[:12],
            "\n".join(n.addresses),
            n.device,
            *(
                (format_bytes(n.memory_free), format_bytes(n.memory_budget))
                if n.device
                else ("measuring", "measuring")
            ),
            format_bytes(n.bytes_received),
        )
    return table


def not_joined_table(status: ClusterStatus) -> Table:
    table = make_table("Seen and not joined", "address", "reason")
    for peer in status.not_joined:
        table.add_row(peer.address, peer.reason)
    return table


def deployments_table(deployments: Sequence[Deployment], names: Mapping[str, str]) -> Table:
    table = make_table(
        "Deployments", "model", "state", "epoch", "context", "stages", "reason", right=("context",)
    )
    for d in deployments:
        stages = ""
        if d.plan:
            peaks = {m.node: m.peak_bytes for m in d.measured}
            stages = "\n".join(
                f"{names.get(s.node, s.node[:12])} {s.layers[0]}-{s.layers[1]}"
                + (f" (peak {format_bytes(peaks[s.node])})" if s.node in peaks else "")
                for s in d.plan.stages
            )
        table.add_row(
            d.model,
            d.state,
            str(d.plan.epoch.n) if d.plan else "",
            f"{d.plan.context:,}" if d.plan else "",
            stages,
            d.reason,
        )
    return table


def models_table(models: Sequence[ModelEntry], names: Mapping[str, str]) -> Table:
    table = make_table(
        "Models on the nodes", "name", "size", "nodes", "path", right=("size",), whole=("name",)
    )
    count = Counter(m.name for m in models)
    for m in models:
        content = f" ({m.digest[:12] or 'not hashed yet'})" if count[m.name] > 1 else ""
        nodes = ", ".join(names.get(n, n) for n in m.nodes)
        table.add_row(m.name + content, format_bytes(m.size_bytes), nodes, m.path)
    return table


def catalogue_table(entries: Iterable[CatalogueEntry], held: Collection[str]) -> Table:
    """``held``: names that some node has already."""
    table = make_table(
        "Known by name", "name", "size", "what", "license", "here", right=("size",), whole=("name", "here")
    )
    for e in entries:
        table.add_row(
            e.name, format_bytes(e.nbytes), e.description, e.license, "yes" if e.name in held else ""
        )
    table.caption, table.caption_justify = "`p2pshard pull NAME` gets one", "left"
    return table


def requests_table(requests: Requests, names: Mapping[str, str]) -> Table:
    """``node`` is where a request came in."""
    table = make_table(
        "Requests", "id", "node", "model", "state", "prompt", "given", right=("prompt", "given")
    )
    for r in requests.requests:
        node = names.get(r.node, r.node[:12])
        table.add_row(r.id, node, r.model, r.state, f"{r.prompt_tokens:,}", f"{r.completion_tokens:,}")
    return table


def say_unreachable(missing: Iterable[Unreachable], names: Mapping[str, str]) -> None:
    """Which members did not answer, so that nobody takes a list for complete; on standard error."""
    for one in missing:
        node = names.get(one.node, one.node[:12])
        console_err.print(f"not listed: node {node} ({one.reason})", style="yellow", markup=False)


def kv_table(requests: Requests, names: Mapping[str, str]) -> Table:
    table = make_table("KV blocks", "node", "model", "used", "total", right=("used", "total"))
    for k in requests.kv:
        table.add_row(names.get(k.node, k.node[:12]), k.model, f"{k.blocks_used:,}", f"{k.blocks_total:,}")
    return table
