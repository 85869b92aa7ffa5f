"""Who this node is: an id for life, an incarnation that grows at each start, a nonce of this start alone."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from p2pshard.errors import InvalidRequest
from p2pshard.private_files import make_private

from . import platform
from .json_files import JsonFiles, read_json, write_json

__all__ = ["Identity"]

_ID = re.compile(r"[0-9a-f]{16}")


@dataclass
class Identity:
    """The identity of a running daemon; holds the lock of its data directory until `close`."""

    id: str
    incarnation: int
    """Persisted; greater than at any earlier start."""
    nonce: str
    """Random at each start: tells a copy of the data directory from the original."""
    data_dir: Path
    _lock: IO[str]
    _files: JsonFiles = field(default_factory=JsonFiles)

    @classmethod
    def open(cls, data_dir: Path) -> Identity:
        """Create or take over the data directory.

        Raises `Conflict` if another daemon has it, `InvalidRequest` if it cannot be one.
        """
        try:
            make_private(data_dir)
            lock = platform.lock_file(data_dir / "lock")
        except OSError as error:
            raise InvalidRequest(
                f"the data directory {data_dir} cannot be used: {error.strerror or error}; give another --data-dir",
                field="data_dir",
            ) from error
        try:
            stored = read_json(data_dir / "identity.json") or {}
            node_id = stored.get("id", "")
            if not isinstance(node_id, str) or not _ID.fullmatch(node_id):
                node_id = secrets.token_hex(8)
            identity = cls(
                node_id, int(stored.get("incarnation", 0)) + 1, secrets.token_hex(8), data_dir, lock
            )
            write_json(identity._path, identity._stored())
        except BaseException:
            lock.close()
            raise
        return identity

    def exceed(self, highest: int) -> None:
        """Move the incarnation past the highest that a peer has seen (a data directory restored from a backup).

        It is written soon: if that is lost, the next start is told the same again.
        """
        if highest >= self.incarnation:
            self.incarnation = highest + 1
            self._files.put(self._path, self._stored())

    @property
    def _path(self) -> Path:
        return self.data_dir / "identity.json"

    def _stored(self) -> dict[str, Any]:
        return {"id": self.id, "incarnation": self.incarnation}

    def close(self) -> None:
        """Give the data directory free."""
        self._files.flush()
        self._lock.close()
