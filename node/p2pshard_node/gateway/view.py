"""What the gateway and the services need to know of the cluster, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from p2pshard.models.manifest import Manifest
from p2pshard.transport.generated.control_pb2 import Deployment, NodeInfo, PauseReply

__all__ = ["ClusterView", "DeploymentView", "TextStore"]


class DeploymentView(Protocol):
    """The deployments as this node knows them now; the synchronous methods only look, they never wait."""

    def members(self) -> Sequence[NodeInfo]:
        """The nodes of the cluster that answer, this one included."""

    def deployments(self) -> Sequence[Deployment]:
        """Wanted deployments in any state."""

    def find(self, model: str) -> Deployment | None:
        """The wanted deployment of that model name (or deployment id)."""

    async def wait_ready(self, deployment_id: str, timeout_s: float) -> Deployment:
        """Return the deployment once its state is ``ready``.

        Raises `NotReady` after ``timeout_s`` seconds, or at once when the state became ``refused`` or
        ``removed``.
        """

    def driver_target(self, deployment: Deployment) -> str:
        """``host:port`` of the first stage's worker, as it is reached from here.

        Raises `NotReady` or `NodeUnreachable`.
        """

    async def ensure_text(self, manifest: str) -> None:
        """Have this manifest and its tokenizer in the local store, fetched from a member if need be.

        Raises `NodeUnreachable` or `ModelCorrupt`.
        """


class ClusterView(DeploymentView, Protocol):
    """`DeploymentView` and what the Node service and the HTTP API show or change."""

    def not_joined(self) -> Iterable[dict[str, Any]]:
        """Peers that were seen and are not members: ``{address, reason}``."""

    async def plan(self, model_ref: str, settings_json: str, local_client: bool) -> dict[str, Any]:
        """``{fits, plan, shortfall_bytes, suggestions, terms}``; loads nothing. Paths: local clients only."""

    def deploy(self, model_ref: str, settings_json: str, local_client: bool) -> AsyncIterator[dict[str, Any]]:
        """Ask for a deployment and yield its progress until it is ready; raises why it is refused."""

    async def pause(self, node: str, *, resume: bool) -> PauseReply:
        """Have a node step back, or serve again."""

    async def undeploy(self, model: str) -> None:
        """Raises `ModelNotFound`."""

    def status(self) -> dict[str, Any]:
        """``{nodes, not_joined, deployments}`` for people and for ``status --json``."""

    async def requests(self) -> dict[str, Any]:
        """What the members carry: ``{requests: [{id, model, state, prompt_tokens, completion_tokens, node}], unreachable}``."""

    async def models(self) -> dict[str, Any]:
        """What the members hold: ``{models: [{name, size_bytes, digest, nodes, path}], unreachable}``."""

    def kv(self) -> list[dict[str, Any]]:
        """``[{node, blocks_used, blocks_total}]``."""


class TextStore(Protocol):
    """The part of the model store that text needs. Its methods block; they are called in threads."""

    def get(self, digest: str) -> Manifest | None: ...

    def holds(self, sha256: str) -> bool: ...

    def read(self, sha256: str, offset: int = 0) -> Iterator[bytes]: ...
