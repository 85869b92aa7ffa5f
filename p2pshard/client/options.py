"""What may be asked of a plan, a deployment and a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from p2pshard.errors import InvalidRequest
from p2pshard.sampling import SamplingParams
from p2pshard.speculation import draft_of
from p2pshard.transport.generated import generate_pb2

__all__ = ["GenerateOptions", "Message", "PlanOptions", "apply_options", "checked_text", "settings_json"]


Message = Mapping[str, str]
"""A chat message: ``{"role": "user", "content": "…"}``."""


class PlanOptions(TypedDict, total=False):
    """Settings of `plan` and `deploy`; all may be left out."""

    context: int | None
    """Tokens one sequence may have; None: the largest that fits, at least 8,192 or the model's most."""
    concurrency: int | None
    """Full contexts that the KV pool holds, at least; None: a deployment that runs is kept with what it has, a new one
    has 1."""
    dtype: str
    """``auto`` (as the file has it), ``float32``, ``bfloat16``, ``float16``, ``int8`` or ``int4``."""
    nodes: int | None
    """Use exactly so many nodes; None: the fewest that fit."""
    layers: Mapping[str, tuple[int, int]]
    """Pinned layers by node name or id, first and last inclusive."""
    exclude: Sequence[str]
    """Names or ids of nodes to leave out."""
    wire: str
    """How hidden states travel between nodes: ``auto`` (by what each link carries), ``raw``, ``bf16`` or ``q8``."""


class GenerateOptions(TypedDict, total=False):
    """Settings of one request; all may be left out."""

    max_tokens: int | None
    """Most tokens to give; None: the node's default."""
    temperature: float
    """0, the default: greedy."""
    top_k: int
    """Keep the k most likely; 0: all."""
    top_p: float
    """Keep the smallest set whose probability reaches p; 1: all."""
    min_p: float
    """Keep tokens of at least this fraction of the best one's probability; 0: all."""
    repetition_penalty: float
    """Over prompt and output; 1: none."""
    presence_penalty: float
    """Subtracted once from tokens that the output has."""
    frequency_penalty: float
    """Subtracted for each time the output has the token."""
    seed: int | None
    """64 bit; None: the node draws one. The same seed gives the same text on any split."""
    stop: str | Sequence[str]
    """End before any of these strings."""
    logprobs: int | None
    """None: none; 0: of each token; N: and of the N most likely."""
    deadline_s: float | None
    """Seconds from now after which the request ends with ``finish_reason`` ``deadline``."""
    ignore_eos: bool
    """Go on past the model's end of text."""
    speculation: str | int
    """Tokens guessed from the text so far and verified in one step: ``off``, ``adaptive`` (as many as prove right)
    or how many at a time, 1 to 16. Changes the time that a text takes, never the text."""


def settings_json(
    *,
    context: int | None = None,
    concurrency: int | None = None,
    dtype: str = "auto",
    nodes: int | None = None,
    layers: Mapping[str, tuple[int, int]] | None = None,
    exclude: Sequence[str] = (),
    wire: str = "auto",
) -> str:
    """The settings that `plan` and `deploy` send; checked by the node."""
    return json.dumps(
        {
            "context": context,
            "concurrency": concurrency,
            "dtype": dtype,
            "nodes": nodes,
            "layers": {node: list(span) for node, span in (layers or {}).items()},
            "exclude": list(exclude),
            "wire": wire,
        }
    )


def checked_text(value: object, field: str) -> str:
    """The text as it is. Raises `InvalidRequest` for what is none, or has characters that no encoding has, as Python
    makes of bytes that are not UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is to be text and is {type(value).__name__}", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not text: character {error.start} comes of bytes that are not UTF-8", field=field
        ) from error
    return value


def apply_options(
    request: generate_pb2.GenerateRequest,
    *,
    max_tokens: int | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    deadline_s: float | None = None,
    ignore_eos: bool = False,
    speculation: str | int = "off",
    **sampling: Any,
) -> None:
    """Write `GenerateOptions` into a request. Raises `InvalidRequest` for a value out of range."""
    if max_tokens is not None and not (isinstance(max_tokens, int) and 1 <= max_tokens < 2**32):
        raise InvalidRequest(
            f"max_tokens is {max_tokens!r}; it must be a number from 1 on", field="max_tokens"
        )
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and 0 < deadline_s < float("inf")):
        raise InvalidRequest(f"deadline_s is {deadline_s!r}; it must be seconds above 0", field="deadline_s")
    params = SamplingParams(
        seed=0 if seed is None else seed, logprobs=-1 if logprobs is None else logprobs, **sampling
    )
    request.sampling.CopyFrom(params.to_proto())
    request.has_seed = seed is not None
    request.max_tokens = max_tokens or 0
    for text in [stop] if isinstance(stop, str) else stop:
        request.stop.append(checked_text(text, "stop"))
    request.deadline_s = deadline_s or 0.0
    request.ignore_eos = ignore_eos
    request.draft = draft_of(speculation)
