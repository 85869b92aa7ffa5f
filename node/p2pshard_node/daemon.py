"""The daemon: composes every part of a node, starts it, and stops it without leaving anything behind."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from p2pshard.addresses import host_port
from p2pshard.config import DaemonConfig, load_config, parse_address
from p2pshard.credentials import Credentials
from p2pshard.discovery import PROTOCOL, Announcement, Discovery
from p2pshard.errors import Conflict, InvalidRequest, P2PShardError
from p2pshard.own_address import is_own_address
from p2pshard.transport.channels import bind, check_bindable, make_server
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc
from p2pshard.version import __version__

from . import platform
from .api.app import create_app, error_response
from .api.guard import Guard
from .api.origins import Origins
from .api.server import Handle, serve
from .cluster.cluster import Cluster
from .devices import Devices
from .gateway.gateway import Gateway, Limits
from .identity import Identity
from .keys import ApiKeys
from .models.store import ModelStore
from .node_service import NodeService
from .supervisor import Supervisor
from .tasks import first_of

__all__ = ["Daemon", "main", "run"]

LONELY_S = 10.0
GRACE_S = 1.0
STOP_S = 8.0
"""For each part. One that hangs keeps neither the workers nor the ports."""
_FILES, _FEWEST_FILES = 1 << 16, 256
"""Open files of this process: those asked for, and those it does not start without."""
LEAVE_S = 60.0
"""For the others to take this node's layers over."""
DRAIN_S = 20.0
"""For requests that came in at a node that leaves: clients that can go on at another node do so afterwards."""
INTERFACES_S = 2.0
"""How long a list of this machine's addresses is good."""

_log = logging.getLogger("p2pshard.daemon")


class Daemon:
    """One node. ``async with`` is not offered: a daemon that fails to start must still be stopped in order."""

    def __init__(self, config: DaemonConfig, *, credentials: Credentials | None = None) -> None:
        self.config = config
        self._credentials = credentials
        self.stopping = asyncio.Event()
        """Set when somebody asked this daemon to stop."""
        self.leaving = asyncio.Event()
        """Set when somebody asked it to hand its layers over and stop then."""
        self._undo: list[tuple[str, Callable[[], Any]]] = []
        self.port = self.api_port = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._api: Handle | None = None
        self._interfaces: tuple[list[str], list[str]] = ([], [])
        self._looked = -INTERFACES_S

    # -- life
    async def start(self) -> None:
        """Bring everything up. Raises `Conflict` (data directory or port in use) with nothing left running."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        self.identity = Identity.open(config.data_dir)
        self._undo.append(("data directory", self.identity.close))
        self.keys = ApiKeys(config.data_dir / "keys.json")
        self.store = ModelStore(config.data_dir, [config.models_dir], cache_bytes=config.tensor_cache)
        server = make_server()
        try:
            self.port = bind(server, self._credentials, config.bind, [config.port])
        except OSError as error:
            check_bindable(config.bind)
            raise Conflict(
                f"port {config.port} on {config.bind} is taken: another daemon, or another program; give --port (and --api-port)"
            ) from error
        self.supervisor = Supervisor(
            config.data_dir,
            host=config.bind,
            ports=config.data_ports,
            node=self.identity.id,
            device=config.device,
            warm=config.warm_worker,
            budget=lambda: self.devices.available(),
            on_event=lambda key, event: self.cluster.member.worker_event(key, event),
        )
        self.devices = Devices(config.memory, config.device, self.supervisor)
        self.cluster = Cluster(
            self.identity,
            me=self.info,
            credentials=self._credentials,
            store=self.store,
            supervisor=self.supervisor,
            budget=self.devices.available,
            requests=lambda: self.gateway.ps(),
            copies=config.copies,
        )
        self.gateway = Gateway(
            self.identity.id,
            self.store,
            self.cluster,
            self._credentials,
            limits=Limits(recover_s=config.recover_wait),
        )
        rpc.add_ClusterServicer_to_server(self.cluster.service, server)
        rpc.add_NodeServicer_to_server(
            NodeService(self.cluster, self.gateway, self.keys, self.stopping.set, self.leaving.set), server
        )
        self._undo.append(("workers", self.supervisor.close))
        self._undo.append(("control port", lambda: server.stop(GRACE_S)))
        await server.start()
        try:
            self._api = await serve(self._guarded_app(), config.api_bind, config.api_port)
        except OSError as error:
            check_bindable(config.api_bind, field="api_bind")
            raise Conflict(
                f"API port {config.api_port} on {config.api_bind} is taken: another daemon, or another program; give --api-port"
            ) from error
        self.api_port = self._api.port
        self._undo.append(("cluster", self.cluster.stop))
        self._undo.append(("gateway", self.gateway.close))
        self._undo.append(("API port", self._api.stop))
        self.supervisor.start()
        self.cluster.start()
        self._join()
        self._tasks = [
            asyncio.create_task(self.devices.run(), name="devices"),
            asyncio.create_task(self._lonely(), name="lonely"),
        ]
        self._undo.append(("background", self._end_tasks))
        _log.info(
            "node up id=%s name=%s incarnation=%s control=%s api=%s bind=%s cluster=%s data_dir=%s",
            self.identity.id,
            config.name,
            self.identity.incarnation,
            self.port,
            self.api_port,
            config.bind,
            config.cluster,
            config.data_dir,
        )

    def _guarded_app(self) -> Guard:
        def names() -> set[str]:
            host = socket.gethostname()
            short = host.partition(".")[0]
            given = {self.config.advertise} if self.config.advertise else set()
            return {host, short, f"{short}.local", *self.hosts(), *given}

        return Guard(
            create_app(self.gateway, self.cluster),
            origins=Origins(names, self.config.allow_origins),
            keys=self.keys,
            is_local=is_own_address,
            answer=error_response,
        )

    async def stop(self) -> None:
        """Goodbye to peers, workers ended, ports and data directory free. Safe to call twice."""
        self.stopping.set()
        while self._undo:
            what, undo = self._undo.pop()
            try:
                result = undo()
                if asyncio.iscoroutine(result):
                    async with asyncio.timeout(STOP_S):
                        await result
            except TimeoutError:
                _log.error("the %s did not stop within %.0f s; going on without it", what, STOP_S)
            except (P2PShardError, OSError, RuntimeError, grpc.RpcError) as error:
                _log.error("stopping the %s failed: %r", what, error)

    async def leave(self) -> None:
        """Hand this node's layers to the others and let the requests that came in here end, as far as that can be. A daemon
        that is asked to stop meanwhile stops."""
        await first_of(self._leave(), self.stopping.wait())

    async def _leave(self) -> None:
        if len(self.cluster.members()) == 1:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.cluster.duty.rest(pb.DUTY_LEAVING)
        except TimeoutError:
            _log.warning("its layers were not taken over within %.0f s; it leaves without that", LEAVE_S)
        except P2PShardError as error:
            _log.warning("nobody takes its layers over, it leaves without that: %s", error.message)
            return
        await self.gateway.drain(DRAIN_S)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- who we are, and who else is there
    def hosts(self) -> list[str]:
        """Hosts at which others may reach this node, best first."""
        if self.config.advertise:
            return [self.config.advertise]
        if self.config.bind not in ("0.0.0.0", "::", ""):
            return [self.config.bind]
        now = time.monotonic()
        if now - self._looked >= INTERFACES_S:
            self._looked, self._interfaces = now, platform.interface_addresses()
        usable, loopback = self._interfaces
        if self.config.bind != "::":
            usable = [a for a in usable if ":" not in a]
            loopback = [a for a in loopback if ":" not in a]
        return usable[:16] or loopback[:1]

    def info(self) -> pb.NodeInfo:
        """This node as it describes itself now."""
        cluster = getattr(self, "cluster", None)  # describes this node before it is complete
        return pb.NodeInfo(
            id=self.identity.id,
            name=self.config.name,
            incarnation=self.identity.incarnation,
            nonce=self.identity.nonce,
            protocol=PROTOCOL,
            version=__version__,
            cluster=self.config.cluster,
            addresses=[pb.Address(host=h, port=self.port) for h in self.hosts()],
            api_port=self.api_port,
            devices=self.devices.profiles(),
            bytes_received=cluster.fetcher.bytes_received if cluster else 0,
            workers=self.devices.counts(),
            loads=cluster.member.loads() if cluster else (),
            duty=cluster.duty.value if cluster else pb.DUTY_SERVING,
        )

    def _join(self) -> None:
        """Start looking for others: those given, and those that announce themselves."""
        static = []
        for peer in self.config.peers:
            host, _, port = parse_address(peer).rpartition(":")
            static.append((host.strip("[]"), int(port)))
        if static:
            self.cluster.peers.seen(static, static=True)
        if not self.config.mdns:
            return
        discovery = Discovery(
            node=self.identity.id,
            nonce=self.identity.nonce,
            cluster=self.config.cluster,
            version=__version__,
            port=self.port,
            addresses=self.hosts,
            found=self._found,
        )
        discovery.start()
        self._undo.append(("discovery", discovery.stop))

    def _found(self, announcement: Announcement) -> None:
        own = set(self.hosts())
        if announcement.id == self.identity.id and all(
            h in own and p == self.port for h, p in announcement.addresses
        ):
            return  # our own announcement
        self.cluster.peers.seen(list(announcement.addresses), node=announcement.id)

    async def _lonely(self) -> None:
        """One line, if nobody has joined in time: why that may be and what to type."""
        await asyncio.sleep(LONELY_S)
        if len(self.cluster.members()) > 1:
            return
        where = host_port(self.hosts()[0], self.port)
        seen = self.cluster.not_joined()
        why = (
            "; ".join(f"{r['address']}: {r['reason']}" for r in seen[:3])
            if seen
            else "nothing announces itself: no other daemon runs, or this network drops multicast (guest Wi-Fi, VPN, containers do)"
        )
        _log.warning(
            "no peer after %.0f s: %s. On another machine type: p2pshard up --peer %s%s",
            LONELY_S,
            why,
            where,
            "" if self.config.cluster == "default" else f" --cluster {self.config.cluster}",
        )


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def _log_to_stderr(json_lines: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(
        "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    handler.setFormatter(_JsonLines() if json_lines else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("zeroconf").setLevel(
        logging.ERROR
    )  # an interface without multicast is nobody's concern
    logging.getLogger("p2pshard").setLevel(logging.INFO)
    logging.getLogger("p2pshard_node").setLevel(logging.INFO)


def _check_file_limit() -> None:
    """A daemon without a descriptor left answers nobody and cannot load: better not to start."""
    files = platform.raise_file_limit(_FILES)
    if files < _FEWEST_FILES:
        raise InvalidRequest(
            f"this process may have {files} files open, and a daemon needs {_FEWEST_FILES}; raise the limit "
            f"(ulimit -n {_FILES}, or LimitNOFILE= of a service) and start again"
        )


async def _serve(config: DaemonConfig) -> int:
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        (daemon.stopping if daemon.leaving.is_set() else daemon.leaving).set()

    for number, handler in ((signal.SIGINT, daemon.stopping.set), (signal.SIGTERM, terminate)):
        try:
            loop.add_signal_handler(number, handler)
        except NotImplementedError:  # Windows: only SIGINT, by Python's own handler
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(daemon.stopping.set))
    await daemon.start()
    try:
        await first_of(daemon.stopping.wait(), daemon.leaving.wait())
        if not daemon.stopping.is_set():
            _log.info("leaving")
            await daemon.leave()
        _log.info("stopping")
    finally:
        await daemon.stop()
    _log.info("stopped")
    return 0


def run(config: DaemonConfig) -> int:
    """Run a daemon in the foreground until SIGINT or a request to stop, or until it has left after SIGTERM.

    Raises `Conflict` when it cannot start.
    """
    _log_to_stderr(config.json_logs)
    _check_file_limit()
    return asyncio.run(_serve(config))


def main() -> int:
    """``p2pshard-node``: a daemon configured by environment and file alone, for service units."""
    try:
        return run(load_config())
    except P2PShardError as error:
        print(f"p2pshard-node: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
