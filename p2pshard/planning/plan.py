"""The plan: which node holds which layers. A value; the same everywhere it is shown or sent.

Frozen dataclasses for the pure code, with the protobuf message and the JSON of ``plan``, ``status``
and ``run`` derived from them. The digest covers all that is decided, so equal digests mean equal plans; not
``numerics``, which is expected when the plan is made and measured when its stages are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from p2pshard.errors import ProtocolError
from p2pshard.transport.generated import plan_pb2

__all__ = ["WIRES", "Epoch", "Plan", "Rank", "Replica", "Stage"]

WIRES = ("raw", "bf16", "q8")
"""Forms of hidden states between stages, by what they lose: see `transport.codecs`."""


@dataclass(frozen=True, order=True)
class Epoch:
    """A deployment's plan number, totally ordered by (n, proposer)."""

    n: int
    proposer: str
    """Node id of the coordinator that proposed it."""

    @classmethod
    def from_proto(cls, message: plan_pb2.Epoch) -> Epoch:
        """One that is not set is (0, "")."""
        return cls(message.n, message.proposer)

    def to_proto(self) -> plan_pb2.Epoch:
        return plan_pb2.Epoch(n=self.n, proposer=self.proposer)

    @property
    def pair(self) -> list[Any]:
        """``[n, proposer]``, as messages of daemons and workers have it."""
        return [self.n, self.proposer]


@dataclass(frozen=True)
class Rank:
    """One device's part of a stage; sizes in bytes."""

    node: str
    device: str = "cpu"
    share: float = 1.0
    """Fraction of the stage's heads and columns."""
    experts: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    """Activations, logits and the largest temporary while loading."""
    base_bytes: int = 0
    """The worker process itself: interpreter and libraries, as measured on that node."""
    budget_bytes: int = 0
    """All that the node allows its workers on this device."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes + self.base_bytes


@dataclass(frozen=True)
class Stage:
    """A contiguous run of decoder layers."""

    layers: tuple[int, int]
    """First and last layer, both inclusive."""
    embedding: bool
    head: bool
    ranks: tuple[Rank, ...]
    wire: str = "raw"
    """One of `WIRES`: how hidden states leave it. Only a ``tolerant`` plan has others than ``raw``."""

    @property
    def node(self) -> str:
        """Node of the first rank (the only one without tensor parallelism)."""
        return self.ranks[0].node


@dataclass(frozen=True)
class Replica:
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that the nodes of a deployment must agree on."""

    replicas: tuple[Replica, ...]
    epoch: Epoch
    numerics: str
    """``invariant`` or ``tolerant``."""
    manifest: str
    """Digest of the model's manifest (hex sha256)."""
    model: str
    dtype: str
    context: int
    """Tokens one sequence may have, prompt and output together."""
    concurrency: int
    """How many full contexts the KV pool holds."""
    block_size: int
    """Tokens per KV block."""
    blocks: int
    """KV blocks on every stage."""
    chunk_tokens: int
    """Most tokens in one step."""
    layers: int
    """Decoder layers of the model."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the first replica."""
        return self.replicas[0].stages

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes that hold a rank, in stage order, each once."""
        return tuple(dict.fromkeys(rank.node for rank in self._ranks()))

    def _ranks(self) -> Iterator[Rank]:
        for replica in self.replicas:
            for stage in replica.stages:
                yield from stage.ranks

    def extent(self, index: int) -> tuple[Any, ...]:
        """All that stage ``index`` in memory is made for: equal ones, of the same model and dtype, are the same."""
        stage = self.stages[index]
        return stage.layers, stage.embedding, stage.head, self.blocks, self.block_size, self.chunk_tokens

    def check(self) -> None:
        """Raise `ProtocolError` unless every layer lies on exactly one stage of each replica, in order."""
        if not self.replicas:
            raise ProtocolError("plan has no replica")
        for replica in self.replicas:
            following = 0
            for index, stage in enumerate(replica.stages):
                first, last = stage.layers
                if first != following or last < first or not stage.ranks:
                    raise ProtocolError(
                        f"plan's stage {index} has layers {first}-{last}, expected to start at {following}"
                    )
                if stage.embedding != (first == 0) or stage.head != (last == self.layers - 1):
                    raise ProtocolError(f"plan's stage {index} has its embedding or head in the wrong place")
                if stage.wire not in WIRES:
                    raise ProtocolError(
                        f"plan's stage {index} sends hidden states as {stage.wire[:40]!r}; "
                        f"this build knows {', '.join(WIRES)}"
                    )
                if stage.wire != "raw" and (stage.head or self.numerics == "invariant"):
                    raise ProtocolError(f"plan's stage {index} may not send hidden states as {stage.wire}")
                following = last + 1
            if following != self.layers:
                raise ProtocolError(f"plan covers {following} of {self.layers} layers")
        if min(self.context, self.block_size, self.blocks, self.chunk_tokens, self.concurrency) < 1:
            raise ProtocolError("plan has a size below 1")

    def digest(self) -> str:
        """Hex sha256 of the canonical JSON without ``numerics``."""
        value = self.to_json()
        del value["numerics"]
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def measured(self, stages: Iterable[tuple[str, str]]) -> Plan:
        """The plan with the ``numerics`` of its loaded stages, each ``(numerics, fingerprint)``.

        ``invariant`` when every stage is, all their kernels give equal bits, and hidden states cross unrounded.
        """
        found = set(stages)
        invariant = (
            len(found) == 1
            and all(numerics == "invariant" and fingerprint for numerics, fingerprint in found)
            and all(stage.wire == "raw" for stage in self.stages)
        )
        return replace(self, numerics="invariant" if invariant else "tolerant")

    # -- JSON -----------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts; `from_json` is its inverse.

        ``wire`` is left out where it is ``raw``, so that the digest is that of builds which know no other.
        """
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for replica in value["replicas"]:
            for stage in replica["stages"]:
                if stage["wire"] == "raw":
                    del stage["wire"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Raises `ProtocolError` when a field is missing or of another type."""
        try:
            replicas = tuple(
                Replica(
                    tuple(
                        Stage(
                            layers=(int(s["layers"][0]), int(s["layers"][1])),
                            embedding=bool(s["embedding"]),
                            head=bool(s["head"]),
                            ranks=tuple(
                                Rank(**{**r, "experts": tuple(r.get("experts", ()))}) for r in s["ranks"]
                            ),
                            wire=str(s.get("wire", "raw")),
                        )
                        for s in r["stages"]
                    )
                )
                for r in value["replicas"]
            )
            rest = {k: value[k] for k in cls.__dataclass_fields__ if k not in ("replicas", "epoch")}
            return cls(replicas=replicas, epoch=Epoch(**value["epoch"]), **rest)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"not a plan: {error!r}") from error

    # -- protobuf -------------------------------------------------------------------------------
    def to_proto(self) -> plan_pb2.Plan:
        return plan_pb2.Plan(
            replicas=[
                plan_pb2.Replica(
                    stages=[
                        plan_pb2.Stage(
                            first_layer=s.layers[0],
                            last_layer=s.layers[1],
                            embedding=s.embedding,
                            head=s.head,
                            ranks=[plan_pb2.Rank(**asdict(r)) for r in s.ranks],
                            wire="" if s.wire == "raw" else s.wire,
                        )
                        for s in replica.stages
                    ]
                )
                for replica in self.replicas
            ],
            epoch=self.epoch.to_proto(),
            **{k: getattr(self, k) for k in self.__dataclass_fields__ if k not in ("replicas", "epoch")},
        )

    @classmethod
    def from_proto(cls, message: plan_pb2.Plan) -> Plan:
        """Checked with `check`; raises `ProtocolError`."""
        plan = cls(
            replicas=tuple(
                Replica(
                    tuple(
                        Stage(
                            layers=(s.first_layer, s.last_layer),
                            embedding=s.embedding,
                            head=s.head,
                            ranks=tuple(
                                Rank(
                                    node=r.node,
                                    device=r.device,
                                    share=r.share,
                                    experts=tuple(r.experts),
                                    weight_bytes=r.weight_bytes,
                                    kv_bytes=r.kv_bytes,
                                    workspace_bytes=r.workspace_bytes,
                                    base_bytes=r.base_bytes,
                                    budget_bytes=r.budget_bytes,
                                )
                                for r in s.ranks
                            ),
                            wire=s.wire or "raw",
                        )
                        for s in replica.stages
                    )
                )
                for replica in message.replicas
            ),
            epoch=Epoch.from_proto(message.epoch),
            **{k: getattr(message, k) for k in cls.__dataclass_fields__ if k not in ("replicas", "epoch")},
        )
        plan.check()
        return plan
