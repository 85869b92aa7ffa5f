"""How the address of a port is written."""

from __future__ import annotations

__all__ = ["host_port"]


def host_port(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets: what `p2pshard.config.parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
