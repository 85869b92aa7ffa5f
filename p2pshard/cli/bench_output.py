"""Tables of `p2pshard bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from p2pshard.bench.figures import Figures
from p2pshard.cli.output import make_table
from p2pshard.planning.plan import Plan
from p2pshard.trace import Spread, Trace

__all__ = ["bench_table", "trace_tables"]


def bench_table(figures: Sequence[Figures]) -> Table:
    """One row for each number of streams; times as median / 95th percentile."""
    right = ("streams", "tokens/s", "prefill tokens/s", "first token, ms", "between tokens, ms")
    table = make_table("Speed (times: median / p95)", *right, right=right)
    for f in figures:
        table.add_row(
            str(f.streams),
            "-" if f.tokens_per_second is None else f"{f.tokens_per_second:.1f}",
            f"{f.prefill_tokens_per_second:.1f}",
            _spread(f.ttft_ms),
            _spread(f.inter_token_ms),
        )
    return table


def trace_tables(trace: Trace, plan: Plan, names: Mapping[str, str], streams: int) -> list[Table]:
    """Where a step's time goes, stage by stage, for tokens and for prompts."""
    tables = []
    for kind, phase in (("decode", trace.decode), ("prefill", trace.prefill)):
        if phase is None:
            continue
        right = ("busy", "queue", "compute", "sample", "serialise", "B/token in")
        title = f"A {kind} step of {streams} stream{'s'[: streams > 1]}, ms (median / p95)"
        table = make_table(title, "stage", *right, right=right)
        for planned, stage in zip(plan.stages, phase.stages, strict=True):
            table.add_row(
                names.get(planned.node, planned.node[:12]),
                f"{stage.busy:.0%}",
                _spread(stage.queue_ms),
                _spread(stage.compute_ms),
                _spread(stage.sample_ms),
                _spread(stage.serialise_ms),
                f"{stage.bytes_per_token:,.0f}",
            )
        caption = f"round trip {_spread(phase.round_trip_ms)}"
        if len(plan.stages) > 1:
            caption += f", on the wire {_spread(phase.wire_ms)} an edge, with serialising {_spread(phase.hop_overhead_ms)}"
        table.caption, table.caption_justify = caption, "left"
        tables.append(table)
    return tables


def _spread(value: Spread) -> str:
    """Median and p95 with as many digits as tell something."""
    digits = 2 if value.p95 < 10 else 1 if value.p95 < 100 else 0
    return f"{value.median:,.{digits}f}/{value.p95:,.{digits}f}"
