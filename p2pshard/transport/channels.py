"""The only place that makes gRPC channels and servers, and that maps our errors onto gRPC's.

The options are those that a long-lived mesh needs and gRPC's defaults lack: a reconnect at most a
second late (default 120 s), pings on idle connections that servers do not punish, no port shared by
accident between two processes.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from p2pshard.credentials import Credentials, server_name
from p2pshard.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NodeUnreachable,
    Overloaded,
    P2PShardError,
    from_wire,
)
from p2pshard.json_text import parse_json

__all__ = [
    "EOF",
    "MAX_MESSAGE",
    "abort_with",
    "add_raw_methods",
    "bind",
    "check_bindable",
    "error_of",
    "make_channel",
    "make_server",
    "raw_stream",
    "sent_by_peer",
]

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What reading a stream that ended gives."""

MAX_MESSAGE = 8 << 20
"""Bytes of one gRPC message in either direction. Frames are cut far below it."""

_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_TOO_LARGE = re.compile("CLIENT: Sent message larger|SERVER: Received message larger")
_ERROR_KEY = "p2pshard-error-bin"
_ERROR_BYTES = 6 << 10  # gRPC's metadata limit is 8 KiB


def _common(max_message: int) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if sys.platform.startswith("linux"):
        # Bytes that nobody acknowledges end the connection, even while keepalive waits behind them.
        options.append(("grpc.tcp_user_timeout_ms", _KEEPALIVE_TIMEOUT_MS))
    return options


def make_channel(
    target: str,
    credentials: Credentials | None,
    *,
    node: str = "",
    own_connection: bool = False,
    max_message: int = MAX_MESSAGE,
) -> grpc.aio.Channel:
    """A channel to ``host:port``; it dials on first use.

    `node`: id of the node that must answer, by its certificate; empty: any node of the cluster will do.

    `own_connection`: a TCP connection that no other channel of this process shares, so that pings are
    not queued behind activations.
    """
    options: list[tuple[str, Any]] = [
        *_common(max_message),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
        ("grpc.enable_http_proxy", 0),  # peers are on this network, whatever http_proxy says
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    options.append(("grpc.ssl_target_name_override", server_name(node)))
    return grpc.aio.secure_channel(target, credentials.for_channel(), options)


def make_server(*, max_message: int = MAX_MESSAGE) -> grpc.aio.Server:
    """A server without ports; add them with `bind`."""
    options: list[tuple[str, Any]] = [
        *_common(max_message),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 256),
    ]
    return grpc.aio.server(options=options)


def bind(
    server: grpc.aio.Server, credentials: Credentials | None, host: str, ports: Sequence[int] = (0,)
) -> int:
    """Bind the first free of `ports` on `host` and return it (0: any).

    Raises `OSError` naming all that were tried.
    """
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    for port in ports:
        address = f"{bracketed}:{port}"
        try:
            if credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials.for_server())
        except RuntimeError:  # gRPC's way to say that the port is taken
            continue
        if bound:
            return int(bound)
    raise OSError(f"no free port on {host}: tried {', '.join(map(str, ports))}")


def check_bindable(host: str, *, field: str = "bind") -> None:
    """Raise `InvalidRequest` for a host, given as a setting, that no port of this machine can be bound on."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        raise InvalidRequest(
            f"this machine has no address {host}: {error.strerror or error}; give one of its own to "
            f"--{field.replace('_', '-')}",
            field=field,
        ) from error


def add_raw_methods(server: grpc.aio.Server, service: str, methods: Mapping[str, Any]) -> None:
    """Serve streams of raw bytes both ways: ``{method: async handler(request_iterator, context)}``."""
    handlers = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def raw_stream(channel: grpc.aio.Channel, method: str) -> Any:
    """A call of a raw-bytes method; ``await call.write(bytes)``, ``await call.read()`` until `EOF`."""
    open_call: Any = channel.stream_stream
    return open_call(method)()


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: P2PShardError) -> NoReturn:
    """End a call with one of our errors; `error_of` gives it back on the other side."""
    wire = json.dumps(error.to_wire()).encode()
    if len(wire) > _ERROR_BYTES:
        wire = json.dumps({"code": error.code, "message": error.message[:1000], "details": {}}).encode()
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status),
        error.message[:1000],
        trailing_metadata=((_ERROR_KEY, wire),),
    )
    raise AssertionError("abort returns never")


_BY_STATUS: dict[grpc.StatusCode, type[P2PShardError]] = {
    grpc.StatusCode.UNAVAILABLE: NodeUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def sent_by_peer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the other side answered with an error of ours: then the connection is well."""
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    return any(key == _ERROR_KEY for key, _ in metadata)


def error_of(error: grpc.aio.AioRpcError, target: str = "") -> P2PShardError:
    """The error that `abort_with` sent, or the nearest of ours for one of gRPC's own."""
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _ERROR_KEY:
            try:
                return from_wire(parse_json(value))
            except (ValueError, AttributeError):
                break  # not ours after all; the status below says enough
    where = f"{target}: " if target else ""
    said = error.details() or error.code().name
    if _TOO_LARGE.search(said):  # told with the status of a full queue, which would be worth another try
        return InvalidRequest(f"{where}the request is larger than a message may be ({said})")
    return _BY_STATUS.get(error.code(), Internal)(f"{where}{said}")
