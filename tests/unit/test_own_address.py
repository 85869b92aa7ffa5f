"""Which addresses are this machine's: what decides who may name files and stop a daemon."""

from __future__ import annotations

import socket

import ifaddr
import pytest

from p2pshard.own_address import is_own_address


def test_each_address_of_an_interface_is_ours_in_any_notation() -> None:
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            text = ip.ip if isinstance(ip.ip, str) else ip.ip[0]
            assert is_own_address(text)
            assert is_own_address(f"[{text}%9]") if ":" in text else is_own_address(f"::ffff:{text}")


@pytest.mark.parametrize("text", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_loopback_is_ours(text: str) -> None:
    assert is_own_address(text)


@pytest.mark.parametrize("text", ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "localhost", "", "0.0.0.0"])
def test_others_are_not_even_where_every_address_can_be_bound(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)  # as with ip_nonlocal_bind
    assert not is_own_address(text)
