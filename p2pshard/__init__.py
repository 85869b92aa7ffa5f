"""Run one model across several ordinary machines.

>>> from p2pshard import Client
>>> with Client() as client:
...     client.deploy("smollm2-135m-instruct")
...     for piece in client.chat("smollm2-135m-instruct", "What is the capital of France?"):
...         print(piece, end="", flush=True)

Names are loaded when first used, so that a worker which needs one module of this package does not
load the network libraries; nothing here ever imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pshard.client import AsyncClient, AsyncStream, Client, Stream
    from p2pshard.errors import P2PShardError
    from p2pshard.planning.plan import Plan
    from p2pshard.results import ClusterStatus, Deployment, Generation, PlanResult, TextDelta, Token
    from p2pshard.version import __version__

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClusterStatus",
    "Deployment",
    "Generation",
    "P2PShardError",
    "Plan",
    "PlanResult",
    "Stream",
    "TextDelta",
    "Token",
    "__version__",
]

_HOME = {
    **dict.fromkeys(("AsyncClient", "AsyncStream", "Client", "Stream"), "p2pshard.client"),
    **dict.fromkeys(
        ("ClusterStatus", "Deployment", "Generation", "PlanResult", "TextDelta", "Token"), "p2pshard.results"
    ),
    "P2PShardError": "p2pshard.errors",
    "Plan": "p2pshard.planning.plan",
    "__version__": "p2pshard.version",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'p2pshard' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
