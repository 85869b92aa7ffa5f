"""What a worker reads its weights from: a source file that names, for each tensor, where its bytes lie.

Reads are positional (``pread``) and counted: nothing is mapped, so what is read is all that is paid for.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import BinaryIO

from p2pshard.errors import ModelCorrupt
from p2pshard.models.manifest import Manifest, TensorEntry

__all__ = ["TensorSource"]

_MAX_SOURCE = 256 * 2**20


class TensorSource:
    """Tensors of one stage. Thread-safe; use as a context manager or `close` it."""

    def __init__(self, manifest: Manifest, places: dict[str, tuple[Path, int, int]]) -> None:
        self.manifest = manifest
        self.bytes_read = 0
        """Tensor bytes read so far."""
        self._entries = {t.name: t for t in manifest.tensors}
        self._places = places
        self._files: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | str) -> TensorSource:
        """Read a source file; tensors are opened when they are read.

        Raises `ModelCorrupt` when it, or the manifest it names, is malformed, when a place lies outside its
        file, or when a file changed after it was hashed.
        """
        path = Path(path)
        try:
            if path.stat().st_size > _MAX_SOURCE:
                raise ModelCorrupt(f"{path}: larger than {_MAX_SOURCE} bytes")
            value = json.loads(path.read_bytes())
            manifest = Manifest.from_bytes(Path(value["manifest"]).read_bytes())
            places = {str(n): (Path(p), int(o), int(b)) for n, (p, o, b) in value["tensors"].items()}
            signatures = {Path(p): (int(s), t) for p, (s, t) in value.get("files", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(f"{path}: not a source file: {error!r}") from error
        source = cls(manifest, places)
        source._check(signatures)
        return source

    def _check(self, signatures: dict[Path, tuple[int, int | None]]) -> None:
        sizes: dict[Path, int] = {}
        for name, (path, offset, nbytes) in self._places.items():
            entry = self._entries.get(name)
            if entry is None or entry.nbytes != nbytes or offset < 0:
                raise ModelCorrupt(f"tensor {name!r}: {nbytes} bytes at {offset}, the manifest says {entry}")
            if path not in sizes:
                try:
                    state = os.stat(path)
                except OSError as error:
                    raise ModelCorrupt(f"{path}: cannot be read: {error.strerror or error}") from error
                sizes[path] = state.st_size
                size, mtime = signatures.get(path, (state.st_size, None))
                if size != state.st_size or mtime not in (None, state.st_mtime_ns):
                    raise ModelCorrupt(f"{path}: changed after it was hashed; deploy the model again")
            if offset + nbytes > sizes[path]:
                raise ModelCorrupt(f"{path}: truncated: {name!r} ends at {offset + nbytes} of {sizes[path]}")

    @property
    def names(self) -> list[str]:
        """Tensors that this source has, as the files name them, in the manifest's order."""
        return [name for name in self._entries if name in self._places]

    def entry(self, name: str) -> TensorEntry:
        """Raises `ModelCorrupt` for a tensor that this source does not have."""
        if name not in self._places:
            raise ModelCorrupt(f"tensor {name!r} is not among the {len(self._places)} of this stage's source")
        return self._entries[name]

    def read(self, name: str) -> tuple[memoryview, TensorEntry]:
        """All bytes of a tensor."""
        entry = self.entry(name)
        return self.read_range(name, 0, entry.nbytes), entry

    def read_range(self, name: str, start: int, nbytes: int) -> memoryview:
        """Some bytes of a tensor, in a buffer of their own. Raises `ModelCorrupt` at a short read."""
        entry = self.entry(name)
        if start < 0 or nbytes < 0 or start + nbytes > entry.nbytes:
            raise ModelCorrupt(
                f"tensor {name!r}: bytes {start} to {start + nbytes} of {entry.nbytes} asked for"
            )
        path, offset, _ = self._places[name]
        buffer = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            count = self._pread(path, buffer[done:], offset + start + done)
            if count == 0:
                raise ModelCorrupt(
                    f"{path}: truncated: tensor {name!r} has {start + done} of {entry.nbytes} bytes"
                )
            done += count
        with self._lock:
            self.bytes_read += nbytes
        return buffer

    def _pread(self, path: Path, buffer: memoryview, offset: int) -> int:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                try:
                    file = self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115 -- closed by close()
                except OSError as error:
                    raise ModelCorrupt(f"{path}: cannot be opened: {error.strerror or error}") from error
            if not hasattr(os, "preadv"):  # Windows: a seek and a read, under the lock
                file.seek(offset)
                return file.readinto(buffer) or 0  # type: ignore[attr-defined]
        return os.preadv(file.fileno(), [buffer], offset)

    def close(self) -> None:
        """Close the files; idempotent."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
