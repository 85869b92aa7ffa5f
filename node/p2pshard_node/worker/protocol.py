"""The control channel between daemon and worker: msgpack maps, each after its length in four bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

from p2pshard.errors import ProtocolError

__all__ = ["MAX_MESSAGE", "ControlChannel", "epoch_of", "pack", "unpack"]

MAX_MESSAGE = 32 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """Raises `ProtocolError` above `MAX_MESSAGE`."""
    data: bytes = msgpack.packb(message)
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a control message of {len(data)} bytes, {MAX_MESSAGE} are allowed")
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes, what: str) -> Message:
    """The map that bytes are; ``what`` they should be, for the `ProtocolError` where they are none."""
    try:
        value = msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{what} that is no msgpack: {error!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} that is no map")
    return value


def epoch_of(message: Message) -> list[Any] | None:
    """The epoch of the plan in a ``load`` message, as events name it; None where there is none."""
    plan = message.get("plan")
    epoch = plan.get("epoch") if isinstance(plan, dict) else None
    return [epoch.get("n"), epoch.get("proposer")] if isinstance(epoch, dict) else None


class ControlChannel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> Message | None:
        """The next message, or None when the other end is gone. Raises `ProtocolError`."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_MESSAGE:
                raise ProtocolError(f"a control message of {size} bytes, {MAX_MESSAGE} are allowed")
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return unpack(data, "a control message")

    def send(self, message: Message) -> None:
        """Queue a message; events are small and rare, so this never waits."""
        self._writer.write(pack(message))

    def close(self) -> None:
        self._writer.close()
