"""The member's half of agreeing on a plan: what it has promised and what it has committed to.

Pure functions over a frozen `Record` per deployment; `Ledger` keeps the records on disk. The rules:

- PREPARE(e, digest) is refused unless e is above everything promised; the promise is on the disk before
  anything is loaded.
- COMMIT(e, digest) is accepted only for what is promised and loaded here, or in force already, as often as it is sent.
- What is in force goes on serving while a later epoch is prepared beside it, if the proposer asks for that, until
  the later one is committed; else it ends when the later one is promised.
- A promise never goes down. What was prepared and never committed ends by ABORT or with its lease, which
  runs only while its proposer is no member.

Ready is not decided here: the driver starts when every edge has shaken hands on one (epoch, digest), so a
commit that reached only some members never serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from p2pshard.errors import Conflict, InvalidRequest, NotReady, ProtocolError
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.transport.generated import control_pb2 as pb

from ..json_files import JsonFiles, read_json

__all__ = [
    "LEASE_S",
    "MAX_EPOCH",
    "Ledger",
    "Propose",
    "Record",
    "Resend",
    "abort",
    "commit",
    "decide",
    "ended",
    "lapsed",
    "loaded",
    "next_number",
    "prepare",
    "renew",
    "unloaded",
]

LEASE_S = 15.0
MAX_LEASE_S = 600.0
ZERO = Epoch(0, "")
MAX_EPOCH = 2**62
"""Numbers from a wire above this are refused: there must always be a higher one."""


@dataclass(frozen=True)
class Record:
    """What one member knows of one deployment's epochs."""

    deployment: str
    promised: Epoch = ZERO
    promised_digest: str = ""
    plan: Plan | None = None
    """Of the promised epoch."""
    active: Epoch = ZERO
    """The last one committed here."""
    active_digest: str = ""
    prepared: bool = False
    """The promised epoch's stage is loaded in this process. Not persisted: a restart has no workers."""
    serving: Plan | None = None
    """Of the active epoch, while its stage is in force in this process. Not persisted."""
    lease_until: float = 0.0
    """Monotonic. Not persisted."""
    lease_s: float = LEASE_S

    @property
    def running(self) -> bool:
        """An epoch is in force here, with its worker alive."""
        return self.serving is not None

    @property
    def pending(self) -> Plan | None:
        """Of the promised epoch, while its stage is loaded and not in force."""
        return self.plan if self.prepared and self.promised != self.active else None


def prepare(
    record: Record,
    epoch: Epoch,
    plan: Plan,
    digest: str,
    now: float,
    lease_s: float = LEASE_S,
    *,
    beside: bool = False,
) -> Record:
    """Promise the epoch; ``beside``: what is in force goes on meanwhile.

    Raises `Conflict` when a newer one is promised, `ProtocolError` for a plan that is not the one named.
    """
    if epoch.n > MAX_EPOCH:
        raise ProtocolError(f"epoch {epoch.n} leaves no higher number")
    if epoch <= record.promised:
        raise Conflict(
            f"epoch {epoch.n} of {epoch.proposer} is not above epoch {record.promised.n} of {record.promised.proposer}, "
            "which is promised here",
            promised=[record.promised.n, record.promised.proposer],
        )
    if plan.epoch != epoch or plan.digest() != digest:
        raise ProtocolError(f"the plan sent with epoch {epoch.n} is not the one that its digest names")
    lease = min(max(lease_s, 1.0), MAX_LEASE_S) if lease_s == lease_s else LEASE_S
    return replace(
        record,
        promised=epoch,
        promised_digest=digest,
        plan=plan,
        prepared=False,
        serving=record.serving if beside else None,
        lease_until=now + lease,
        lease_s=lease,
    )


def loaded(record: Record, epoch: Epoch, now: float) -> Record:
    """The worker of the epoch has loaded. Raises `Conflict` when another epoch has been promised meanwhile."""
    if record.promised != epoch or record.plan is None:
        raise Conflict(
            f"epoch {epoch.n} was overtaken while it loaded",
            promised=[record.promised.n, record.promised.proposer],
        )
    return replace(record, prepared=True, lease_until=now + record.lease_s)


def commit(record: Record, epoch: Epoch, digest: str) -> tuple[Record, bool]:
    """``(record, changed)``. Raises `Conflict` unless (epoch, digest) is what is promised, `NotReady` unless it is loaded."""
    if record.serving is not None and (record.active, record.active_digest) == (epoch, digest):
        return record, False
    if record.promised != epoch or record.promised_digest != digest:
        raise Conflict(
            f"commit of epoch {epoch.n} of {epoch.proposer} refused: promised is epoch {record.promised.n} of "
            f"{record.promised.proposer or 'nobody'}",
            promised=[record.promised.n, record.promised.proposer],
        )
    if not record.prepared:
        raise NotReady(
            f"epoch {epoch.n} is promised here and not loaded", state="loading", reason="its worker is gone"
        )
    return replace(record, active=epoch, active_digest=digest, serving=record.plan), True


def abort(record: Record, epoch: Epoch) -> Record:
    """Give up a prepared epoch that was not committed; the promise stays."""
    if record.promised != epoch or record.active == epoch:
        return record
    return replace(record, plan=None, prepared=False)


def unloaded(record: Record) -> Record:
    """The worker is gone, with all that it held."""
    return replace(record, prepared=False, serving=None)


def ended(record: Record) -> Record:
    """The epoch in force is over, though its worker lives; what is prepared beside it stays."""
    return replace(record, serving=None, prepared=record.prepared and record.promised != record.active)


def renew(record: Record, now: float) -> Record:
    """The proposer is a member now: its lease starts again."""
    return replace(record, lease_until=now + record.lease_s)


def lapsed(record: Record, now: float) -> bool:
    """Whether a prepared epoch's proposer has been away for longer than its lease."""
    return record.prepared and record.active != record.promised and now > record.lease_until


# -- the successor's choice -------------------------------------------------------------------------
@dataclass(frozen=True)
class Resend:
    """Somebody committed this epoch and all its members still hold it: send its COMMIT again."""

    plan: Plan


@dataclass(frozen=True)
class Propose:
    """Propose a new plan with this number."""

    n: int


@dataclass(frozen=True)
class Report:
    """A member's answer to the question for its epochs."""

    promised: Epoch = ZERO
    active: Epoch = ZERO
    prepared: bool = False
    plan: Plan | None = None
    """Of the promised epoch."""
    serving: Plan | None = None
    """Of the active epoch, where it is in force."""

    @classmethod
    def of(cls, record: Record) -> Report:
        return cls(record.promised, record.active, record.prepared, record.plan, record.serving)

    def held(self, epoch: Epoch) -> Plan | None:
        """The plan of an epoch whose stage is in memory at that member."""
        if self.serving is not None and self.active == epoch:
            return self.serving
        return self.plan if self.prepared and self.promised == epoch else None


def decide(reports: Mapping[str, Report], *, spoilt: Epoch = ZERO) -> Resend | Propose:
    """What a coordinator does first. ``spoilt``: an epoch that is known not to work and is not sent again."""
    committed = max((r.active for r in reports.values()), default=ZERO)
    holders = {node: plan for node, r in reports.items() if (plan := r.held(committed)) is not None}
    if committed > max(ZERO, spoilt) and holders:
        plan = next(iter(holders.values()))
        if all(node in holders for node in plan.nodes):
            return Resend(plan)
    return Propose(next_number(reports, spoilt))


def next_number(reports: Mapping[str, Report], spoilt: Epoch = ZERO) -> int:
    """Of an epoch above all that anybody has heard of."""
    return max(spoilt.n, *(e.n for r in reports.values() for e in (r.promised, r.active)), 0) + 1


# -- the disk ---------------------------------------------------------------------------------------
_NAME = re.compile(r"[0-9a-f]{1,64}")


def checked_name(deployment: str) -> str:
    """A deployment id from a wire, fit to name a file. Raises `InvalidRequest`."""
    if not _NAME.fullmatch(deployment):
        raise InvalidRequest(f"{deployment[:80]!r} is not a deployment id")
    return deployment


@dataclass
class Ledger:
    """The records of one node. `put` binds at once; what it changed of a promise is on the disk when `saved` returns:
    before that nothing is loaded for it, and no commit is answered."""

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    _files: JsonFiles = field(default_factory=JsonFiles, repr=False)

    MAX_RECORDS = 4096

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """Read what earlier runs promised."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ledger = cls(folder)
        for path in sorted(folder.glob("*.json")):
            value = read_json(path)
            if value is not None:
                record = _from_json(path.stem, value)
                ledger.records[record.deployment] = record
        return ledger

    def get(self, deployment: str) -> Record:
        """Of a deployment never heard of: a record that has promised nothing. Raises `InvalidRequest` for a name that is no id."""
        return self.records.get(checked_name(deployment)) or Record(deployment)

    def put(self, record: Record) -> Record:
        """Keep the record, and have it written if what must survive a restart has changed."""
        before = self.get(record.deployment)
        if record.deployment not in self.records and len(self.records) >= self.MAX_RECORDS:
            raise Conflict(f"{self.MAX_RECORDS} deployments are on record here; that is the most")
        if _to_json(before) != _to_json(record):
            self._files.put(self.folder / f"{record.deployment}.json", _to_json(record))
        self.records[record.deployment] = record
        return record

    async def saved(self) -> None:
        """Return once all promises are on the disk. Raises `Internal` when they cannot be written."""
        await self._files.saved()

    def flush(self) -> None:
        """As `saved`, for a thread that may wait; trouble is only logged."""
        self._files.flush()


def _to_json(record: Record) -> dict[str, Any]:
    return {
        "promised": [record.promised.n, record.promised.proposer],
        "promised_digest": record.promised_digest,
        "active": [record.active.n, record.active.proposer],
        "active_digest": record.active_digest,
    }


def _from_json(deployment: str, value: Mapping[str, Any]) -> Record:
    try:
        return Record(
            deployment,
            Epoch(int(value["promised"][0]), str(value["promised"][1])),
            str(value["promised_digest"]),
            None,
            Epoch(int(value["active"][0]), str(value["active"][1])),
            str(value["active_digest"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Conflict(f"the record of deployment {deployment} is damaged: {error!r}") from error


def report_to_proto(record: Record, endpoints: list[pb.StageEndpoint]) -> pb.EpochReport:
    """What this member answers to `Cluster.Epochs`."""
    return pb.EpochReport(
        active=record.active.to_proto(),
        active_digest=record.active_digest,
        promised=record.promised.to_proto(),
        promised_digest=record.promised_digest,
        promised_plan=record.plan.to_proto() if record.plan is not None else None,
        endpoints=endpoints,
        prepared=record.prepared,
        active_plan=record.serving.to_proto() if record.serving is not None else None,
    )


def report_from_proto(message: pb.EpochReport) -> Report:
    """Raises `ProtocolError` for a plan that is none, and for a number that leaves no higher one."""
    if max(message.promised.n, message.active.n) > MAX_EPOCH:
        raise ProtocolError(f"epoch {max(message.promised.n, message.active.n)} leaves no higher number")
    plan = Plan.from_proto(message.promised_plan) if message.HasField("promised_plan") else None
    serving = Plan.from_proto(message.active_plan) if message.HasField("active_plan") else None
    return Report(
        Epoch.from_proto(message.promised),
        Epoch.from_proto(message.active),
        message.prepared,
        plan,
        serving,
    )
