"""How a frame's messages begin, and which fields a header of each kind has."""

from __future__ import annotations

import struct

from p2pshard.sampling import SamplingParams

__all__ = [
    "CHUNK_BYTES",
    "FIRST",
    "KEYS",
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

VERSION = 2
CHUNK_BYTES = 1 << 20
"""Most bytes of one message, prefix included."""

KINDS = ("hello", "hello_ack", "step", "tokens", "error", "ping", "pong")
OUTPUTS = ("none", "sample", "logits", "hidden", "prompt_logprobs")

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

KEYS: dict[str, frozenset[str]] = {
    "hello": frozenset({"hello"}),
    "hello_ack": frozenset({"hello"}),
    "step": frozenset({"rows", "tensors", "deltas", "admitted", "failed", "hops"}),
    "tokens": frozenset({"tokens", "failed", "hops"}),
    "error": frozenset({"error"}),
    "ping": frozenset(),
    "pong": frozenset({"status"}),
}
