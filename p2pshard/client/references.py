"""Model references as a client sees them: a name, or a path on this machine."""

from __future__ import annotations

import socket
from pathlib import Path

from p2pshard.errors import InvalidRequest, ModelNotFound
from p2pshard.models.reference import parse_reference
from p2pshard.own_address import is_own_address

__all__ = ["is_this_machine", "resolve_reference"]


def is_this_machine(address: str) -> bool:
    """Whether ``HOST:PORT`` is on this machine: a loopback host, or an address one of its interfaces has."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    # a client that connects to the address that means all of them reaches its own machine
    return all(ip in ("0.0.0.0", "::") or is_own_address(str(ip)) for ip in found)


def resolve_reference(model: str, address: str) -> str:
    """What to send to the node at ``address``: a name as it is, a path made absolute.

    For a daemon of this machine, a bare name of a file here, or of a directory that has a config.json, means that.

    Raises:
        InvalidRequest: neither a name nor a path; or a path, and the node is another machine.
        ModelNotFound: a path that does not exist.
    """
    reference = parse_reference(model, base=Path.cwd())
    if reference.path is None:
        here = Path(model)
        if (here.is_file() or (here / "config.json").is_file()) and is_this_machine(address):
            return str(Path(model).absolute())
        return reference.text
    if not is_this_machine(address):
        raise InvalidRequest(
            f"{model} is a file of this machine, but the node at {address} is another one and reads only "
            "its own disk; run a daemon here (p2pshard up) and leave --node out, or name a model that the "
            "cluster has (p2pshard ls)",
            field="model",
        )
    if not reference.path.exists():
        raise ModelNotFound(
            f"{reference.path} does not exist; give a .gguf file, a model directory or a name (p2pshard ls)"
        )
    return reference.text
