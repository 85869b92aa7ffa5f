"""Who this node is: an id for life, an incarnation that grows at each start, a nonce of this start alone."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from p2pshard.errors import Conflict

from . import platform

__all__ = ["Identity", "read_json", "write_json"]

_ID = re.compile(r"[0-9a-f]{16}")


def write_json(path: Path, value: Any) -> None:
    """Replace the file in one step and have it on the disk before returning."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    platform.sync_directory(path.parent)


def read_json(path: Path) -> Any | None:
    """The file's value; None if there is no such file. Raises `Conflict` when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Conflict(f"{path} is damaged ({error}); move it away and start again") from error


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

    @classmethod
    def open(cls, data_dir: Path) -> Identity:
        """Create or take over the data directory. Raises `Conflict` if another daemon has it."""
        platform.make_private(data_dir)
        lock = platform.lock_file(data_dir / "lock")
        try:
            stored = read_json(data_dir / "identity.json") or {}
            node_id = stored.get("id", "")
            if not isinstance(node_id, str) or not _ID.fullmatch(node_id):
                node_id = secrets.token_hex(8)
            identity = cls(
                node_id, int(stored.get("incarnation", 0)) + 1, secrets.token_hex(8), data_dir, lock
            )
            identity._persist()
        except BaseException:
            lock.close()
            raise
        return identity

    def exceed(self, highest: int) -> None:
        """Move the incarnation past the highest that a peer has seen (a data directory restored from a backup)."""
        if highest >= self.incarnation:
            self.incarnation = highest + 1
            self._persist()

    def _persist(self) -> None:
        write_json(self.data_dir / "identity.json", {"id": self.id, "incarnation": self.incarnation})

    def close(self) -> None:
        """Give the data directory free."""
        self._lock.close()
