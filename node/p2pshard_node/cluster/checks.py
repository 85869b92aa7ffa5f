"""What another node says of itself, before anything believes it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from p2pshard.errors import InvalidRequest
from p2pshard.transport.generated import control_pb2 as pb

__all__ = ["MAX_INCARNATION", "checked_info"]

MAX_INCARNATION = 2**62
"""Incarnations stay below this."""
_MAX_BYTES = 256 << 10
_MAX_WORKERS = 1024
_MAX_WORD = 128
_ID = re.compile(r"[0-9A-Za-z_.-]{1,64}")


def checked_info(info: pb.NodeInfo) -> pb.NodeInfo:
    """A node's description of itself, in a request or an answer, bounded in every field and in all. Raises
    `InvalidRequest`."""
    good = (
        info.ByteSize() <= _MAX_BYTES
        and _ID.fullmatch(info.id)
        and _ID.fullmatch(info.nonce)
        and _short((info.name, info.version, info.cluster))
        and len(info.addresses) <= 16
        and all(_is_host(a.host) and 0 < a.port < 65536 for a in info.addresses)
        and len(info.devices) <= 32
        and all(len(d.dtypes) <= 32 and _short((d.device, d.name, *d.dtypes)) for d in info.devices)
        and len(info.workers) <= _MAX_WORKERS
        and _short(w.deployment for w in info.workers)
        and len(info.loads) <= _MAX_WORKERS
        and all(len(load.progress.phase) <= 32 and len(load.deployment) <= _MAX_WORD for load in info.loads)
        and info.incarnation < MAX_INCARNATION
    )
    if not good:
        raise InvalidRequest("a node's description of itself has a field that cannot be right")
    return info


def _short(words: Iterable[str]) -> bool:
    return all(len(w) <= _MAX_WORD and w.isprintable() for w in words)


def _is_host(host: str) -> bool:
    return 0 < len(host) <= 255 and host.isprintable() and " " not in host and "/" not in host
