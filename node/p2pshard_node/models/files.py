"""Small file operations that state on disk rests on: private, and noticing change."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from p2pshard.errors import ModelCorrupt

__all__ = ["Signature", "make_private_dir"]


@dataclass(frozen=True)
class Signature:
    """What tells that a file is still the one that was hashed."""

    size: int
    """-1: there was no such file."""
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Signature:
        """Of the file now. Raises `ModelCorrupt` unless it is a regular file or absent."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return cls(-1, 0, 0)
        except OSError as error:
            raise ModelCorrupt(f"{path}: cannot be read: {error.strerror or error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise ModelCorrupt(f"{path}: not a regular file")
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


def make_private_dir(path: Path) -> Path:
    """Create a folder (and those above it) that only its owner enters."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
