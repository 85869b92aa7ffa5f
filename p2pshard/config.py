"""Settings of one daemon: flags, then ``P2PSHARD_*``, then a TOML file, then defaults.

Every setting has one name, used by all sources: ``--data-dir``, ``P2PSHARD_DATA_DIR`` and ``data_dir = …``.
An error names its source; a name that no setting has is refused with the nearest one that exists.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from p2pshard.errors import InvalidRequest
from p2pshard.units import parse_size

__all__ = [
    "API_PORT",
    "CONTROL_PORT",
    "DATA_PORTS",
    "TENSOR_CACHE",
    "DaemonConfig",
    "default_data_dir",
    "default_models_dir",
    "load_config",
    "local_address",
    "parse_address",
]

API_PORT = 7331
CONTROL_PORT = 7332
DATA_PORTS = (7333, 7340)
TENSOR_CACHE = 64 * 2**30

MOST_SECONDS = 86_400
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_LEAST_SIZE = 10**6
"""Whoever gives less has forgotten the unit."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class DaemonConfig:
    """Everything a daemon is told from outside. Built by `load_config`."""

    name: str
    """For people, and for ``--layers NAME=0-11``; the node's id is what identifies it."""
    data_dir: Path
    """State of this daemon (id, incarnation, promises, tensor cache); one daemon at a time, mode 0700."""
    memory: int | None
    """Bytes that all workers of this node may use together; None: what is measured to be free."""
    device: str
    """``auto``, ``cpu``, ``cuda:N`` or ``mps``."""
    port: int
    """Control plane; 0: any free one."""
    api_port: int
    """OpenAI API and health; 0: any free one."""
    data_ports: tuple[int, int]
    """First and last port for workers, one each, in order; (0, 0): any free ones."""
    api_bind: str
    """Address of the HTTP API; other machines need a key."""
    allow_origins: tuple[str, ...]
    """Web pages that may use the HTTP API beside those of this machine: ``https://HOST[:PORT]``, or ``*``."""
    bind: str
    """Address to listen on. ``0.0.0.0``: all of IPv4; ``::``: all of IPv6 too, where the system allows."""
    advertise: str | None
    """Host that others reach this node at, when it differs (port forward, container)."""
    peers: tuple[str, ...]
    """``HOST:PORT`` of control ports to dial besides what zeroconf finds."""
    cluster: str
    """Only daemons of the same cluster name join each other."""
    mdns: bool
    """Announce and browse by zeroconf."""
    models_dir: Path
    """Where named models are stored; daemons of one machine share it."""
    tensor_cache: int
    """Bytes of disk, under the data directory, for tensors that came from other nodes."""
    warm_worker: bool
    """Keep one worker with its libraries loaded, so that a deployment starts sooner (its memory counts)."""
    copies: bool
    """Keep a second copy, on disk, of tensors that only one node has."""
    recover_wait: float
    """Seconds that a request without a deadline waits for layers that are lost."""
    json_logs: bool
    """One JSON object a line on standard error, in place of text."""


def default_data_dir() -> Path:
    """Where the daemon of this machine keeps its state."""
    return platformdirs.user_data_path("p2pshard", appauthor=False) / "node"


def default_models_dir() -> Path:
    """Where `p2pshard pull` stores models."""
    return platformdirs.user_data_path("p2pshard", appauthor=False) / "models"


def parse_address(text: str, *, default_port: int = CONTROL_PORT) -> str:
    """Normalise ``HOST[:PORT]`` (IPv6 as ``[::1]:7332`` or a bare ``::1``) to ``HOST:PORT``.

    Raises:
        ValueError: no host, or a port outside 1 to 65535.
    """
    text = text.strip()
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.%\w]+)\](?::(\d+))?", text)
    if bracketed:
        host, port = f"[{bracketed[1]}]", bracketed[2]
    elif text.count(":") > 1:
        host, port = f"[{text}]", None
    else:
        host, _, rest = text.partition(":")
        port = rest if ":" in text else None
    number = default_port if port is None else int(port) if port.isascii() and port.isdigit() else -1
    if not host or any(c.isspace() or c == "/" for c in host) or not 1 <= number <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return f"{host}:{number}"


def local_address(environ: Mapping[str, str] = os.environ) -> str:
    """Control address of the daemon on this machine: loopback with ``P2PSHARD_PORT`` or the usual port."""
    port = environ.get("P2PSHARD_PORT", "")
    return f"127.0.0.1:{port if port.isdigit() and 0 < int(port) < 65536 else CONTROL_PORT}"


# -- one reader per setting: from a flag, a string of the environment or a TOML value -------------


def _string(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it must be text that is not empty")
    return value.strip()


def _name(value: Any) -> str:
    text = _string(value)
    if not _NAME.fullmatch(text):
        raise ValueError(
            "it must be 1 to 63 of a-z, A-Z, 0-9, dot, dash and underscore, a letter or digit first"
        )
    return text


def _path(value: Any) -> Path:
    return Path(os.path.abspath(Path(str(value) if isinstance(value, Path) else _string(value)).expanduser()))


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('it must be bytes or a size such as "600MB"')
    size = value if isinstance(value, int) else parse_size(value)
    if size < _LEAST_SIZE:
        raise ValueError(
            f'that is {size} bytes, and nothing fits into it; give a unit, such as "600MB" or "8GB"'
        )
    return size


def _device(value: Any) -> str:
    text = _string(value)
    if not _DEVICE.fullmatch(text):
        raise ValueError("it must be auto, cpu, cuda:N or mps")
    return "cuda:0" if text == "cuda" else text


def _port(value: Any) -> int:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ValueError("it must be a port from 0 (any free one) to 65535")
    return value


def _ports(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        value = value.split("-") if "-" in value else [value, value]
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("it must be FIRST-LAST, for example 7333-7340")
    first, last = (_port(p) for p in value)
    if first > last or (first == 0) != (last == 0):
        raise ValueError("it must be FIRST-LAST with FIRST not above LAST, or 0-0 for any free ports")
    return first, last


def _peers(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise ValueError("it must be a list of HOST:PORT")
    return tuple(dict.fromkeys(parse_address(item) for item in items if item.strip()))


def _origins(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
        raise ValueError("it must be a list of origins such as https://chat.example:8443")
    found = tuple(dict.fromkeys(item.strip().rstrip("/") for item in items if item.strip()))
    for item in found:
        if item != "*" and not re.fullmatch(r"https?://[^/\s?#@]+", item):
            raise ValueError(f"{item!r} is not an origin such as https://chat.example:8443, or *")
    return found


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError("it must be true or false")


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"it must be a number of seconds from 0 to {MOST_SECONDS}")
    return seconds


_SINGULAR = {"peers": "peer", "allow_origins": "allow_origin"}
"""Settings of several values, and what their flag is called, which gives one at a time."""

_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _name,
    "data_dir": _path,
    "memory": _size,
    "device": _device,
    "port": _port,
    "api_port": _port,
    "data_ports": _ports,
    "api_bind": _string,
    "allow_origins": _origins,
    "bind": _string,
    "advertise": _string,
    "peers": _peers,
    "cluster": _name,
    "mdns": _flag,
    "models_dir": _path,
    "tensor_cache": _size,
    "warm_worker": _flag,
    "copies": _flag,
    "recover_wait": _seconds,
    "json_logs": _flag,
}
assert list(_READERS) == [f.name for f in fields(DaemonConfig)], "every setting has a reader"


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname().split(".")[0]).strip("-._")
    return host[:63] or "node"


def _defaults() -> dict[str, Any]:
    return {
        "name": _default_name(),
        "data_dir": default_data_dir(),
        "memory": None,
        "device": "auto",
        "port": CONTROL_PORT,
        "api_port": API_PORT,
        "data_ports": DATA_PORTS,
        "api_bind": "127.0.0.1",
        "allow_origins": (),
        "bind": "0.0.0.0",
        "advertise": None,
        "peers": (),
        "cluster": "default",
        "mdns": True,
        "models_dir": default_models_dir(),
        "tensor_cache": TENSOR_CACHE,
        "warm_worker": True,
        "copies": True,
        "recover_wait": 60.0,
        "json_logs": False,
    }


def _variables(setting: str) -> tuple[str, ...]:
    """Names in the environment: of the setting, and of its flag where that is in the singular."""
    names = (setting, _SINGULAR[setting]) if setting in _SINGULAR else (setting,)
    return tuple(f"P2PSHARD_{name.upper()}" for name in names)


def _misspelt(environ: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for a variable that looks like that of a setting and is none."""
    known = {variable for key in _READERS for variable in _variables(key)} | {
        "P2PSHARD_CONFIG",
        "P2PSHARD_INDEX_URL",
        "P2PSHARD_NODE",
    }
    for variable in environ:
        if not variable.startswith("P2PSHARD_") or variable in known:
            continue
        near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
        if near:
            raise InvalidRequest(f"there is no variable {variable}; did you mean {near[0]}?", field=variable)


def _read(setting: str, value: Any, source: str) -> Any:
    try:
        return _READERS[setting](value)
    except ValueError as error:
        raise InvalidRequest(f"{source} is {value!r}: {error}", field=setting) from error


def _read_file(path: Path) -> dict[str, Any]:
    """Settings of one TOML file, each already read. Raises `InvalidRequest` naming file and setting."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the configuration file {path}: {error.strerror or error}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from error
    for key in table:
        if key not in _READERS:
            near = difflib.get_close_matches(key.replace("-", "_"), _READERS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"settings are: {', '.join(_READERS)}"
            raise InvalidRequest(f"{path} has a setting {key!r}, which does not exist; {hint}", field=key)
    return {key: _read(key, value, f"{key} in {path}") for key, value in table.items()}


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    config_path: Path | None = None,
) -> DaemonConfig:
    """The settings in force, by precedence: ``flags`` > ``environ`` > file > defaults.

    Args:
        flags: what the command line gave, by setting name; None or a missing name: not given.
        environ: read for ``P2PSHARD_<SETTING>`` and ``P2PSHARD_CONFIG``; an empty value counts as not set.
        config_path: the TOML file. Without it ``P2PSHARD_CONFIG``, else ``config.toml`` in the data directory
            where there is one.

    Raises:
        InvalidRequest: a value that cannot be right, an unknown setting, or a file that was named and
            cannot be read. The message names the source.
    """
    _misspelt(environ)
    given: dict[str, Any] = {}
    for key in _READERS:
        for variable in _variables(key):
            if environ.get(variable, "").strip():
                given[key] = _read(key, environ[variable], variable)
    for key, value in (flags or {}).items():
        if value is None or (key in _SINGULAR and not value):
            continue
        given[key] = _read(key, value, f"--{_SINGULAR.get(key, key).replace('_', '-')}")

    defaults = _defaults()
    named = config_path or (Path(environ["P2PSHARD_CONFIG"]) if environ.get("P2PSHARD_CONFIG") else None)
    if named is not None:
        from_file = _read_file(named.expanduser())
    else:
        implied = given.get("data_dir", defaults["data_dir"]) / "config.toml"
        from_file = _read_file(implied) if implied.is_file() else {}
        if "data_dir" in from_file:
            raise InvalidRequest(
                f"{implied} sets data_dir, but it was found through the data directory; "
                "remove the line, or name the file with --config",
                field="data_dir",
            )
    merged = {**defaults, **from_file, **given}
    if 0 != merged["port"] == merged["api_port"]:
        raise InvalidRequest(
            f"port and api_port are both {merged['port']}; they must differ", field="api_port"
        )
    first, last = merged["data_ports"]
    for key in ("port", "api_port"):
        if first and first <= merged[key] <= last:
            raise InvalidRequest(
                f"{key} {merged[key]} lies in data_ports {first}-{last}; they must differ", field=key
            )
    return DaemonConfig(**merged)
