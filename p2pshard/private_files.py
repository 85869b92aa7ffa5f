"""Files that only their owner reads, replaced in one step and on the disk before the call returns."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["make_private", "write_private"]


def make_private(folder: Path) -> None:
    """Create the folder, readable by this user alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name == "posix":
        folder.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file, at once and durably, mode 0600."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)  # mkstemp makes it 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sync_directory(folder: Path) -> None:
    """Make a rename in the folder survive a power cut (POSIX; elsewhere the rename alone must do)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
