"""Keys of KV blocks by content: equal keys mean equal tokens from the very beginning on. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from p2pshard.planning.plan import Plan

__all__ = ["extend_keys", "root_key"]


def root_key(plan: Plan) -> bytes:
    """What the key of a first block builds on: all that keys and values depend on beside the tokens."""
    return _digest(b"", "\0".join((plan.manifest, plan.dtype, plan.numerics)).encode())


def extend_keys(keys: list[bytes], ids: Sequence[int], block_size: int, count: int, root: bytes) -> None:
    """Append to `keys`, those of the first blocks of `ids`, until there are `count`.

    Each key covers its block's ids and, through the key before it, all earlier ones.
    """
    for index in range(len(keys), count):
        block = ids[index * block_size : (index + 1) * block_size]
        keys.append(_digest(keys[-1] if keys else root, struct.pack(f"<{block_size}I", *block)))


def _digest(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=32, person=b"p2pshard-prefix").digest()
