"""Which pages and names are this machine's own."""

from __future__ import annotations

import pytest
from p2pshard_node.api.origins import Origins

OWN = {"desk", "desk.local", "192.168.1.5"}


def origins(*allowed: str) -> Origins:
    return Origins(lambda: OWN, allowed)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:7331",
        "LOCALHOST",
        "app.localhost:1",
        "127.0.0.1:7331",
        "[::1]:7331",
        "[fe80::1%eth0]",
        "192.168.1.5:7331",
        "10.9.9.9",  # an address is not a name that could be rebound
        "desk",
        "Desk.local:7331",
    ],
)
def test_own_hosts(host: str) -> None:
    assert origins().takes_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "", " ", "evil.example", "evil.example:7331", "localhost.evil.example", "desk.evil.example", "127.0.0.1.evil.example",
        "user@localhost", "localhost/evil", "localhost?x", "localhost:port", "[::1", "evil.example, localhost", "locаlhost",
    ],
)  # fmt: skip
def test_foreign_hosts(host: str) -> None:
    assert not origins().takes_host(host)


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1",
        "http://[::1]:8080",
        "http://192.168.1.5:7331",
        "http://desk.local",
    ],
)
def test_own_pages(origin: str) -> None:
    assert origins().takes_origin(origin)


@pytest.mark.parametrize(
    "origin",
    [
        "null", "", "http://evil.example", "https://localhost.evil.example", "file://", "ftp://localhost", "localhost",
        "http://10.9.9.9", "http://localhost@evil.example", "http://evil.example#localhost", "chrome-extension://abc",
    ],
)  # fmt: skip
def test_foreign_pages(origin: str) -> None:
    assert not origins().takes_origin(origin)


def test_what_is_allowed() -> None:
    one = origins("https://Chat.example:8443/")
    assert one.takes_origin("https://chat.example:8443") and one.takes_host("chat.example:8443")
    assert not one.takes_origin("http://chat.example:8443") and not one.takes_origin("https://chat.example")
    assert not one.takes_host("other.example")
    everything = origins("*")
    assert everything.takes_origin("null") and everything.takes_host("evil.example")
