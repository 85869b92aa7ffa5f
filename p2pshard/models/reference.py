"""What a user may write where a model is meant: a name, a folder or a ``.gguf`` file. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from p2pshard.errors import InvalidRequest

__all__ = ["Reference", "parse_reference"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_CHARS = 4096
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Reference:
    """A parsed reference."""

    name: str
    """How the model is called: the name itself, or the folder's or file's."""
    path: Path | None
    """Absolute, when the reference is a path."""

    @property
    def text(self) -> str:
        """What a client sends: a daemon has another working directory, so paths are absolute."""
        return self.name if self.path is None else str(self.path)


def parse_reference(text: str, *, base: Path | None = None) -> Reference:
    """Parse a reference. A path is what has a separator, starts with ``.`` or ``~``, or ends in ``.gguf``.

    Args:
        text: as typed.
        base: folder that relative paths start from; None: they are refused.

    Raises:
        InvalidRequest: neither a name nor a path, or a relative path without a base.
    """
    if not text:
        raise InvalidRequest(
            "a model is a name, a folder or a .gguf file; it must not be empty", field="model"
        )
    if len(text) > _MAX_CHARS or "\0" in text:
        fault = f"has {len(text)} characters" if len(text) > _MAX_CHARS else "has a NUL character"
        raise InvalidRequest(
            f"{text[:40]!r}{'...' if len(text) > 40 else ''} {fault}; a model is a name, a folder or a .gguf "
            f"file, of up to {_MAX_CHARS} characters",
            field="model",
        )
    separators = {"/", os.sep} | ({os.altsep} if os.altsep else set())
    if any(s in text for s in separators) or text.startswith((".", "~")) or text.lower().endswith(".gguf"):
        path = Path(text)
        if base is not None:
            path = base / path.expanduser()
        if not path.is_absolute():
            raise InvalidRequest(
                f"{text!r} is not absolute; a daemon does not know your folder", field="model"
            )
        path = Path(os.path.normpath(path))
        name = _PART.sub("", path.stem if path.suffix.lower() == ".gguf" else path.name)
        return Reference(name or "model", path)
    if not _NAME.fullmatch(text):
        raise InvalidRequest(
            f"{text!r} is not a model's name (letters, digits, '.', '_' and '-'); for a file write its path",
            field="model",
        )
    return Reference(text, None)
