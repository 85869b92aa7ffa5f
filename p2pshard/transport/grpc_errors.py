"""Our errors on a wire: `abort` ends a call with one, `from_rpc_error` gives it back to the caller; `error_to_proto` and
`error_from_proto` for those that travel in messages."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc
import grpc.aio

from p2pshard.errors import P2PShardError, ProtocolError, from_wire
from p2pshard.json_text import parse_json
from p2pshard.transport.channels import abort_with, error_of
from p2pshard.transport.generated import generate_pb2

__all__ = ["abort", "error_from_proto", "error_to_proto", "fitted", "from_rpc_error"]

_DETAIL_BYTES = 4 << 10
"""What details may take of gRPC's 8 KiB of metadata."""


def fitted(error: P2PShardError, limit: int = _DETAIL_BYTES) -> P2PShardError:
    """The error with its largest details left out until the rest takes at most `limit` bytes as JSON.

    What was left out stands under ``left_out``, so that a reader knows that there was more (`plan --json`
    has it all).
    """
    details: dict[str, Any] = error.to_wire()["details"]
    left_out: list[str] = []
    while details and len(json.dumps(details)) > limit:
        largest = max(details, key=lambda k: len(json.dumps(details[k])))
        del details[largest]
        left_out.append(largest)
    if not left_out:
        return error
    smaller = type(error)(error.message)
    smaller.details = {**details, "left_out": left_out}
    return smaller


def error_to_proto(error: P2PShardError) -> generate_pb2.Error:
    """The error as a field of a message."""
    wire = error.to_wire()
    return generate_pb2.Error(
        code=wire["code"], message=wire["message"], details_json=json.dumps(wire["details"])
    )


def error_from_proto(message: generate_pb2.Error) -> P2PShardError:
    """The error that another node put into a message."""
    try:
        details = parse_json(message.details_json or "{}")
    except (ValueError, RecursionError):
        details = {}  # the error itself is worth more than its details
    return from_wire({"code": message.code, "message": message.message, "details": details})


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: P2PShardError) -> NoReturn:
    """End a call with `error`: its gRPC status, its message, and all of it as ``p2pshard-error-bin``."""
    await abort_with(context, fitted(error))


def from_rpc_error(error: grpc.aio.AioRpcError, target: str = "") -> P2PShardError:
    """The error that `abort` sent; for a status of gRPC's own the nearest of ours, naming `target`."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and not error.trailing_metadata():
        return ProtocolError(
            f"{target or 'the node'} does not know this call: is it another version of p2pshard?"
        )
    return error_of(error, target)
