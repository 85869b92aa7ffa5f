"""Tensors that came from other nodes: files named by their sha256, bounded, least recently used out first."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from pathlib import Path

from p2pshard.errors import Conflict, DoesNotFit, ModelCorrupt, ProtocolError
from p2pshard_node.models.files import make_private_dir

__all__ = ["BlobWriter", "TensorCache", "check_sha256"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_STALE_PART_S = 7 * 86_400
_FRESH_S = 3_600.0
"""How long what was fetched is kept for a source file that will name it."""

_log = logging.getLogger("p2pshard.models")


def check_sha256(value: str) -> str:
    """``value``, known to be 64 hex digits, so that it may be a file name. Raises `ProtocolError`."""
    if not _SHA256.fullmatch(value):
        raise ProtocolError(f"{value[:80]!r} is not a sha256 in hex")
    return value


class BlobWriter:
    """One blob on its way in. What was written stays: a later writer goes on from there."""

    def __init__(self, cache: TensorCache, sha256: str, nbytes: int) -> None:
        self._cache, self._sha256, self._nbytes = cache, sha256, nbytes
        self._path = cache.folder / f"{sha256}.part"
        self._hash = hashlib.sha256()
        self.offset = 0
        """Bytes there already: where to resume from."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        try:
            if os.fstat(handle).st_size > nbytes:
                self._file.truncate(0)
            while chunk := self._file.read(1 << 20):
                self._hash.update(chunk)
                self.offset += len(chunk)
        except BaseException:
            self._file.close()
            raise

    def write(self, data: bytes) -> None:
        """Append. Raises `ModelCorrupt`, and forgets all, when there is more than the blob has."""
        if self.offset + len(data) > self._nbytes:
            self._discard()
            raise ModelCorrupt(f"blob {self._sha256[:12]}: more than its {self._nbytes} bytes were sent")
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Verify and make available.

        Raises `ModelCorrupt`: bytes are missing (they may yet follow), or the hash is wrong (all is deleted).
        """
        if self.offset != self._nbytes:
            raise ModelCorrupt(f"blob {self._sha256[:12]}: {self.offset} of {self._nbytes} bytes arrived")
        if self._hash.hexdigest() != self._sha256:
            self._discard()
            raise ModelCorrupt(
                f"blob {self._sha256[:12]}: {self._nbytes} bytes of hash {self._hash.hexdigest()[:12]}; "
                "deleted, they must be fetched again"
            )
        os.fsync(self._file.fileno())
        self._file.close()
        self._cache.accept(self._sha256, self._nbytes, self._path)

    def close(self) -> None:
        """End writing, finished or not; idempotent."""
        self._file.close()
        self._cache.release(self._sha256)

    def _discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class TensorCache:
    """The folder ``cache/tensors``. Thread-safe."""

    def __init__(self, folder: Path, limit: int, pinned: Callable[[], Set[str]]) -> None:
        """
        Args:
            folder: made when it does not exist.
            limit: bytes that all blobs together may have.
            pinned: hashes that must stay, because a worker may read them.
        """
        self.folder = make_private_dir(folder)
        self._limit, self._pinned = limit, pinned
        self._lock = threading.RLock()
        self._writing: dict[str, int] = {}
        self._fresh: dict[str, float] = {}
        self._blobs: OrderedDict[str, int] = OrderedDict()
        """sha256 → bytes, least recently used first."""
        found = []
        now = time.time()
        for entry in os.scandir(self.folder):
            state = entry.stat(follow_symlinks=False)
            if _SHA256.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found.append((state.st_mtime, entry.name, state.st_size))
            elif entry.name.endswith(".part") and now - state.st_mtime > _STALE_PART_S:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        for _, name, size in sorted(found):
            self._blobs[name] = size

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._blobs.values())

    def find(self, sha256: str) -> tuple[Path, int] | None:
        """Path and bytes of a blob, which counts as used now; None when it is not here, or not whole."""
        with self._lock:
            size = self._blobs.get(sha256)
            if size is None:
                return None
            path = self.folder / sha256
            try:
                if path.stat().st_size != size:
                    raise OSError("size differs")
                os.utime(path)
            except OSError as error:
                _log.warning("cached tensor dropped sha256=%s reason=%s", sha256[:12], error)
                del self._blobs[sha256]
                path.unlink(missing_ok=True)
                return None
            self._blobs.move_to_end(sha256)
            return path, size

    def writer(self, sha256: str, nbytes: int) -> BlobWriter:
        """Begin or resume a blob, after making room.

        Raises:
            Conflict: another writer has it.
            DoesNotFit: what must stay leaves no room.
        """
        check_sha256(sha256)
        with self._lock:
            if sha256 in self._writing:
                raise Conflict(f"blob {sha256[:12]} is being written already")
            self._make_room(nbytes)
            self._writing[sha256] = nbytes
            try:
                return BlobWriter(self, sha256, nbytes)
            except BaseException:
                del self._writing[sha256]
                raise

    def accept(self, sha256: str, nbytes: int, part: Path) -> None:
        """Called by a writer that has verified its file."""
        with self._lock:
            os.replace(part, self.folder / sha256)
            self._blobs[sha256] = nbytes
            self._blobs.move_to_end(sha256)
            self._fresh[sha256] = time.monotonic()

    def release(self, sha256: str) -> None:
        """Called by a writer that ends."""
        with self._lock:
            self._writing.pop(sha256, None)

    def settle(self, hashes: Set[str]) -> None:
        """These are named by a source file now, which pins them in place of being fresh, or never will be."""
        with self._lock:
            for sha256 in hashes:
                self._fresh.pop(sha256, None)

    def _make_room(self, nbytes: int) -> None:
        total = sum(self._blobs.values()) + sum(self._writing.values()) + nbytes
        if total <= self._limit:
            return
        now = time.monotonic()
        self._fresh = {sha: at for sha, at in self._fresh.items() if now - at < _FRESH_S}
        keep = self._pinned() | self._fresh.keys()
        for sha256 in [s for s in self._blobs if s not in keep]:
            (self.folder / sha256).unlink(missing_ok=True)
            total -= self._blobs.pop(sha256)
            if total <= self._limit:
                return
        raise DoesNotFit(
            f"the tensor cache may have {self._limit} bytes; {total} would be needed for what is in use and "
            f"{nbytes} more. Undeploy a model, or start this node with a larger --tensor-cache",
            shortfall_bytes=total - self._limit,
        )
