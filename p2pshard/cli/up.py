"""``p2pshard up``: run the daemon of this machine in the foreground."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import click

from p2pshard.cli.options import Address
from p2pshard.config import load_config

__all__ = ["command"]

#: what the ``node`` extra brings; looked up without importing any of it (a daemon never imports torch)
_NODE_MODULES = (
    "fastapi",
    "gguf",
    "jinja2",
    "psutil",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
)


def _require_node_extra() -> None:
    missing = [name for name in _NODE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"this installation has the client only ({', '.join(missing)} missing); "
            "to run a node: pip install 'p2pshard[node]'"
        )


@click.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), envvar="P2PSHARD_CONFIG", help="TOML file."
)
@click.option("--name", help="Name of this node, for people. Default: the host's.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="State of this daemon; one daemon at a time."
)
@click.option("--models-dir", type=click.Path(path_type=Path), help="Where named models are stored.")
@click.option(
    "--memory", metavar="SIZE", help='Hard budget for all workers, such as "600MB". Default: what is free.'
)
@click.option(
    "--tensor-cache", metavar="SIZE", help="Disk for tensors that come from other nodes. Default: 64GiB."
)
@click.option("--device", metavar="auto|cpu|cuda:N|mps", help="Where layers run. Default: auto.")
@click.option("--port", type=click.IntRange(0, 65535), help="Control port. Default: 7332.")
@click.option("--api-port", type=click.IntRange(0, 65535), help="HTTP API port. Default: 7331.")
@click.option("--api-bind", metavar="ADDR", help="Address of the HTTP API. Default: 127.0.0.1.")
@click.option(
    "--allow-origin",
    "allow_origins",
    metavar="ORIGIN",
    multiple=True,
    help="Web pages that may use the HTTP API, as https://HOST[:PORT]; repeatable.",
)
@click.option("--data-ports", metavar="FIRST-LAST", help="Ports for workers. Default: 7333-7340.")
@click.option("--bind", metavar="ADDR", help="Address to listen on. Default: 0.0.0.0.")
@click.option("--advertise", metavar="HOST", help="Host that others reach this node at, when it differs.")
@click.option(
    "--peer", "peers", type=Address(), multiple=True, help="A node to join without zeroconf; repeatable."
)
@click.option(
    "--cluster", metavar="NAME", help="Only nodes of one cluster name join each other. Default: default."
)
@click.option("--mdns/--no-mdns", default=None, help="Find other nodes by zeroconf. Default: on.")
@click.option("--warm-worker/--no-warm-worker", default=None, help="Keep a worker loaded. Default: on.")
@click.option(
    "--copies/--no-copies",
    default=None,
    help="Keep a second copy, on disk, of tensors that only one node has. Default: on.",
)
@click.option(
    "--recover-wait",
    metavar="SECONDS",
    help="How long a request without a deadline waits when layers are lost. Default: 60.",
)
@click.option("--json-logs/--no-json-logs", default=None, help="One JSON object a log line.")
def command(config_path: Path | None, **flags: Any) -> int:
    """Run the daemon of this machine in the foreground.

    Ctrl-C or `p2pshard down` stop it at once; SIGTERM or `p2pshard leave` once the others have its layers.

    Every flag is also a variable P2PSHARD_<FLAG> and a line of a TOML file: --config, or config.toml in the
    data directory. Flags win over variables, variables over the file.
    """
    config = load_config(flags, config_path=config_path)
    _require_node_extra()
    # by name: the client package does not depend on the node package
    daemon = importlib.import_module("p2pshard_node.daemon")
    code: int = daemon.run(config)
    return code
