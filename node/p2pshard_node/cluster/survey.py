"""What is asked of all members at once: the models they hold, what a name means to them, the requests they carry.

A member that is slow or gone costs the others nothing but a short deadline, and is named with the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from p2pshard.errors import InvalidRequest, ModelNotFound, NodeUnreachable, P2PShardError
from p2pshard.models.catalogue import CATALOGUE
from p2pshard.transport.channels import error_of
from p2pshard.transport.generated import control_pb2 as pb
from p2pshard.transport.generated import control_pb2_grpc as rpc

from .peers import Peers

__all__ = ["Answers", "Found", "Survey", "merge_models", "one_meaning"]

ASK_S = 1.5
RESOLVE_S = 300.0
"""For a name's digest: the member may have to hash the file first."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """What the members said."""

    given: Mapping[str, T]
    """By node id; this node's own first."""
    failed: Mapping[str, P2PShardError]
    """By node id: why there is no answer."""


@dataclass(frozen=True)
class Found:
    """A name that one or several other members know, and mean the same by."""

    manifest: str
    """Digest."""
    holders: tuple[str, ...]
    """Ids of the members that have it."""


class Survey:
    """Asks. `requests` gives this node's own rows ``{id, model, state, prompt_tokens, completion_tokens}``."""

    def __init__(self, peers: Peers, store: Any, requests: Callable[[], list[dict[str, Any]]]) -> None:
        self._peers, self._store, self._requests = peers, store, requests

    # -- this node's own answers
    def own_requests(self) -> pb.RequestList:
        """Requests that came in at this node."""
        return pb.RequestList(requests=[pb.RequestRow(**row) for row in self._requests()])

    async def own_models(self) -> pb.ModelList:
        """Models in this node's store."""
        rows = await asyncio.to_thread(self._store.names)
        return pb.ModelList(
            models=[
                pb.HeldModel(name=r["name"], size_bytes=r["size_bytes"], manifest=r["digest"] or "")
                for r in rows
            ]
        )

    async def own_meaning(self, name: str) -> pb.ModelDigest:
        """What this node's store has under a name. Raises what is wrong with it, or `ModelNotFound`."""
        resolved = await asyncio.to_thread(self._store.resolve, name, local_client=False)
        return pb.ModelDigest(manifest=resolved.manifest.digest)

    # -- everybody's
    async def requests(self) -> dict[str, Any]:
        """``{requests: [{id, model, state, prompt_tokens, completion_tokens, node}], unreachable: [{node, reason}]}``."""
        answers = await self._ask(self._others(), lambda s, **k: s.Requests(pb.Empty(), **k), ASK_S)
        own = {self._peers.id: self.own_requests()}
        rows = [
            {
                "id": r.id, "model": r.model, "state": r.state, "prompt_tokens": r.prompt_tokens,
                "completion_tokens": r.completion_tokens, "node": node,
            }
            for node, reply in {**own, **answers.given}.items()
            for r in reply.requests
        ]  # fmt: skip
        return {"requests": rows, "unreachable": _unreachable(answers)}

    async def models(self) -> dict[str, Any]:
        """``{models: [{name, size_bytes, digest, nodes, path}], unreachable}``; ``path``: on this node, else None."""
        answers = await self._ask(self._others(), lambda s, **k: s.Models(pb.Empty(), **k), ASK_S)
        held = {self._peers.id: await self.own_models()} | dict(answers.given)
        paths = {r["name"]: r["path"] for r in await asyncio.to_thread(self._store.names)}
        rows = merge_models({node: reply.models for node, reply in held.items()})
        for row in rows:
            row["path"] = paths.get(row["name"]) if self._peers.id in row["nodes"] else None
        return {"models": rows, "unreachable": _unreachable(answers)}

    async def find(self, name: str) -> Found:
        """What the other members mean by a name that this node does not know.

        Raises `ModelNotFound`, `InvalidRequest` when they mean different models by it, or what is wrong with
        the only one.
        """
        held = await self._ask(self._others(), lambda s, **k: s.Models(pb.Empty(), **k), ASK_S)
        known = [n for n, reply in held.given.items() if any(m.name == name for m in reply.models)]
        answers = await self._ask(known, lambda s, **k: s.Resolve(pb.ModelName(name=name), **k), RESOLVE_S)
        if answers.given:
            names = {n: self._name(n) for n in answers.given}
            return one_meaning(name, {n: a.manifest for n, a in answers.given.items()}, names)
        for error in answers.failed.values():
            raise error
        silent = "".join(f"; {self._name(n)} did not say: {e.message}" for n, e in held.failed.items())
        raise ModelNotFound(
            f"no model {name!r} on this node{_or_others(len(held.given))}{silent}; {_how_to_get(name)}",
            model=name,
        )

    def _others(self) -> list[str]:
        return sorted(self._peers.member_ids() - {self._peers.id})

    def _name(self, node: str) -> str:
        peer = self._peers.state.peers.get(node)
        return peer.info.name if peer else node

    async def _ask(
        self, nodes: Iterable[str], call: Callable[..., Awaitable[Any]], timeout_s: float
    ) -> Answers[Any]:
        given: dict[str, Any] = {}
        failed: dict[str, P2PShardError] = {}

        async def one(node: str) -> None:
            try:
                stub: rpc.ClusterStub = self._peers.stub(node)
                given[node] = await call(stub, timeout=timeout_s, metadata=self._peers.metadata)
            except NodeUnreachable as error:
                failed[node] = error
            except grpc.aio.AioRpcError as error:
                failed[node] = error_of(error)

        await asyncio.gather(*(one(n) for n in nodes))
        return Answers(given, failed)


def _unreachable(answers: Answers[Any]) -> list[dict[str, str]]:
    return [{"node": node, "reason": error.message} for node, error in sorted(answers.failed.items())]


def merge_models(held: Mapping[str, Iterable[pb.HeldModel]]) -> list[dict[str, Any]]:
    """Rows ``{name, size_bytes, digest, nodes}`` of what the nodes hold, by name: one row per content.

    A file that was not hashed yet counts as the content that another node has under the same name and size, if
    there is just one; ``digest`` is None while nobody has hashed it.
    """
    by_name: dict[tuple[str, int], dict[str, list[str]]] = {}
    for node, models in held.items():
        for model in models:
            by_name.setdefault((model.name, model.size_bytes), {}).setdefault(model.manifest, []).append(node)
    rows: list[dict[str, Any]] = []
    for (name, size), contents in sorted(by_name.items()):
        unknown = contents.pop("", [])
        if len(contents) == 1:
            (nodes,) = contents.values()
            nodes.extend(unknown)
        elif unknown:
            contents[""] = unknown
        rows.extend(
            {"name": name, "size_bytes": size, "digest": digest or None, "nodes": nodes}
            for digest, nodes in sorted(contents.items())
        )
    return rows


def _or_others(count: int) -> str:
    return f" or on the {count} other{'s'[: count > 1]} that answered" if count else ""


def _how_to_get(name: str) -> str:
    if name in CATALOGUE:
        return f"get it with `p2pshard pull {name}`"
    return "`p2pshard ls` lists models and what can be pulled; a file or folder is given by its path"


def one_meaning(name: str, digests: Mapping[str, str], names: Mapping[str, str]) -> Found:
    """The digest that all nodes give to a name. Raises `InvalidRequest` naming nodes and digests when they differ."""
    manifests = set(digests.values())
    if len(manifests) > 1:
        said = "; ".join(f"{digest[:12]} on node {names[node]}" for node, digest in sorted(digests.items()))
        raise InvalidRequest(
            f"{name!r} means different models: {said}. Ask the node whose model you mean (--node HOST:PORT), "
            "or give its path there",
            field="model",
        )
    (manifest,) = manifests
    return Found(manifest, tuple(sorted(digests)))
