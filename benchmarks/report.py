"""Makes docs/BENCHMARKS.md and docs/benchmarks.svg of what peers.py and growth.py measured.

    python benchmarks/report.py peers.json [--growth growth.json]... [--docs docs]

What they measured stays in their own files; this only writes it down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from chart import Panel, draw

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--growth", type=Path, action="append", default=[])
    parser.add_argument("--docs", type=Path, default=Path(__file__).resolve().parent.parent / "docs")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    growth = [json.loads(path.read_text()) for path in options.growth]
    (options.docs / "BENCHMARKS.md").write_text(document(results, growth))
    (options.docs / "benchmarks.svg").write_text(plot(results))


def columns(results: Row) -> list[tuple[str, str]]:
    """(heading, key) of each measured figure."""
    streams = [(f"decode, {n} stream{'s'[: n > 1]}", str(n)) for n in results["load"]["streams"]]
    return [*streams, (f"prefill, {results['load']['prefill']} tokens", "prefill")]


def values(row: Row, key: str) -> list[float | None]:
    """One of each round; None where it was not measured."""
    return [r["prefill"] if key == "prefill" else r["decode"].get(key) for r in row["rounds"]]


def middle(row: Row, key: str) -> float | None:
    known = [v for v in values(row, key) if v is not None]
    return median(known) if known else None


def ratio(row: Row, other: Row, key: str) -> float | None:
    """Median of the rounds' ratios."""
    pairs = zip(values(row, key), values(other, key), strict=True)
    known = [a / b for a, b in pairs if a and b]
    return median(known) if known else None


def scaling(two: Row, one: Row, key: str) -> float | None:
    """Median over the rounds of two nodes' rate over twice that of one node at half the streams; prefill has no streams."""
    half = key if key == "prefill" else str(int(key) // 2) if int(key) % 2 == 0 else ""
    pairs = zip(values(two, key), values(one, half), strict=True)
    known = [a / (2 * b) for a, b in pairs if a and b]
    return median(known) if known else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"


def model_part(results: Row, model: Row) -> str:
    wanted = columns(results)
    rows = model["contenders"]
    figures = table(
        ["tokens/s", "dtype", *(heading for heading, _ in wanted)],
        [[r["name"], r["dtype"], *(number(middle(r, key)) for _, key in wanted)] for r in rows],
    )
    ours = [r for r in rows if r["name"].startswith("p2pshard") and not r["name"].endswith(" 1 node")]
    against = [r for r in rows if r["name"].startswith("llama.cpp")]
    ratios = [
        [f"{o['name']} ({o['dtype']}) / {a['name']}", *(times(ratio(o, a, key)) for _, key in wanted)]
        for o in ours
        for a in against
    ]
    single = {r["dtype"]: r for r in rows if r["name"].endswith(" 1 node")}
    ratios += [
        [
            f"{o['name']} ({o['dtype']}) / twice 1 node at half the streams",
            *(times(scaling(o, single[o["dtype"]], key)) for _, key in wanted),
        ]
        for o in ours
        if o["name"].endswith(" 2 nodes") and o["dtype"] in single
    ]
    parts = [f"## {model['file']}", figures]
    if ratios:
        parts.append(table(["ratio", *(heading for heading, _ in wanted)], ratios))
    inside = [line for r in rows if r["name"].startswith("p2pshard") for line in inside_rows(r)]
    if inside:
        parts.append(
            table(
                ["ours", "streams", "first token, ms", "between tokens p50 / p95, ms", "busy", "per hop, ms"],
                inside,
            )
        )
    return "\n\n".join(parts)


def inside_rows(row: Row) -> list[list[str]]:
    """What our own trace says, a line for each number of streams."""
    lines = []
    for streams in row["rounds"][0]["details"]["decode"]:
        rounds = [r["details"]["decode"][streams] for r in row["rounds"]]
        traced = [r for r in rounds if r["busy"]]
        busy = [f"{median(stage):.0%}" for stage in zip(*(r["busy"] for r in traced), strict=True)]
        lines.append(
            [
                f"{row['name']} ({row['dtype']})",
                streams,
                number(median(r["ttft_ms"]["median"] for r in rounds)),
                " / ".join(number(median(r["inter_token_ms"][k] for r in rounds)) for k in ("median", "p95")),
                ", ".join(busy) or "-",
                f"{median(r['hop_overhead_ms'] for r in traced):.2f}" if traced else "-",
            ]
        )
    return lines


_PARTS = {"nodes": "nodes", "streams": "streams", "context": "prompt", "links": "link"}
"""What varies in each part of growth.py."""


def growth_part(result: Row) -> str:
    """Tables of how cost grows, one for each part that was measured."""
    parts = [f"## How cost grows: {result['file']}"]
    figures = (
        "dtype",
        "tokens/s",
        "prefill tokens/s",
        "first token, ms",
        "p50 / p95, ms",
        "busy",
        "per hop, ms",
    )
    for name, rows in result["parts"].items():
        if rows:
            keys = list(dict.fromkeys([_PARTS[name], *(k for k in ("prompt", "streams") if k in rows[0])]))
            parts.append(table([*keys, *figures], [growth_row(row, keys) for row in rows]))
    return "\n\n".join(parts) + "\n"


def growth_row(row: Row, keys: list[str]) -> list[str]:
    hop = row["hop_overhead_ms"]
    return [
        *(str(row[k]) for k in keys),
        row["dtype"],
        number(row["tokens_per_second"]),
        number(row["prefill_tokens_per_second"]),
        number(row["ttft_ms"]),
        " / ".join(number(row["inter_token_ms"][k]) for k in ("median", "p95")),
        ", ".join(f"{share:.0%}" for share in row["busy"] or ()) or "-",
        "-" if hop is None else f"{hop:.2f}",
    ]


def document(results: Row, growth: Sequence[Row] = ()) -> str:
    machine, load = results["machine"], results["load"]
    commands = {
        r["name"]: r["commands"]
        for model in results["models"][:1]
        for r in model["contenders"]
        if r["commands"]
    }
    shown = "\n".join(f"# {name}\n" + "\n".join(lines) for name, lines in commands.items())
    return f"""# Benchmarks

Written by `benchmarks/report.py`; do not edit. Tokens per second, medians over the rounds ({results["rounds"]}), in each of
which all contenders took their turn on the same cores with the same file; a ratio is the median of the rounds' ratios.

- Machine: {machine["cpu"]}, {machine["cores"]} cores ({machine["extensions"]}), {machine["system"]}; commit {machine["commit"]}.
- Prompts of {load["prompt"]} random tokens, different for each stream; {load["tokens"]} tokens given to each.
- One node of ours is a daemon and its worker on one core with one thread; the client that measures shares the cores.
  Our figures are a client's: they include sampling, the gateway and gRPC, and count tokens while every stream is given
  some. llama.cpp's are those of `llama-batched-bench`: products alone, all streams in step, nothing sampled or sent.
- llama.cpp RPC: a server on each core with one thread, its client on both cores.
- `per hop`: what a step's way costs an edge beside computing and queueing. `busy`: of each stage, while tokens are given.

![Tokens per second of each contender](benchmarks.svg)

{chr(10).join(model_part(results, model) + chr(10) for model in results["models"])}
{"".join(growth_part(one) + chr(10) for one in growth)}## Commands

As run on each of the cores that `taskset -c` names:

```
{shown}
```
"""


def plot(results: Row) -> str:
    wanted = columns(results)
    series = [f"{r['name']} ({r['dtype']})" for r in results["models"][0]["contenders"]]
    panels = [
        Panel(
            model["file"],
            tuple(heading for heading, _ in wanted),
            tuple(tuple(middle(r, key) for r in model["contenders"]) for _, key in wanted),
        )
        for model in results["models"]
    ]
    return draw(panels, series, "tokens/s, each group to its own scale")


if __name__ == "__main__":
    main()
