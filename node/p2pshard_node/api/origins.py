"""Which Host and Origin headers are this node's own. Pure.

A web page that a person visits can send requests to programs on that person's machine and, with a name of its own that
suddenly resolves there (DNS rebinding), read the answers. Its Host or Origin gives it away.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

__all__ = ["ANY", "Origins"]

ANY = "*"


class Origins:
    """``names()``: hosts of this machine beside loopback; ``allowed``: origins such as ``https://chat.example:8443``, or
    `ANY`."""

    def __init__(self, names: Callable[[], Collection[str]], allowed: Collection[str] = ()) -> None:
        self._names = names
        self._any = ANY in allowed
        self._allowed = frozenset(a.rstrip("/").lower() for a in allowed)
        self._allowed_hosts = frozenset(host for a in self._allowed if (host := _host_of(a)))

    def takes_host(self, header: str) -> bool:
        """Whether a request for that host is meant for this node. An address says nothing about a page's name: only names
        can be rebound."""
        host = _bare(header)
        if not host:
            return False
        if self._any or _is_address(host) or host == "localhost" or host.endswith(".localhost"):
            return True
        return host in self._allowed_hosts or host in {name.lower() for name in self._names()}

    def takes_origin(self, header: str) -> bool:
        """Whether a page of that origin may ask: one of this machine, or one that was allowed."""
        origin = header.strip().rstrip("/").lower()
        if self._any or origin in self._allowed:
            return True
        host = _host_of(origin)
        if not host:
            return False  # "null", and what is no origin
        if host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback):
            return True
        return host in {name.lower() for name in self._names()}


def _bare(header: str) -> str:
    """The host of ``host[:port]``, in lower case, without brackets; empty for what is none."""
    text = header.strip().lower()
    if any(c in text for c in "/@?# ,"):
        return ""
    return _host_of(f"http://{text}")


def _host_of(origin: str) -> str:
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises where it is no number
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.scheme in ("http", "https") else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
