"""Sizes in bytes, as people write and read them. Decimal: 1 MB is 1,000,000 bytes; MiB is 1,048,576."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "parse_size"]

_FACTOR = {
    "": 1,
    "B": 1,
    **{f"{letter}{end}": 1000**i for i, letter in enumerate("KMGT", 1) for end in ("", "B")},
    **{f"{letter}I{end}": 1024**i for i, letter in enumerate("KMGT", 1) for end in ("", "B")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """``600MB``, ``1.5 GiB`` or ``1048576`` in bytes. Raises `ValueError` for anything else."""
    match = _SIZE.fullmatch(text)
    factor = _FACTOR.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write for example 600MB, 1.5GB or 512MiB")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(count: int) -> str:
    """``612 MB``: three significant digits."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
