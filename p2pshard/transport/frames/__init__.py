"""Frames of the data plane: a msgpack header and raw tensor bytes, cut into messages of at most 1 MiB.

A frame's body is ``header ‖ payload``. Its first message starts with a fixed prefix (version, header
length, body length, time spent encoding, CRC-32 of the body and that time), each further one with its index. `Assembler` puts the
messages of one stream together again and checks every length, type, shape, dtype and codec against
`Limits`, which follow from the plan, before it allocates; anything else raises `ProtocolError` and ends
that stream alone. Nothing is evaluated or unpickled.

Pure: no sockets here.
"""

from p2pshard.transport.frames.assembler import Assembler
from p2pshard.transport.frames.encode import encode
from p2pshard.transport.frames.values import (
    Admitted,
    Arrival,
    Deltas,
    Frame,
    Hello,
    Hop,
    Limits,
    RowHeader,
    SampledToken,
)
from p2pshard.transport.frames.wire import CHUNK_BYTES, VERSION

__all__ = [
    "CHUNK_BYTES",
    "VERSION",
    "Admitted",
    "Arrival",
    "Assembler",
    "Deltas",
    "Frame",
    "Hello",
    "Hop",
    "Limits",
    "RowHeader",
    "SampledToken",
    "encode",
]
