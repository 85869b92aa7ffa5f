"""Index of a GGUF file: its metadata and where each tensor lies. Reads headers only.

Follows the format's specification (ggml ``docs/gguf.md``, versions 2 and 3, little endian). A file is
material from outside: every count and length is checked against what is left of the file before memory is
taken for it, and anything odd is a `ModelCorrupt` that names the file. The ``gguf`` package maps the whole
file instead, so that a file truncated under it would end the process.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.dtypes import gguf_type, tensor_nbytes

__all__ = ["GgufModel", "GgufTensor", "read_gguf", "split_paths"]

_MAX_HEADER = 256 * 2**20
_MAX_KEYS = 65_536
_MAX_TENSORS = 1_000_000
_MAX_STRINGS = 4_000_000
_MAX_STRING = 16 * 2**20
_MAX_NAME = 1_024
_MAX_DIMS = 4
_MAX_PARTS = 4_096
_READ = 2**20

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    dtype: str
    """ggml's name: ``F32``, ``Q4_K`` and so on."""
    shape: tuple[int, ...]
    """Row-major, outermost first."""
    path: Path
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class GgufModel:
    """One model, of one file or of several parts."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    """Of the first part: scalars as Python values, numbers as numpy arrays, strings as lists."""
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """``general.architecture``; raises `ModelCorrupt` when absent."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelCorrupt(f"{self.paths[0]}: no general.architecture in its metadata")
        return value


class _Header:
    """Bounded sequential reads of a file's start."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.buffer = b""
        self.at = 0
        """Position in ``buffer``."""
        self.base = 0
        """Position of ``buffer`` in the file."""

    @property
    def position(self) -> int:
        return self.base + self.at

    def corrupt(self, what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.path}: {what} (near byte {self.position} of {self.size})")

    def need(self, count: int) -> None:
        """Have ``count`` bytes at ``at`` in the buffer."""
        if len(self.buffer) - self.at >= count:
            return
        if self.position + count > self.size:
            raise self.corrupt(
                f"truncated: {count} more header bytes expected, {self.size - self.position} left"
            )
        if self.position + count > _MAX_HEADER:
            raise self.corrupt(f"its header is larger than {_MAX_HEADER} bytes")
        rest = self.buffer[self.at :]
        more = self.file.read(max(count - len(rest), _READ))
        self.base, self.at, self.buffer = self.base + self.at, 0, rest + more
        if len(self.buffer) < count:
            raise self.corrupt("truncated while it was read")

    def take(self, count: int) -> bytes:
        self.need(count)
        start = self.at
        self.at += count
        return self.buffer[start : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self, limit: int, what: str) -> str:
        length = self.u64()
        if length > limit:
            raise self.corrupt(f"{what} of {length} bytes, above the limit of {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8: {error}") from error

    def strings(self, count: int, key: str) -> list[str]:
        if count > _MAX_STRINGS or count * 8 > self.size - self.position:
            raise self.corrupt(f"array {key!r} claims {count} strings")
        out: list[str] = []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):  # a vocabulary has 10^5 of them: few calls per item
                self.need(8)
                (length,) = unpack(self.buffer, self.at)
                if length > _MAX_STRING:
                    raise self.corrupt(f"array {key!r} has a string of {length} bytes")
                self.need(8 + length)
                start = self.at + 8
                self.at = start + length
                out.append(self.buffer[start : self.at].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self.corrupt(f"array {key!r} has a string that is not UTF-8: {error}") from error
        return out

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(_MAX_STRING, f"value of {key!r}")
        if kind == _ARRAY:
            kind, count = self.u32(), self.u64()
            if kind == _STRING:
                return self.strings(count, key)
            if kind not in _SCALARS:
                raise self.corrupt(f"array {key!r} has elements of type {kind}: unknown, or nested arrays")
            item = _SCALARS[kind]
            if count * item.itemsize > min(self.size - self.position, _MAX_HEADER):
                raise self.corrupt(f"array {key!r} claims {count} elements")
            return np.frombuffer(self.take(count * item.itemsize), item)
        if kind not in _SCALARS:
            raise self.corrupt(f"value of {key!r} has type {kind}, which does not exist")
        item = _SCALARS[kind]
        return np.frombuffer(self.take(item.itemsize), item)[0].item()


@dataclass(frozen=True)
class _Part:
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def _read_tensors(header: _Header, count: int) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """``(name, dtype, shape, offset from the data's start, nbytes)`` of each."""
    rows = []
    for _ in range(count):
        name = header.text(_MAX_NAME, "tensor name")
        dims = header.u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise header.corrupt(f"tensor {name!r} has {dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(header.u64() for _ in range(dims))[::-1]
        if min(shape) < 1 or max(shape) > 2**48:
            raise header.corrupt(f"tensor {name!r} has the shape {shape}")
        storage = gguf_type(header.u32(), name, str(header.path))
        nbytes = tensor_nbytes("gguf", storage.name, shape, name, str(header.path))
        rows.append((name, storage.name, shape, header.u64(), nbytes))
    return rows


def _read_part(path: Path) -> _Part:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 -- closed below; opening has its own errors
    except OSError as error:
        raise ModelCorrupt(f"{path}: cannot be opened: {error.strerror or error}") from error
    with file:
        header = _Header(file, path)
        if header.size < 24 or header.take(4) != b"GGUF":
            whole = path.suffix in (".safetensors", ".json")
            hint = (
                f"; a model in the Hugging Face form is given by its folder: {path.parent}" if whole else ""
            )
            raise ModelCorrupt(
                f"{path}: not a GGUF file ({header.size} bytes; it must start with 'GGUF'){hint}"
            )
        version = header.u32()
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                raise UnsupportedModel(f"{path}: a big-endian GGUF file, which is not read here")
            raise UnsupportedModel(f"{path}: GGUF version {version}; versions 2 and 3 are read")
        tensor_count, key_count = header.u64(), header.u64()
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise header.corrupt(f"claims {tensor_count} tensors and {key_count} metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = header.text(_MAX_NAME, "metadata key")
            if key in metadata:
                raise header.corrupt(f"metadata key {key!r} appears twice")
            metadata[key] = header.value(header.u32(), key)
        rows = _read_tensors(header, tensor_count)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise header.corrupt(f"general.alignment is {alignment!r}; it must be a power of two up to 2^20")
        start = -(-header.position // alignment) * alignment
        return _Part(metadata, _place(header, rows, start, alignment))


def _place(
    header: _Header, rows: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
) -> tuple[GgufTensor, ...]:
    names = {row[0] for row in rows}
    if len(names) != len(rows):
        raise header.corrupt("two tensors have the same name")
    end = 0
    for name, _, _, offset, nbytes in sorted(rows, key=lambda row: row[3]):
        if offset % alignment or offset < end:
            raise header.corrupt(
                f"tensor {name!r} at {offset} overlaps another or is not aligned to {alignment}"
            )
        end = offset + nbytes
    if start + end > header.size and rows:
        raise ModelCorrupt(
            f"{header.path}: truncated: tensors end at byte {start + end} of {header.size}; get it again"
        )
    return tuple(
        GgufTensor(name, dtype, shape, header.path, start + offset, nbytes)
        for name, dtype, shape, offset, nbytes in rows
    )


def split_paths(path: Path) -> tuple[Path, ...]:
    """All parts of a split file, in order, from the name of any; of another name: the path alone.

    Raises `ModelCorrupt` for a part number outside the count.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise ModelCorrupt(f"{path}: part {number} of {count} cannot be")
    return tuple(path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))


def read_gguf(path: Path) -> GgufModel:
    """Read the index of a GGUF model; ``path`` is the file, or any part of a split one.

    Raises:
        ModelCorrupt: a missing, truncated or malformed file, or parts that do not belong together.
        UnsupportedModel: a quantisation or version that is not read, by name.
    """
    paths = split_paths(path)
    missing = [str(p) for p in paths if not p.is_file()]
    if missing:
        raise ModelCorrupt(f"{path}: {len(missing)} of {len(paths)} files missing, the first is {missing[0]}")
    parts = [_read_part(p) for p in paths]
    first = parts[0].metadata
    stated = first.get("split.count", 1 if len(paths) == 1 else len(paths))
    if stated not in (0, len(paths)) and not (stated == 1 and len(paths) == 1):
        raise ModelCorrupt(
            f"{paths[0]}: says that it is one of {stated} parts; {len(paths)} found. "
            "Parts must keep their names (…-00001-of-000NN.gguf) and lie in one folder"
        )
    for index, part in enumerate(parts):
        number = part.metadata.get("split.no", index)
        count = part.metadata.get("split.count", stated)
        if len(parts) > 1 and (number != index or count != stated):
            raise ModelCorrupt(
                f"{paths[index]}: says it is part {number} of {count}; expected {index} of {stated}"
            )
    tensors = tuple(t for part in parts for t in part.tensors)
    if len({t.name for t in tensors}) != len(tensors):
        raise ModelCorrupt(f"{paths[0]}: two parts hold a tensor of the same name")
    total = first.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        raise ModelCorrupt(f"{paths[0]}: its parts hold {len(tensors)} tensors; {total} expected")
    if not tensors:
        raise ModelCorrupt(f"{paths[0]}: no tensors in it")
    return GgufModel(paths, first, tensors)
