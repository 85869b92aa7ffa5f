"""How a frame's messages begin, and which fields a header of each kind has."""

from __future__ import annotations

import struct

from p2pshard.sampling import SamplingParams

__all__ = [
    "CHUNK_BYTES",
    "FIELDS",
    "FIRST",
    "KINDS",
    "MAGIC",
    "OUTPUTS",
    "REST",
    "SAMPLING",
    "SPENT",
    "TEXT",
    "U32",
    "U63",
    "U64",
    "VERSION",
]

VERSION = 4
CHUNK_BYTES = 1 << 20
"""Most bytes of one message, prefix included."""
OUTPUTS = ("none", "sample", "verify", "logits", "hidden")

MAGIC = b"p2"
FIRST = struct.Struct("!2sBBIQ4sI")
"""Magic, version, part, header bytes, body bytes, spent, CRC-32 of body and spent."""
REST = struct.Struct("!2sBBI")
"""Magic, version, part, index."""
SPENT = struct.Struct("!I")
"""Microseconds of the sender's own clock; a duration needs no common one."""
U32, U63, U64 = 2**32 - 1, 2**63 - 1, 2**64 - 1
TEXT = 4096
"""Most characters of a text."""
SAMPLING = tuple(SamplingParams.__dataclass_fields__)
"""Sampling settings, in the order in which a header carries them."""

FIELDS: dict[str, tuple[str, ...]] = {
    "hello": ("hello",),
    "hello_ack": ("hello",),
    "step": ("rows", "tensors", "deltas", "admitted", "failed", "hops"),
    "tokens": ("tokens", "failed", "hops"),
    "error": ("error",),
    "ping": (),
    "pong": ("status",),
}
"""A header is the list ``[kind, epoch, proposer, step, *fields]`` with the fields of its kind in this order."""

KINDS = tuple(FIELDS)
