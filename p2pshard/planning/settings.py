"""What a user asks of a deployment: context, concurrency, dtype, and which nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2pshard.errors import InvalidRequest
from p2pshard.json_text import parse_json
from p2pshard.planning.plan import WIRES

__all__ = ["DTYPES", "Pin", "Settings"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
_MAX_CONTEXT = 1 << 24
_MAX_CONCURRENCY = 4096
_MAX_NODES = 1024
"""Stages, pins and exclusions alike."""
_MAX_NAME = 256


@dataclass(frozen=True, order=True)
class Pin:
    """Layers that the user gave to a node."""

    node: str
    """The node's name or id."""
    first: int
    last: int
    """Inclusive."""


@dataclass(frozen=True)
class Settings:
    """The ``settings_json`` of plan and deploy. The defaults are those of an empty object."""

    context: int | None = None
    """Tokens one sequence may have; None: the largest that fits."""
    concurrency: int = 1
    """How many full contexts the KV pool holds."""
    dtype: str = "auto"
    """One of `DTYPES`."""
    nodes: int | None = None
    """Exactly so many stages; None: the fewest that fit."""
    layers: tuple[Pin, ...] = ()
    exclude: tuple[str, ...] = ()
    """Names or ids of nodes that get nothing."""
    wire: str = "auto"
    """How hidden states travel between stages: ``raw``, ``bf16``, ``q8``, or by what each link carries."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Settings:
        """Parse an object; an empty text is an empty object. Raises `InvalidRequest`, naming the key."""
        try:
            value = parse_json(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"settings are not JSON: {error}") from error
        return cls.from_value(value)

    @classmethod
    def from_value(cls, value: Any) -> Settings:
        """The same from an object that is parsed already."""
        if not isinstance(value, Mapping):
            raise InvalidRequest(
                f"settings are an object of {', '.join(cls.__dataclass_fields__)}; got {_shown(value)}"
            )
        unknown = sorted(str(key) for key in value if key not in cls.__dataclass_fields__)
        if unknown:
            raise InvalidRequest(
                f"unknown setting {', '.join(map(repr, unknown))}; "
                f"known are {', '.join(cls.__dataclass_fields__)}",
                field=unknown[0],
            )
        dtype = value.get("dtype")
        dtype = "auto" if dtype is None else dtype
        if dtype not in DTYPES:
            raise InvalidRequest(
                f"dtype is {_shown(dtype)}; it must be one of {', '.join(DTYPES)}", field="dtype"
            )
        wire = value.get("wire")
        wire = "auto" if wire is None else wire
        if wire not in ("auto", *WIRES):
            raise InvalidRequest(
                f"wire is {_shown(wire)}; it must be one of auto, {', '.join(WIRES)}", field="wire"
            )
        return cls(
            context=_optional(value, "context", _MAX_CONTEXT),
            concurrency=_optional(value, "concurrency", _MAX_CONCURRENCY) or 1,
            dtype=dtype,
            nodes=_optional(value, "nodes", _MAX_NODES),
            layers=_pins(value.get("layers")),
            exclude=_names(value.get("exclude")),
            wire=wire,
        )

    def to_json(self) -> str:
        """Inverse of `from_json`; equal settings give equal text."""
        return json.dumps(
            {
                "context": self.context,
                "concurrency": self.concurrency,
                "dtype": self.dtype,
                "nodes": self.nodes,
                "layers": {pin.node: [pin.first, pin.last] for pin in self.layers},
                "exclude": list(self.exclude),
                "wire": self.wire,
            },
            sort_keys=True,
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME


def _optional(value: Mapping[str, Any], key: str, most: int) -> int | None:
    number = value.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise InvalidRequest(
            f"{key} is {_shown(number)}; it must be a whole number from 1 to {most}", field=key
        )
    return number


def _pins(value: Any) -> tuple[Pin, ...]:
    """Sorted by layer. Overlaps are refused here: they cannot be right on any cluster."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f'layers is {_shown(value)}; it must be an object as {{"NODE": [0, 11]}}', field="layers"
        )
    if len(value) > _MAX_NODES:
        raise InvalidRequest(
            f"layers names {len(value)} nodes; at most {_MAX_NODES} are taken", field="layers"
        )
    pins = []
    for node, pair in value.items():
        good = _is_name(node) and isinstance(pair, list | tuple) and len(pair) == 2
        if not good or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
            raise InvalidRequest(
                f"layers of node {_shown(node)} are {_shown(pair)}; write [first, last]", field="layers"
            )
        if not 0 <= pair[0] <= pair[1] < 1 << 16:
            raise InvalidRequest(
                f"layers of node {node!r} are {pair[0]}-{pair[1]}; first may not exceed last", field="layers"
            )
        pins.append(Pin(node, pair[0], pair[1]))
    pins.sort(key=lambda pin: (pin.first, pin.last, pin.node))
    for before, after in pairwise(pins):
        if after.first <= before.last:
            raise InvalidRequest(
                f"layers {before.first}-{before.last} of {before.node!r} and "
                f"{after.first}-{after.last} of {after.node!r} overlap; every layer lies on one node",
                field="layers",
            )
    return tuple(pins)


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(map(_is_name, value)):
        raise InvalidRequest(
            f"exclude is {_shown(value)}; it must be a list of node names or ids", field="exclude"
        )
    if len(value) > _MAX_NODES:
        raise InvalidRequest(
            f"exclude names {len(value)} nodes; at most {_MAX_NODES} are taken", field="exclude"
        )
    return tuple(sorted(set(value)))
