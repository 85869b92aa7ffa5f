"""What a cluster answers, as values. Built from the JSON and messages of the Node service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, overload

from p2pshard.errors import ProtocolError
from p2pshard.planning.plan import Plan, Rank
from p2pshard.trace import Trace
from p2pshard.transport.generated import generate_pb2

__all__ = [
    "ClusterStatus",
    "Deployment",
    "Generation",
    "KvUse",
    "MeasuredRank",
    "ModelEntry",
    "Models",
    "NodeProgress",
    "NodeStatus",
    "NotJoined",
    "PlanResult",
    "RequestStatus",
    "Requests",
    "TextDelta",
    "Token",
    "Unreachable",
]

T = TypeVar("T")


def _parsed(what: str, build: Callable[[], T]) -> T:
    try:
        return build()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(
            f"the node's {what} cannot be read ({error!r}); is it another version of p2pshard?"
        ) from error


_RANK_FIELDS = frozenset(f.name for f in fields(Rank))


def plan_from(value: Mapping[str, Any] | None) -> Plan | None:
    """A plan from JSON that may carry measurements in its ranks. Raises `ProtocolError`."""
    if not value:
        return None

    def bare() -> dict[str, Any]:
        return {
            **value,
            "replicas": [
                {
                    "stages": [
                        {
                            **s,
                            "ranks": [{k: v for k, v in r.items() if k in _RANK_FIELDS} for r in s["ranks"]],
                        }
                        for s in replica["stages"]
                    ]
                }
                for replica in value["replicas"]
            ],
        }

    return Plan.from_json(_parsed("plan", bare))


# -- generation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """One token that the model gave."""

    id: int
    logprob: float = 0.0
    """Natural logarithm, of the unmodified distribution; 0 when not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (id, logprob), best first; empty when not asked for."""


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer, as it arrives. ``str()`` of it is its text."""

    text: str
    """May be empty while a character or a possible stop string is incomplete."""
    tokens: tuple[Token, ...]
    index: int
    """Output index of the first of ``tokens``."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def from_proto(cls, message: generate_pb2.TextDelta) -> TextDelta:
        tokens = tuple(
            Token(t.id, t.logprob, tuple((n.id, n.logprob) for n in t.top)) for t in message.tokens
        )
        return cls(message.text, tokens, message.index)


@dataclass(frozen=True)
class Generation:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    """``stop``, ``length``, ``deadline``, or ``cancelled`` (then this is what had come so far)."""
    ttft_ms: float
    """From the request to the first token, measured at the node."""
    tokens_per_second: float
    """After the first token, measured at the node."""
    plan: Plan | None
    """Of the epoch that answered."""
    request: str = ""
    """Id of the request."""
    seed: int = 0
    """The seed in force; the same seed and settings give the same text."""
    tokens: tuple[Token, ...] = ()
    """With logprobs where asked for."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``p2pshard run --json`` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "ttft_ms": self.ttft_ms,
            "tokens_per_second": self.tokens_per_second,
            "plan": self.plan.to_json() if self.plan else None,
        }


# -- planning and deploying -----------------------------------------------------------------------


@dataclass(frozen=True)
class PlanResult:
    """What `plan` would do, or why it cannot."""

    fits: bool
    plan: Plan | None
    shortfall_bytes: int
    """Bytes that the cluster lacks; 0 when it fits."""
    suggestions: tuple[str, ...]
    """What would make it fit, a sentence each."""
    terms: tuple[dict[str, Any], ...] = ()
    """Rows of bytes per term and node."""
    reason: str = ""
    """Why it does not fit, a sentence; empty when it does."""
    json: dict[str, Any] = field(default_factory=dict)
    """As the node sent it."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PlanResult:
        """Raises `ProtocolError`."""
        return _parsed(
            "plan",
            lambda: cls(
                fits=bool(value["fits"]),
                plan=plan_from(value.get("plan")),
                shortfall_bytes=int(value.get("shortfall_bytes") or 0),
                suggestions=tuple(str(s) for s in value.get("suggestions") or ()),
                terms=tuple(dict(row) for row in value.get("terms") or ()),
                reason=str(value.get("message") or ""),
                json=value,
            ),
        )


@dataclass(frozen=True)
class NodeProgress:
    """How far one node is with its part of a deployment."""

    node: str
    phase: str
    """``fetching``, ``loading`` or ``checking``."""
    done_bytes: int
    total_bytes: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeProgress:
        """Raises `ProtocolError`."""
        return _parsed(
            "progress",
            lambda: cls(
                str(value["node"]),
                str(value["phase"]),
                int(value.get("done_bytes") or 0),
                int(value.get("total_bytes") or 0),
            ),
        )


@dataclass(frozen=True)
class MeasuredRank:
    """One worker of a deployment as measured, beside its plan."""

    node: str
    device: str
    pid: int
    peak_bytes: int
    """Highest resident memory of the worker so far."""


@dataclass(frozen=True)
class Deployment:
    """A model on the cluster."""

    model: str
    state: str
    """``planning``, ``loading``, ``ready``, ``broken``, ``refused`` or ``removed``."""
    plan: Plan | None
    reason: str = ""
    """Why it does not serve, when it does not."""
    measured: tuple[MeasuredRank, ...] = ()
    progress: tuple[NodeProgress, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    """Nodes, by id, that hold none of its layers, and why."""
    trace: Trace | None = None
    """Where its last steps spent their time; None before the first."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Deployment:
        """Raises `ProtocolError`."""

        def build() -> Deployment:
            raw = value.get("plan") or {}
            ranks = [r for replica in raw.get("replicas", ()) for s in replica["stages"] for r in s["ranks"]]
            return cls(
                model=str(value.get("model") or ""),
                state=str(value["state"]),
                plan=plan_from(raw),
                reason=str(value.get("reason") or ""),
                measured=tuple(
                    MeasuredRank(str(r["node"]), str(r["device"]), int(r["pid"]), int(r["peak_bytes"] or 0))
                    for r in ranks
                    if r.get("pid")
                ),
                progress=tuple(NodeProgress.from_json(p) for p in value.get("progress") or ()),
                idle={str(k): str(v) for k, v in (value.get("idle") or {}).items()},
                trace=Trace.from_json(value["trace"]) if value.get("trace") else None,
            )

        return _parsed("deployment", build)


# -- the cluster ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeStatus:
    """One member."""

    id: str
    name: str
    addresses: tuple[str, ...]
    memory_free: int
    """Bytes, measured."""
    memory_budget: int
    """Bytes that its workers may use."""
    device: str
    incarnation: int
    bytes_received: int
    """Tensor bytes fetched from other nodes."""
    state: str = "member"
    """``member``, ``paused``, ``leaving`` or ``suspected``."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeStatus:
        """Raises `ProtocolError`."""
        return _parsed(
            "status",
            lambda: cls(
                id=str(value["id"]),
                name=str(value["name"]),
                addresses=tuple(_address(a) for a in value.get("addresses") or ()),
                memory_free=int(value.get("memory_free") or 0),
                memory_budget=int(value.get("memory_budget") or 0),
                device=str(value.get("device") or ""),
                incarnation=int(value.get("incarnation") or 0),
                bytes_received=int(value.get("bytes_received") or 0),
                state=str(value.get("state") or "member"),
            ),
        )


def _address(value: Any) -> str:
    return value if isinstance(value, str) else f"{value['host']}:{value['port']}"


@dataclass(frozen=True)
class NotJoined:
    """A peer that was seen and is not a member."""

    address: str
    reason: str
    """Why, and what to do about it."""


class _AsSent(Mapping[str, Any]):
    """A mapping too: ``answer["key"]`` is as the node sent it, also what this build does not know."""

    json: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.json[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.json)

    def __len__(self) -> int:
        return len(self.json)


@dataclass(frozen=True)
class ClusterStatus(_AsSent):
    """The cluster as one node sees it."""

    nodes: tuple[NodeStatus, ...]
    not_joined: tuple[NotJoined, ...]
    deployments: tuple[Deployment, ...]
    json: dict[str, Any]
    """As the node sent it."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ClusterStatus:
        """Raises `ProtocolError`."""
        return _parsed(
            "status",
            lambda: cls(
                nodes=tuple(NodeStatus.from_json(n) for n in value["nodes"]),
                not_joined=tuple(
                    NotJoined(str(n["address"]), str(n["reason"])) for n in value.get("not_joined") or ()
                ),
                deployments=tuple(Deployment.from_json(d) for d in value.get("deployments") or ()),
                json=value,
            ),
        )

    def names(self) -> dict[str, str]:
        """Names of the members by id: plans name nodes by id."""
        return {n.id: n.name for n in self.nodes}

    def deployment(self, model: str) -> Deployment | None:
        """The one of that name, if any."""
        return next((d for d in self.deployments if d.model == model), None)


@dataclass(frozen=True)
class Unreachable:
    """A member that did not answer what all were asked."""

    node: str
    """Id."""
    reason: str


def _unreachable(value: Mapping[str, Any]) -> tuple[Unreachable, ...]:
    return tuple(Unreachable(str(u["node"]), str(u["reason"])) for u in value.get("unreachable") or ())


@dataclass(frozen=True)
class RequestStatus:
    """A request that runs or waits."""

    id: str
    model: str
    state: str
    prompt_tokens: int
    completion_tokens: int
    node: str = ""
    """Id of the node that it came in at, which holds its log."""


@dataclass(frozen=True)
class KvUse:
    """KV blocks of one worker."""

    node: str
    model: str
    blocks_used: int
    blocks_total: int


@dataclass(frozen=True)
class Requests(_AsSent):
    """What `ps` shows."""

    requests: tuple[RequestStatus, ...]
    kv: tuple[KvUse, ...]
    json: dict[str, Any]
    """As the node sent it."""
    unreachable: tuple[Unreachable, ...] = ()
    """Members whose requests are not listed."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Requests:
        """Raises `ProtocolError`."""
        return _parsed(
            "list of requests",
            lambda: cls(
                requests=tuple(
                    RequestStatus(
                        str(r["id"]),
                        str(r["model"]),
                        str(r["state"]),
                        int(r["prompt_tokens"]),
                        int(r["completion_tokens"]),
                        str(r.get("node") or ""),
                    )
                    for r in value["requests"]
                ),
                kv=tuple(
                    KvUse(
                        str(k["node"]), str(k.get("model", "")), int(k["blocks_used"]), int(k["blocks_total"])
                    )
                    for k in value.get("kv") or ()
                ),
                json=value,
                unreachable=_unreachable(value),
            ),
        )


@dataclass(frozen=True)
class ModelEntry:
    """A model that lies on some node."""

    name: str
    size_bytes: int
    nodes: tuple[str, ...]
    """Ids or names of the nodes that have it."""
    path: str = ""
    """On the node that was asked; empty when it lies elsewhere."""
    digest: str = ""
    """Of its content; empty while no node has hashed its files."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelEntry:
        """Raises `ProtocolError`."""
        return _parsed(
            "list of models",
            lambda: cls(
                str(value["name"]),
                int(value.get("size_bytes") or 0),
                tuple(str(n) for n in value.get("nodes") or ()),
                str(value.get("path") or ""),
                str(value.get("digest") or ""),
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """As ``ls --json`` prints it."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "digest": self.digest or None,
            "nodes": list(self.nodes),
            "path": self.path or None,
        }


@dataclass(frozen=True)
class Models(Sequence[ModelEntry]):
    """What `models` gives: the entries in order of name, and who did not answer."""

    entries: tuple[ModelEntry, ...]
    unreachable: tuple[Unreachable, ...] = ()
    """Members whose models are not listed."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Models:
        """Raises `ProtocolError`."""
        return _parsed(
            "list of models",
            lambda: cls(tuple(ModelEntry.from_json(row) for row in value["models"]), _unreachable(value)),
        )

    @overload
    def __getitem__(self, index: int) -> ModelEntry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ModelEntry, ...]: ...

    def __getitem__(self, index: int | slice) -> ModelEntry | tuple[ModelEntry, ...]:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)
