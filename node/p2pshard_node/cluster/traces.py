"""A driver's trace between its forms: the worker's message, what nodes tell each other, and the JSON of `status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from p2pshard.transport.generated import control_pb2 as pb

__all__ = ["trace_to_json", "trace_to_proto"]


def trace_to_proto(value: Mapping[str, Any] | None) -> pb.Trace | None:
    """``value``: `p2pshard.trace.Trace.to_json` of a worker that drives; None of one that does not."""
    return ParseDict(dict(value), pb.Trace()) if value else None


def trace_to_json(trace: pb.Trace) -> dict[str, Any]:
    """As `p2pshard.trace.Trace.from_json` reads it: a phase without steps is left out, a zero is not."""
    return MessageToDict(trace, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
