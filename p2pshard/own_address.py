"""Which addresses are this machine's."""

from __future__ import annotations

import ipaddress

import ifaddr

__all__ = ["is_own_address"]


def is_own_address(text: str) -> bool:
    """Whether an IP address (with or without brackets and scope) is a loopback one, or one of this machine's interfaces
    has it. What is no IP address is none of ours."""
    address = _address(text.strip("[]"))
    if address is None:
        return False
    if address.is_loopback:
        return True
    found = (ip.ip if isinstance(ip.ip, str) else ip.ip[0] for a in ifaddr.get_adapters() for ip in a.ips)
    return any(address == _address(own) for own in found)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Without scope, and as IPv4 where it is one written as IPv6."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
