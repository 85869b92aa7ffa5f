"""The deployments that the cluster wants, as every node knows them: merged by (version, writer), never by clock."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import json_format

from p2pshard.errors import InvalidRequest, P2PShardError
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.settings import Settings
from p2pshard.transport.generated import control_pb2 as pb

from ..json_files import JsonFiles, read_json
from .agreement import MAX_EPOCH, ZERO, checked_name

__all__ = ["STATES", "Deployments", "deployment_id", "last_epoch", "settings_satisfied"]

STATES = ("planning", "loading", "ready", "broken", "refused", "removed")
MAX_DEPLOYMENTS = 1024
MAX_VERSION = MAX_EPOCH

_log = logging.getLogger("p2pshard.state")


def deployment_id(manifest: str) -> str:
    """One deployment per model content: what name it has is for people."""
    return hashlib.sha256(f"deployment {manifest}".encode()).hexdigest()[:16]


def settings_satisfied(asked: str, existing: str) -> bool:
    """Whether a deployment with the existing settings is what was asked for: whatever was asked for by name (``auto``,
    null and what is empty name nothing) is as it was asked, and there is room for at least as many at once.

    Both are read first, so the order of names makes no difference. Raises `InvalidRequest` for settings that are none.
    """
    want, have, unnamed = Settings.from_json(asked), Settings.from_json(existing), Settings()
    return want.concurrency <= have.concurrency and all(
        getattr(want, name) in (getattr(unnamed, name), getattr(have, name))
        for name in Settings.__dataclass_fields__
        if name != "concurrency"
    )


def last_epoch(row: pb.Deployment) -> Epoch:
    """The highest epoch that the row names."""
    return max(Epoch.from_proto(row.superseded), Epoch.from_proto(row.plan.epoch))


class Deployments:
    """The table. Every change has a higher version; what is wanted survives a restart of all nodes."""

    def __init__(self, path: Path, me: str) -> None:
        self._path, self._me, self._files = path, me, JsonFiles()
        self._rows: dict[str, pb.Deployment] = {}
        for value in read_json(path) or []:
            row = json_format.ParseDict(value, pb.Deployment(), ignore_unknown_fields=True)
            if row.wanted:
                # Workers did not survive; whoever coordinates finds out what still runs elsewhere.
                # Without a writer, the same version as another node still knows it is the later one.
                row.state, row.reason, row.writer = "planning", "its node was started again", ""
                del row.endpoints[:]
            self._rows[row.id] = row

    def all(self) -> list[pb.Deployment]:
        """By id, tombstones included."""
        return [self._rows[k] for k in sorted(self._rows)]

    def get(self, deployment: str) -> pb.Deployment | None:
        return self._rows.get(deployment)

    def outdated(self, deployment: str) -> Epoch:
        """Epochs up to this one were for what is no longer wanted, as far as this node has heard."""
        row = self._rows.get(deployment)
        if row is None:
            return ZERO
        return Epoch.from_proto(row.superseded) if row.wanted else last_epoch(row)

    def find(self, model: str) -> pb.Deployment | None:
        """The wanted deployment of this name, id or manifest digest; a ready one first, then the latest."""
        rows = [
            r for r in self._rows.values() if r.state != "removed" and model in (r.model, r.id, r.manifest)
        ]
        return max(rows, key=lambda r: (r.wanted, r.state == "ready", r.version, r.id), default=None)

    def versions(self) -> list[pb.StateVersion]:
        return [
            pb.StateVersion(deployment=r.id, version=r.version, writer=r.writer) for r in self._rows.values()
        ]

    def newer(self, versions: Iterable[pb.StateVersion]) -> list[str]:
        """Ids of which another node has a later version than this one."""
        return [v.deployment for v in versions if self._is_newer(v.deployment, v.version, v.writer)]

    def _is_newer(self, deployment: str, version: int, writer: str) -> bool:
        known = self._rows.get(deployment)
        return known is None or (version, writer) > (known.version, known.writer)

    def merge(self, rows: Iterable[pb.Deployment]) -> list[pb.Deployment]:
        """Take what is later than ours; returns what changed. A row that is not well formed is left out."""
        changed = []
        for row in rows:
            try:
                _check(row)
            except P2PShardError as error:
                _log.warning("a deployment from another node is not taken: %s", error.message)
                continue
            full = row.id not in self._rows and len(self._rows) >= MAX_DEPLOYMENTS
            if not full and self._is_newer(row.id, row.version, row.writer):
                self._rows[row.id] = row
                changed.append(row)
        if changed:
            self._persist()
        return changed

    def write(self, row: pb.Deployment) -> pb.Deployment:
        """A change of our own: the next version, by this node. Returns the row as kept."""
        known = self._rows.get(row.id)
        if known is None and len(self._rows) >= MAX_DEPLOYMENTS:
            for old in [r for r in self._rows.values() if not r.wanted][:1]:
                del self._rows[old.id]
        kept = pb.Deployment()
        kept.CopyFrom(row)
        kept.version = (known.version if known else 0) + 1
        kept.writer = self._me
        self._rows[row.id] = kept
        self._persist()
        return kept

    def flush(self) -> None:
        """Return once all changes are on the disk, or cannot be written, which is logged: the cluster acts on them
        either way. Blocks."""
        self._files.flush()

    def _persist(self) -> None:
        self._files.put(self._path, [json_format.MessageToDict(r) for r in self.all()])


def _check(row: pb.Deployment) -> None:
    checked_name(row.id)
    highest = max(row.version, row.superseded.n, row.plan.epoch.n)
    if row.state not in STATES or highest > MAX_VERSION or row.id != deployment_id(row.manifest):
        raise InvalidRequest(
            f"deployment {row.id} has state {row.state[:20]!r}, version or epoch {highest}, or another model's id"
        )
    try:
        Settings.from_json(row.settings_json)
    except InvalidRequest as error:
        raise InvalidRequest(f"settings of deployment {row.id}: {error}") from error
    if row.HasField("plan") and row.plan.replicas:
        Plan.from_proto(row.plan)
