"""Reads each field of a header, and refuses what the plan does not allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from p2pshard.errors import InvalidRequest, P2PShardError
from p2pshard.sampling import SamplingParams
from p2pshard.transport.frames.checks import (
    distinct,
    error_of,
    fail,
    integer,
    items_of,
    name_of,
    number,
    text_of,
)
from p2pshard.transport.frames.values import Admitted, Deltas, Hello, Hop, Limits, RowHeader, SampledToken
from p2pshard.transport.frames.wire import OUTPUTS, SAMPLING, U32, U64

__all__ = ["READERS"]

_NO_DELTAS = Deltas()


def _rows(value: object, limits: Limits) -> tuple[RowHeader, ...]:
    rows = []
    for item in items_of(value, "rows", limits.chunk_tokens):
        sequence, start, length, output = items_of(item, "row", 4, 4)
        row = RowHeader(
            integer(sequence, "sequence", U64),
            integer(start, "start", limits.context),
            integer(length, "length", limits.chunk_tokens, 1),
            text_of(output, "output"),
        )
        if row.start + row.length > limits.context:
            raise fail(f"row ends at {row.start + row.length}, the context is {limits.context}")
        if row.output not in OUTPUTS:
            raise fail(f"output {row.output!r} is unknown")
        rows.append(row)
    distinct((r.sequence for r in rows), "sequences of rows")
    if sum(r.length for r in rows) > limits.chunk_tokens:
        raise fail(f"rows have more than {limits.chunk_tokens} tokens")
    return tuple(rows)


def _deltas(value: object, limits: Limits) -> Deltas:
    if value == [[], [], [], [], []]:  # most decode steps
        return _NO_DELTAS
    most = limits.sequences
    free, truncate, copy, share, allocate = items_of(value, "deltas", 5, 5)
    blocks_most = limits.blocks - 1
    deltas = Deltas(
        free=tuple(integer(s, "freed sequence", U64) for s in items_of(free, "free", most)),
        truncate=tuple(
            (integer(s, "truncated sequence", U64), integer(n, "kept blocks", limits.blocks))
            for s, n in (items_of(t, "truncate", 2, 2) for t in items_of(truncate, "truncate", most))
        ),
        copy=tuple(
            (integer(a, "source block", blocks_most), integer(b, "destination block", blocks_most))
            for a, b in (items_of(c, "copy", 2, 2) for c in items_of(copy, "copy", limits.blocks))
        ),
        share=_given(share, "share", limits),
        allocate=_given(allocate, "allocate", limits),
    )
    distinct(deltas.free, "freed sequences")
    distinct((s for s, _ in deltas.truncate), "truncated sequences")
    allocated = _blocks((run for _, runs in deltas.allocate for run in runs), limits)
    for _, runs in deltas.share:  # several sequences may share a block; none has it twice
        if not allocated.isdisjoint(_blocks(runs, limits)):
            raise fail("a block is both shared and allocated")
    return deltas


def _given(value: object, what: str, limits: Limits) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Sequences with runs of blocks; at most as many runs in all as there are blocks."""
    given = tuple(
        (
            integer(s, f"sequence to {what}", U64),
            tuple(
                (
                    integer(first, "first block", limits.blocks - 1),
                    integer(count, "block count", limits.blocks, 1),
                )
                for first, count in (items_of(r, "run", 2, 2) for r in items_of(runs, "runs", limits.blocks))
            ),
        )
        for s, runs in (items_of(g, what, 2, 2) for g in items_of(value, what, limits.sequences))
    )
    distinct((s for s, _ in given), f"sequences to {what}")
    if sum(len(runs) for _, runs in given) > limits.blocks:
        raise fail(f"more than {limits.blocks} runs of blocks to {what}")
    return given


def _blocks(runs: Iterable[tuple[int, int]], limits: Limits) -> set[int]:
    """The blocks of the runs: all within the pool, each once."""
    end = 0
    blocks: set[int] = set()
    for first, count in sorted(runs):
        if first < end or first + count > limits.blocks:
            raise fail("blocks overlap or lie beyond the pool")
        end = first + count
        blocks.update(range(first, end))
    return blocks


_INTEGERS = frozenset({"top_k", "seed", "logprobs"})


def _admitted(value: object, limits: Limits) -> tuple[Admitted, ...]:
    found = []
    for item in items_of(value, "admitted", limits.sequences):
        sequence, prompt_length, settings = items_of(item, "admitted", 3, 3)
        settings = items_of(settings, "sampling", len(SAMPLING), len(SAMPLING))
        named = {
            k: integer(v, k, U64, -1) if k in _INTEGERS else number(v, k)
            for k, v in zip(SAMPLING, settings, strict=True)
        }
        try:
            sampling = SamplingParams(**named)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise fail(error.message) from error
        found.append(
            Admitted(
                integer(sequence, "admitted sequence", U64),
                integer(prompt_length, "prompt length", limits.context, 1),
                sampling,
            )
        )
    distinct((a.sequence for a in found), "admitted sequences")
    return tuple(found)


def _failed(value: object, limits: Limits) -> tuple[tuple[int, P2PShardError], ...]:
    items = (items_of(i, "failed", 2, 2) for i in items_of(value, "failed", limits.chunk_tokens))
    found = tuple((integer(s, "failed sequence", U64), error_of(e)) for s, e in items)
    distinct((s for s, _ in found), "failed sequences")
    return found


def _tokens(value: object, limits: Limits) -> tuple[SampledToken, ...]:
    found = []
    for item in items_of(value, "tokens", limits.chunk_tokens):
        sequence, token, logprob, top = items_of(item, "token", 4, 4)
        found.append(
            SampledToken(
                integer(sequence, "sequence", U64),
                integer(token, "token id", limits.vocab_size - 1),
                number(logprob, "logprob"),
                tuple(
                    (integer(i, "token id", limits.vocab_size - 1), number(p, "logprob"))
                    for i, p in (items_of(t, "top", 2, 2) for t in items_of(top, "top", 20))
                ),
            )
        )
    # A sequence has several when it is one whose draft was taken; they stand together, in order.
    distinct(
        (t.sequence for i, t in enumerate(found) if not i or found[i - 1].sequence != t.sequence),
        "sequences of tokens",
    )
    return tuple(found)


_HOP_VALUES = tuple(Hop.__dataclass_fields__)[1:]


def _hops(value: object, limits: Limits) -> tuple[Hop, ...]:
    items = (items_of(h, "hop", 7, 7) for h in items_of(value, "hops", limits.stages))
    return tuple(
        Hop(
            integer(stage, "stage", limits.stages - 1),
            *(integer(v, name) for v, name in zip(values, _HOP_VALUES, strict=True)),
        )
        for stage, *values in items
    )


def _hello(value: object, _: Limits) -> Hello:
    deployment, plan, manifest, fingerprint, instance, stage, edge = items_of(value, "hello", 7, 7)
    hello = Hello(
        text_of(deployment, "deployment"),
        name_of(plan, "plan digest"),
        name_of(manifest, "manifest digest"),
        name_of(fingerprint, "fingerprint"),
        name_of(instance, "instance"),
        integer(stage, "stage", U32),
        name_of(edge, "edge"),
    )
    if hello.edge not in ("forward", "back"):
        raise fail(f"edge {hello.edge!r} is neither forward nor back")
    return hello


def _error(value: object, _: Limits) -> P2PShardError:
    return error_of(value)


def _status(value: object, _: Limits) -> tuple[int, ...]:
    return tuple(integer(x, "status") for x in items_of(value, "status", 3, 3))


READERS: dict[str, Callable[[object, Limits], Any]] = {
    "rows": _rows,
    "deltas": _deltas,
    "admitted": _admitted,
    "failed": _failed,
    "tokens": _tokens,
    "hops": _hops,
    "hello": _hello,
    "error": _error,
    "status": _status,
}
"""By field of `Frame`. Each raises `ProtocolError`."""
