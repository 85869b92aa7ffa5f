"""What a node says of itself: bounded by who says it, and checked by who hears it before anything believes it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from p2pshard.errors import InvalidRequest
from p2pshard.transport.generated import control_pb2 as pb

__all__ = ["MAX_INCARNATION", "checked_info", "word"]

MAX_INCARNATION = 2**62
"""Incarnations stay below this."""
_MAX_WORD = 128
"""Characters of a name, a version or the phase of a load."""
_MAX_BYTES = 256 << 10
_MAX_WORKERS = 1024
_ID = re.compile(r"[0-9A-Za-z_.-]{1,64}")


def word(text: str) -> str:
    """`text` as a description may carry it."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_WORD])


def checked_info(info: pb.NodeInfo) -> pb.NodeInfo:
    """A node's description of itself, in a request or an answer, bounded in every field and in all.

    Raises `InvalidRequest` naming the fields that cannot be right.
    """
    wrong = _wrong(info)
    if wrong:
        raise InvalidRequest(
            f"a node's description of itself cannot be right: {', '.join(wrong)}; is it another build?",
            fields=wrong,
        )
    return info


def _wrong(info: pb.NodeInfo) -> list[str]:
    if info.ByteSize() > _MAX_BYTES:
        return [f"{info.ByteSize()} bytes"]
    rules = {
        "id": _ID.fullmatch(info.id),
        "nonce": _ID.fullmatch(info.nonce),
        "name": _short((info.name,)),
        "version": _short((info.version,)),
        "cluster": _short((info.cluster,)),
        "incarnation": info.incarnation < MAX_INCARNATION,
        "addresses": len(info.addresses) <= 16
        and all(_is_host(a.host) and 0 < a.port < 65536 for a in info.addresses),
        "devices": len(info.devices) <= 32
        and all(len(d.dtypes) <= 32 and _short((d.device, d.name, *d.dtypes)) for d in info.devices),
        "workers": len(info.workers) <= _MAX_WORKERS and _short(w.deployment for w in info.workers),
        "loads": len(info.loads) <= _MAX_WORKERS
        and all(_short((load.deployment, load.progress.phase)) for load in info.loads),
    }
    return [name for name, right in rules.items() if not right]


def _short(words: Iterable[str]) -> bool:
    return all(len(w) <= _MAX_WORD and w.isprintable() for w in words)


def _is_host(host: str) -> bool:
    return 0 < len(host) <= 255 and host.isprintable() and " " not in host and "/" not in host
