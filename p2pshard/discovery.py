"""Finding daemons on the local network by zeroconf (DNS-SD, RFC 6763, over multicast DNS, RFC 6762).

A daemon announces its id, a hash of the cluster's name, protocol version, build version and control port;
nothing else, and nothing of it is trusted: a handshake decides. Works on all usable interfaces, IPv4 and
IPv6, and starts anew when the machine's addresses change.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import ifaddr
from zeroconf import InterfaceChoice, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

__all__ = ["PROTOCOL", "SERVICE", "Announcement", "Discovery", "browse", "cluster_hash"]

PROTOCOL = 2
"""Version of everything that nodes say to each other; nodes of different ones do not join."""
SERVICE = "_p2pshard._tcp.local."
RESOLVE_MS = 3000
POLL_S = 2.0
"""How often the machine's addresses are compared with those in use."""
MAX_RESOLVING = 64

_log = logging.getLogger("p2pshard.discovery")


def cluster_hash(cluster: str) -> str:
    """What is announced in place of the cluster's name."""
    return hashlib.sha256(f"p2pshard cluster {cluster}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Announcement:
    """A daemon that says it is on this network."""

    id: str
    cluster: str
    """`cluster_hash` of its cluster's name."""
    protocol: int
    version: str
    addresses: tuple[tuple[str, int], ...]
    """Host and control port, as announced or as they arrived."""


def _interfaces() -> frozenset[str]:
    """Addresses of this machine, to see changes by."""
    found: set[str] = set()
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            found.add(f"{adapter.index}/{ip.ip if isinstance(ip.ip, str) else ip.ip[0]}")
    return frozenset(found)


def _announcement(info: AsyncServiceInfo) -> Announcement | None:
    """None for a service that is not well formed."""
    text = {
        k.decode("ascii", "replace"): (v or b"").decode("utf-8", "replace")
        for k, v in (info.properties or {}).items()
    }
    try:
        protocol = int(text.get("protocol", "0"))
    except ValueError:
        return None
    hosts = info.parsed_scoped_addresses(IPVersion.All)
    if not text.get("id") or not info.port or not hosts:
        return None
    addresses = tuple((host, int(info.port)) for host in sorted(hosts, key=lambda h: (":" in h, h))[:16])
    return Announcement(
        text["id"][:64], text.get("cluster", "")[:64], protocol, text.get("version", "")[:64], addresses
    )


async def _open() -> AsyncZeroconf:
    """On every interface and both IP versions; IPv4 alone where the system has no IPv6."""
    try:
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.All)
    except OSError:
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)


class _Browser:
    """Resolves what comes up on the network and hands it on."""

    def __init__(self, zeroconf: AsyncZeroconf, found: Callable[[Announcement], None]) -> None:
        self._zeroconf, self._found = zeroconf, found
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._changed])

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if (
            state_change is ServiceStateChange.Removed
            or name in self._resolving
            or len(self._resolving) >= MAX_RESOLVING
        ):
            return
        task = asyncio.ensure_future(self._resolve(service_type, name))
        self._resolving[name] = task
        task.add_done_callback(lambda _: self._resolving.pop(name, None))

    async def _resolve(self, service_type: str, name: str) -> None:
        info = AsyncServiceInfo(service_type, name)
        if await info.async_request(self._zeroconf.zeroconf, RESOLVE_MS):
            announcement = _announcement(info)
            if announcement is not None:
                self._found(announcement)

    async def close(self) -> None:
        await self._browser.async_cancel()
        for task in list(self._resolving.values()):
            task.cancel()


class Discovery:
    """Announces one daemon and reports others, for as long as it is open; passing network errors do not end it."""

    def __init__(
        self,
        *,
        node: str,
        nonce: str,
        cluster: str,
        version: str,
        port: int,
        addresses: Callable[[], list[str]],
        found: Callable[[Announcement], None],
    ) -> None:
        """``addresses``: the hosts to announce now; ``found`` is called in the event loop."""
        self._node, self._nonce, self._cluster, self._version, self._port = (
            node,
            nonce,
            cluster,
            version,
            port,
        )
        self._addresses, self._found = addresses, found
        self._task: asyncio.Task[None] | None = None
        self.trouble = ""
        """The last error, empty while all is well."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="discovery")

    async def stop(self) -> None:
        """Withdraw the announcement."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _service(self) -> AsyncServiceInfo:
        packed = []
        for host in self._addresses():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                packed.append(socket.inet_pton(family, host))
            except OSError:
                continue  # a name given with --advertise: it comes by handshake and gossip, not by DNS-SD
        return AsyncServiceInfo(
            SERVICE,
            # The nonce keeps a copy of the data directory from taking over the original's announcement.
            f"{self._node}-{self._nonce[:8]}.{SERVICE}",
            port=self._port,
            addresses=packed,
            properties={
                "id": self._node,
                "cluster": cluster_hash(self._cluster),
                "protocol": str(PROTOCOL),
                "version": self._version,
            },
            server=f"{self._node}-{self._nonce[:8]}.local.",
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._session(_interfaces())
            except (
                Exception
            ) as error:  # any failure of the network stack passes; the next session starts afresh
                if not self.trouble:
                    _log.warning("zeroconf interrupted; trying again every %s s: %r", POLL_S, error)
                self.trouble = repr(error)
                await asyncio.sleep(POLL_S)

    async def _session(self, interfaces: frozenset[str]) -> None:
        """One announcement and browser; returns when the machine's addresses have changed."""
        zeroconf = await _open()
        browser: _Browser | None = None
        try:
            browser = _Browser(zeroconf, self._found)
            await zeroconf.async_register_service(self._service(), allow_name_change=True)
            self.trouble = ""
            while _interfaces() == interfaces:
                await asyncio.sleep(POLL_S)
            _log.info("network addresses changed; announcing again")
        finally:
            if browser is not None:
                await browser.close()
            await zeroconf.async_close()


async def browse(timeout: float = 2.0, *, cluster: str | None = None, enough: int = 0) -> list[Announcement]:
    """Daemons of this protocol on the local network, found within ``timeout`` seconds.

    ``cluster``: only those of this cluster's name. ``enough``: return as soon as so many are found; 0 waits
    the whole time.
    """
    found: dict[str, Announcement] = {}
    done = asyncio.Event()

    def take(a: Announcement) -> None:
        if a.protocol == PROTOCOL and (cluster is None or a.cluster == cluster_hash(cluster)):
            found[a.id] = a
            if enough and len(found) >= enough:
                done.set()

    zeroconf = await _open()
    browser = _Browser(zeroconf, take)
    try:
        async with asyncio.timeout(timeout):
            await done.wait()
    except TimeoutError:
        pass  # the time is up: what was found is the answer
    finally:
        await browser.close()
        await zeroconf.async_close()
    return sorted(found.values(), key=lambda a: a.id)
