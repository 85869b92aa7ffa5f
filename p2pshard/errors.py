"""The error hierarchy: one class per kind of failure, mapped once to gRPC, HTTP and CLI.

Every error crosses the wire as ``{code, message, details}`` and comes back as the same class.
Messages say what happened, with which numbers, and what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "Cancelled",
    "Conflict",
    "ContextExceeded",
    "DeadlineExceeded",
    "DoesNotFit",
    "Internal",
    "InvalidRequest",
    "ModelCorrupt",
    "ModelNotFound",
    "NodeUnreachable",
    "NotReady",
    "Overloaded",
    "P2PShardError",
    "ProtocolError",
    "Refused",
    "StageLost",
    "UnsupportedModel",
    "from_wire",
]


class P2PShardError(Exception):
    """Base of all errors. ``code`` names the class on the wire."""

    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    #: OpenAI's ``error.type``
    openai_type: ClassVar[str] = "server_error"
    #: a retry later, unchanged, may succeed
    passing: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def to_wire(self) -> dict[str, Any]:
        """``{code, message, details}``, JSON-safe."""
        return {
            "code": self.code,
            "message": self.message,
            "details": json.loads(json.dumps(self.details, default=str)),
        }


class Internal(P2PShardError):
    """A fault of ours."""


class InvalidRequest(P2PShardError):
    """The request cannot be right: an unknown field value, a number out of range."""

    code = "invalid_request"
    grpc_status, http_status, exit_code, openai_type = "INVALID_ARGUMENT", 400, 2, "invalid_request_error"


class ContextExceeded(InvalidRequest):
    """The prompt does not fit the context. Details: ``prompt_tokens``, ``context``."""

    code = "context_length_exceeded"
    exit_code = 1


class ModelNotFound(P2PShardError):
    """No node has a model of that name, or the path does not exist."""

    code = "model_not_found"
    grpc_status, http_status, openai_type = "NOT_FOUND", 404, "invalid_request_error"


class ModelCorrupt(P2PShardError):
    """A model file is missing, truncated, malformed or does not match its hash."""

    code = "model_corrupt"
    grpc_status, http_status, openai_type = "FAILED_PRECONDITION", 422, "invalid_request_error"


class UnsupportedModel(P2PShardError):
    """An architecture or a quantisation that this build does not run, by name."""

    code = "unsupported_model"
    grpc_status, http_status, openai_type = "UNIMPLEMENTED", 422, "invalid_request_error"


class DoesNotFit(P2PShardError):
    """The members' budgets do not hold the model.

    Details: ``shortfall_bytes`` (int), ``terms`` (rows of bytes per term and node),
    ``suggestions`` (list of sentences).
    """

    code = "does_not_fit"
    grpc_status, http_status, exit_code = "FAILED_PRECONDITION", 507, 3


class NodeUnreachable(P2PShardError):
    """No node of a cluster answers at the addresses tried. Details: ``tried``."""

    code = "unreachable"
    grpc_status, http_status, exit_code, passing = "UNAVAILABLE", 503, 4, True


class NotReady(P2PShardError):
    """The deployment exists and does not serve yet. Details: ``state``, ``reason``."""

    code = "not_ready"
    grpc_status, http_status, passing = "UNAVAILABLE", 503, True


class StageLost(P2PShardError):
    """A stage of the running epoch is gone. Details: ``node``, ``layers`` ([first, last])."""

    code = "stage_lost"
    grpc_status, http_status, passing = "UNAVAILABLE", 503, True


class Overloaded(P2PShardError):
    """A bounded queue is full. Details: ``retry_after_s``."""

    code = "overloaded"
    grpc_status, http_status, passing = "RESOURCE_EXHAUSTED", 429, True
    openai_type = "rate_limit_error"


class DeadlineExceeded(P2PShardError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    grpc_status, http_status = "DEADLINE_EXCEEDED", 504


class Cancelled(P2PShardError):
    """The request was cancelled by its client."""

    code = "cancelled"
    grpc_status, http_status, exit_code = "CANCELLED", 499, 130


class Conflict(P2PShardError):
    """An epoch or state newer than the one asked for is in force; or a data directory is in use."""

    code = "conflict"
    grpc_status, http_status = "ABORTED", 409


class Refused(P2PShardError):
    """A peer said no: other cluster, other protocol, not a member, not from this machine."""

    code = "refused"
    grpc_status, http_status, openai_type = "PERMISSION_DENIED", 403, "permission_error"


class Unauthenticated(P2PShardError):
    """The caller did not say who it is, or not truly."""

    code = "unauthenticated"
    grpc_status, http_status, openai_type = "UNAUTHENTICATED", 401, "authentication_error"


class ProtocolError(P2PShardError):
    """Bytes from a wire that break the protocol; nothing of them was used."""

    code = "protocol"
    grpc_status, http_status = "INVALID_ARGUMENT", 400


def _subclasses(cls: type[P2PShardError]) -> list[type[P2PShardError]]:
    return [cls] + [s for c in cls.__subclasses__() for s in _subclasses(c)]


_BY_CODE: dict[str, type[P2PShardError]] = {c.code: c for c in reversed(_subclasses(P2PShardError))}
_BY_CODE["internal"] = Internal


def from_wire(value: Mapping[str, Any]) -> P2PShardError:
    """The error that ``to_wire`` described; an unknown code becomes `Internal`, its name kept in the message."""
    code = str(value.get("code", "internal"))
    details = value.get("details") or {}
    details = {str(k): v for k, v in details.items()} if isinstance(details, Mapping) else {}
    message = str(value.get("message", code))
    cls = _BY_CODE.get(code)
    if cls is None:
        return Internal(f"{message} (unknown error code {code!r}: another version?)", **details)
    error = cls(message)
    error.details = details
    return error
