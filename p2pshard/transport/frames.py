"""Frames of the data plane: a msgpack header and raw tensor bytes, cut into messages of at most 1 MiB.

A frame's body is ``header ‖ payload``. Its first message starts with a fixed prefix (version, header
length, body length, time spent encoding, CRC-32 of the body and that time), each further one with its index. `Assembler` puts the
messages of one stream together again and checks every length, type, shape, dtype and codec against
`Limits`, which follow from the plan, before it allocates; anything else raises `ProtocolError` and ends
that stream alone. Nothing is evaluated or unpickled.

Pure: no sockets here.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

import msgpack
import numpy.typing as npt

from p2pshard.errors import InvalidRequest, P2PShardError, ProtocolError, from_wire
from p2pshard.planning.plan import Epoch, Plan
from p2pshard.sampling import SamplingParams
from p2pshard.transport.codecs import codec

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

VERSION = 2
CHUNK_BYTES = 1 << 20
"""Most bytes of one message, prefix included."""

KINDS = ("hello", "hello_ack", "step", "tokens", "error", "ping", "pong")
OUTPUTS = ("none", "sample", "logits", "hidden", "prompt_logprobs")

_MAGIC = b"p2"
_FIRST = struct.Struct(
    "!2sBBIQ4sI"
)  # magic, version, part, header bytes, body bytes, spent, crc of body and spent
_REST = struct.Struct("!2sBBI")  # magic, version, part, index
_SPENT = struct.Struct("!I")  # microseconds of the sender's own clock; a duration needs no common one
_U32, _U63, _U64 = 2**32 - 1, 2**63 - 1, 2**64 - 1
_TEXT = 4096

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """What the plan allows on an edge."""

    chunk_tokens: int
    """Most tokens, hence rows, of one step."""
    hidden_size: int
    vocab_size: int
    blocks: int
    context: int
    stages: int

    @classmethod
    def of(cls, plan: Plan, *, hidden_size: int, vocab_size: int) -> Limits:
        return cls(plan.chunk_tokens, hidden_size, vocab_size, plan.blocks, plan.context, len(plan.stages))

    @property
    def sequences(self) -> int:
        """Sequences that can hold a block at once; also most ids in one list of a frame."""
        return self.blocks

    @property
    def header_bytes(self) -> int:
        return (
            (64 << 10)
            + 64 * self.stages
            + 64 * self.blocks
            + min(self.chunk_tokens, self.blocks) * (320 + _TEXT)
        )

    @property
    def payload_bytes(self) -> int:
        return self.chunk_tokens * 4 * (self.hidden_size + 1)


@dataclass(frozen=True)
class RowHeader:
    """One sequence's part of a step."""

    sequence: int
    start: int
    """Position of its first token."""
    length: int
    output: str = "none"


@dataclass(frozen=True)
class Admitted:
    """A sequence that this step is the first to carry; the last stage samples from these settings."""

    sequence: int
    prompt_length: int
    """Ids at and after this position are output: penalties and random numbers depend on the border."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Deltas:
    """Changes of the block table, executed in the order of the fields."""

    free: tuple[int, ...] = ()
    """Sequences that give all their blocks back."""
    truncate: tuple[tuple[int, int], ...] = ()
    """(sequence, blocks kept)."""
    copy: tuple[tuple[int, int], ...] = ()
    """(source block, destination block)."""
    allocate: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(sequence, runs of (first block, count)), appended to what it has."""

    def __bool__(self) -> bool:
        return bool(self.free or self.truncate or self.copy or self.allocate)


@dataclass(frozen=True)
class Hop:
    """What one stage spent on a step, and the edge over which the step came to it."""

    stage: int
    queue_us: int
    """From the frame's arrival to the start of its computation."""
    compute_us: int
    """The layers, without the sampler."""
    sample_us: int = 0
    """The sampler's part of the last stage."""
    serialise_us: int = 0
    """Encoding at the sender and decoding here; 0 on the first stage, which no edge leads to."""
    nbytes: int = 0
    """Of the frame as it came over the edge."""


@dataclass(frozen=True)
class Arrival:
    """How a frame came over its edge; says nothing about what is in it, and is not sent on."""

    nbytes: int
    """Of all its messages."""
    serialise_us: int
    """Encoding at the sender and decoding here."""


@dataclass(frozen=True)
class SampledToken:
    """One sampled token of a step's row."""

    sequence: int
    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Hello:
    """Opens an edge, and answers: both ends must hold the same plan of the same weights."""

    deployment: str
    plan: str
    """Digest of the plan."""
    manifest: str
    """Digest of the model."""
    fingerprint: str
    """Of the sender's numerics; must be equal only under an ``invariant`` plan."""
    instance: str
    """Random name of the sending process: one stream for each."""
    stage: int
    """Index of the sender."""
    edge: str
    """``forward`` (to the next stage) or ``back`` (last stage to driver)."""


@dataclass(frozen=True)
class Frame:
    """One message of an edge. Which fields a kind uses: see `_KEYS`."""

    kind: str
    epoch: Epoch
    step: int = 0
    rows: tuple[RowHeader, ...] = ()
    token_ids_T: Array | None = None
    """int32, the rows' tokens one after another; on every step, so the last stage knows every history."""
    hidden_TD: Array | None = None
    """float32 residual of the same tokens; absent where nothing was computed."""
    deltas: Deltas = field(default_factory=Deltas)
    admitted: tuple[Admitted, ...] = ()
    failed: tuple[tuple[int, P2PShardError], ...] = ()
    """Sequences of this step that a stage could not compute, each with the error that names the stage."""
    tokens: tuple[SampledToken, ...] = ()
    hops: tuple[Hop, ...] = ()
    hello: Hello | None = None
    error: P2PShardError | None = None
    """For kind ``error``: why the sender (or one behind it) cannot go on."""
    status: tuple[int, int, int] | None = None
    """For kind ``pong``: (stage, last step received, last step computed)."""
    arrival: Arrival | None = None
    """Set by the `Assembler`; None for a frame that was made here."""

    def with_hop(self, hop: Hop) -> Frame:
        return replace(self, hops=(*self.hops, hop))


_KEYS: dict[str, frozenset[str]] = {
    "hello": frozenset({"hello"}),
    "hello_ack": frozenset({"hello"}),
    "step": frozenset({"rows", "tensors", "deltas", "admitted", "failed", "hops"}),
    "tokens": frozenset({"tokens", "failed", "hops"}),
    "error": frozenset({"error"}),
    "ping": frozenset(),
    "pong": frozenset({"status"}),
}


# -- encoding -------------------------------------------------------------------------------------
def _tensors(frame: Frame) -> list[tuple[dict[str, Any], memoryview]]:
    raw = codec("raw")
    parts = []
    for name, array in (("token_ids", frame.token_ids_T), ("hidden", frame.hidden_TD)):
        if array is not None:
            meta = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "codec": raw.name}
            parts.append((meta, raw.encode(array)))
    return parts


def _hello_list(hello: Hello) -> list[Any]:
    return [
        hello.deployment,
        hello.plan,
        hello.manifest,
        hello.fingerprint,
        hello.instance,
        hello.stage,
        hello.edge,
    ]


def _error_map(error: P2PShardError) -> dict[str, Any]:
    wire = error.to_wire()
    details = {k: wire["details"][k] for k in ("node", "layers", "stage") if k in wire["details"]}
    return {"code": wire["code"], "message": wire["message"][: _TEXT // 4], "details": details}


def _header(frame: Frame, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rows": [[r.sequence, r.start, r.length, r.output] for r in frame.rows],
        "tensors": tensors,
        "deltas": [
            list(frame.deltas.free),
            [list(t) for t in frame.deltas.truncate],
            [list(c) for c in frame.deltas.copy],
            [[s, [list(run) for run in runs]] for s, runs in frame.deltas.allocate],
        ],
        "admitted": [
            [a.sequence, a.prompt_length, [getattr(a.sampling, k) for k in _SAMPLING]] for a in frame.admitted
        ],
        "failed": [[s, _error_map(e)] for s, e in frame.failed],
        "tokens": [[t.sequence, t.id, t.logprob, [list(x) for x in t.top]] for t in frame.tokens],
        "hops": [
            [h.stage, h.queue_us, h.compute_us, h.sample_us, h.serialise_us, h.nbytes] for h in frame.hops
        ],
        "hello": _hello_list(frame.hello) if frame.hello else None,
        "error": _error_map(frame.error) if frame.error else None,
        "status": list(frame.status) if frame.status else None,
    }
    header = {"kind": frame.kind, "epoch": [frame.epoch.n, frame.epoch.proposer], "step": frame.step}
    return header | {k: values[k] for k in _KEYS[frame.kind]}


def encode(frame: Frame, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The frame's messages, each of at most `chunk_bytes`; tensor bytes are copied once."""
    begun = time.perf_counter()
    parts = _tensors(frame)
    header = msgpack.packb(_header(frame, [meta for meta, _ in parts]))
    segments = [memoryview(header), *(data for _, data in parts if len(data))]
    crc, size = 0, 0
    for segment in segments:
        crc, size = zlib.crc32(segment, crc), size + len(segment)
    # All but the copies into messages, which are small beside header and checksum.
    spent = _SPENT.pack(min(_U32, int((time.perf_counter() - begun) * 1e6)))
    prefix = _FIRST.pack(_MAGIC, VERSION, 0, len(header), size, spent, zlib.crc32(spent, crc))
    index = 0
    while True:
        pieces: list[bytes | memoryview] = [prefix]
        room = chunk_bytes - len(prefix)
        while segments and room:
            piece, segments[0] = segments[0][:room], segments[0][room:]
            pieces.append(piece)
            room -= len(piece)
            if not len(segments[0]):
                segments.pop(0)
        yield b"".join(pieces)
        if not segments:
            return
        index += 1
        prefix = _REST.pack(_MAGIC, VERSION, 1, index)


# -- checks ---------------------------------------------------------------------------------------
def _fail(what: str) -> ProtocolError:
    return ProtocolError(f"bad frame: {what}")


def _int(value: object, what: str, most: int = _U63, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _fail(f"{what} is {str(value)[:40]!r}, not an integer from {least} to {most}")
    return value


def _text(value: object, what: str, most: int = 256) -> str:
    if type(value) is not str or len(value) > most:
        raise _fail(f"{what} is not a text of at most {most} characters")
    return value


def _name(value: object, what: str) -> str:
    """A name that is safe wherever it may end up: no separators, no parent folder, no control characters."""
    text = _text(value, what)
    if not text.isprintable() or any(c in text for c in "/\\") or ".." in text:
        raise _fail(f"{what} is no plain name")
    return text


def _float(value: object, what: str) -> float:
    if type(value) not in (int, float) or not isfinite(value):  # type: ignore[arg-type]
        raise _fail(f"{what} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def _list(value: object, what: str, most: int, length: int | None = None) -> list[Any]:
    if type(value) is not list or len(value) > most or (length is not None and len(value) != length):
        wanted = f"{length}" if length is not None else f"at most {most}"
        raise _fail(f"{what} is not a list of {wanted}")
    return value


def _distinct(values: Iterable[int], what: str) -> None:
    seen = list(values)
    if len(set(seen)) != len(seen):
        raise _fail(f"{what} appear twice")


def _error_of(value: object) -> P2PShardError:
    if type(value) is not dict or set(value) != {"code", "message", "details"}:
        raise _fail("error is not {code, message, details}")
    details = value["details"]
    if type(details) is not dict or not set(details) <= {"node", "layers", "stage"}:
        raise _fail("error details are not node, layers, stage")
    if "node" in details:
        _name(details["node"], "node")
    if "layers" in details:
        for layer in _list(details["layers"], "layers", 2, 2):
            _int(layer, "layer", _U32)
    if "stage" in details:
        _int(details["stage"], "stage", _U32)
    return from_wire(
        {
            "code": _name(value["code"], "code"),
            "message": _text(value["message"], "message", _TEXT),
            "details": details,
        }
    )


def _rows(value: object, limits: Limits) -> tuple[RowHeader, ...]:
    rows = []
    for item in _list(value, "rows", limits.chunk_tokens):
        sequence, start, length, output = _list(item, "row", 4, 4)
        row = RowHeader(
            _int(sequence, "sequence", _U64),
            _int(start, "start", limits.context),
            _int(length, "length", limits.chunk_tokens, 1),
            _text(output, "output"),
        )
        if row.start + row.length > limits.context:
            raise _fail(f"row ends at {row.start + row.length}, the context is {limits.context}")
        if row.output not in OUTPUTS:
            raise _fail(f"output {row.output!r} is unknown")
        rows.append(row)
    _distinct((r.sequence for r in rows), "sequences of rows")
    if sum(r.length for r in rows) > limits.chunk_tokens:
        raise _fail(f"rows have more than {limits.chunk_tokens} tokens")
    return tuple(rows)


def _deltas(value: object, limits: Limits) -> Deltas:
    most = limits.sequences
    free, truncate, copy, allocate = _list(value, "deltas", 4, 4)
    blocks_most = limits.blocks - 1
    deltas = Deltas(
        free=tuple(_int(s, "freed sequence", _U64) for s in _list(free, "free", most)),
        truncate=tuple(
            (_int(s, "truncated sequence", _U64), _int(n, "kept blocks", limits.blocks))
            for s, n in (_list(t, "truncate", 2, 2) for t in _list(truncate, "truncate", most))
        ),
        copy=tuple(
            (_int(a, "source block", blocks_most), _int(b, "destination block", blocks_most))
            for a, b in (_list(c, "copy", 2, 2) for c in _list(copy, "copy", limits.blocks))
        ),
        allocate=tuple(
            (
                _int(s, "allocated sequence", _U64),
                tuple(
                    (_int(first, "first block", blocks_most), _int(count, "block count", limits.blocks, 1))
                    for first, count in (_list(r, "run", 2, 2) for r in _list(runs, "runs", limits.blocks))
                ),
            )
            for s, runs in (_list(a, "allocate", 2, 2) for a in _list(allocate, "allocate", most))
        ),
    )
    _distinct(deltas.free, "freed sequences")
    _distinct((s for s, _ in deltas.truncate), "truncated sequences")
    _distinct((s for s, _ in deltas.allocate), "allocated sequences")
    runs = sorted(run for _, runs in deltas.allocate for run in runs)
    end = 0
    for first, count in runs:
        if first < end or first + count > limits.blocks:
            raise _fail("allocated blocks overlap or lie beyond the pool")
        end = first + count
    return deltas


_SAMPLING = tuple(SamplingParams.__dataclass_fields__)
_INTEGERS = frozenset({"top_k", "seed", "logprobs"})


def _admitted(value: object, limits: Limits) -> tuple[Admitted, ...]:
    found = []
    for item in _list(value, "admitted", limits.sequences):
        sequence, prompt_length, settings = _list(item, "admitted", 3, 3)
        settings = _list(settings, "sampling", len(_SAMPLING), len(_SAMPLING))
        named = {
            k: _int(v, k, _U64, -1) if k in _INTEGERS else _float(v, k)
            for k, v in zip(_SAMPLING, settings, strict=True)
        }
        try:
            sampling = SamplingParams(**named)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise _fail(error.message) from error
        found.append(
            Admitted(
                _int(sequence, "admitted sequence", _U64),
                _int(prompt_length, "prompt length", limits.context, 1),
                sampling,
            )
        )
    _distinct((a.sequence for a in found), "admitted sequences")
    return tuple(found)


def _failed(value: object, limits: Limits) -> tuple[tuple[int, P2PShardError], ...]:
    items = (_list(i, "failed", 2, 2) for i in _list(value, "failed", limits.chunk_tokens))
    found = tuple((_int(s, "failed sequence", _U64), _error_of(e)) for s, e in items)
    _distinct((s for s, _ in found), "failed sequences")
    return found


def _tokens(value: object, limits: Limits) -> tuple[SampledToken, ...]:
    found = []
    for item in _list(value, "tokens", limits.chunk_tokens):
        sequence, token, logprob, top = _list(item, "token", 4, 4)
        found.append(
            SampledToken(
                _int(sequence, "sequence", _U64),
                _int(token, "token id", limits.vocab_size - 1),
                _float(logprob, "logprob"),
                tuple(
                    (_int(i, "token id", limits.vocab_size - 1), _float(p, "logprob"))
                    for i, p in (_list(t, "top", 2, 2) for t in _list(top, "top", 20))
                ),
            )
        )
    _distinct((t.sequence for t in found), "sequences of tokens")
    return tuple(found)


_HOP_VALUES = tuple(Hop.__dataclass_fields__)[1:]


def _hops(value: object, limits: Limits) -> tuple[Hop, ...]:
    items = (_list(h, "hop", 6, 6) for h in _list(value, "hops", limits.stages))
    return tuple(
        Hop(
            _int(stage, "stage", limits.stages - 1),
            *(_int(v, name) for v, name in zip(values, _HOP_VALUES, strict=True)),
        )
        for stage, *values in items
    )


def _hello(value: object) -> Hello:
    deployment, plan, manifest, fingerprint, instance, stage, edge = _list(value, "hello", 7, 7)
    hello = Hello(
        _text(deployment, "deployment"),
        _name(plan, "plan digest"),
        _name(manifest, "manifest digest"),
        _name(fingerprint, "fingerprint"),
        _name(instance, "instance"),
        _int(stage, "stage", _U32),
        _name(edge, "edge"),
    )
    if hello.edge not in ("forward", "back"):
        raise _fail(f"edge {hello.edge!r} is neither forward nor back")
    return hello


@dataclass(frozen=True)
class _TensorMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    nbytes: int


def _tensor_metas(value: object, tokens: int, limits: Limits) -> tuple[_TensorMeta, ...]:
    """Each tensor must have exactly the shape that the rows imply."""
    allowed = {"token_ids": ("int32", (tokens,)), "hidden": ("float32", (tokens, limits.hidden_size))}
    found = []
    for item in _list(value, "tensors", len(allowed)):
        if type(item) is not dict or set(item) != {"name", "dtype", "shape", "codec"}:
            raise _fail("tensor is not {name, dtype, shape, codec}")
        name, dtype = _name(item["name"], "tensor name"), _name(item["dtype"], "dtype")
        shape = tuple(_int(n, "dimension") for n in _list(item["shape"], "shape", 8))
        if name not in allowed or (dtype, shape) != allowed[name]:
            raise _fail(f"tensor {name!r} is {dtype} {shape[:8]}, expected {allowed.get(name)}")
        how = codec(_name(item["codec"], "codec"))
        if dtype not in how.dtypes:
            raise _fail(f"codec {how.name} has no {dtype}")
        found.append(_TensorMeta(name, dtype, shape, how.name, how.nbytes(dtype, shape)))
        assert prod(shape) <= limits.payload_bytes
    if len({t.name for t in found}) != len(found):
        raise _fail("a tensor appears twice")
    return tuple(found)


def _decode_header(data: bytes | bytearray, limits: Limits) -> tuple[Frame, tuple[_TensorMeta, ...]]:
    """The frame without its tensors, and what these will be."""
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=_TEXT,
            max_bin_len=0,
            max_array_len=max(64, limits.chunk_tokens, limits.blocks),
            max_map_len=32,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _fail(f"header is not our msgpack ({type(error).__name__})") from error
    if type(value) is not dict:
        raise _fail("header is no map")
    kind = value.get("kind")
    if kind not in KINDS:
        raise _fail(f"kind {str(kind)[:40]!r} is unknown")
    expected = _KEYS[kind] | {"kind", "epoch", "step"}
    if set(value) != expected:
        raise _fail(
            f"header of kind {kind} has keys {str(sorted(set(value) ^ expected))[:100]} too many or too few"
        )
    n, proposer = _list(value["epoch"], "epoch", 2, 2)
    frame = Frame(
        kind, Epoch(_int(n, "epoch", _U64), _name(proposer, "proposer")), _int(value["step"], "step")
    )
    readers: dict[str, Callable[[Any], Any]] = {
        "rows": lambda v: _rows(v, limits),
        "deltas": lambda v: _deltas(v, limits),
        "admitted": lambda v: _admitted(v, limits),
        "failed": lambda v: _failed(v, limits),
        "tokens": lambda v: _tokens(v, limits),
        "hops": lambda v: _hops(v, limits),
        "hello": _hello,
        "error": _error_of,
        "status": lambda v: tuple(_int(x, "status") for x in _list(v, "status", 3, 3)),
    }
    frame = replace(frame, **{k: readers[k](value[k]) for k in _KEYS[kind] - {"tensors"}})
    if kind != "step":
        return frame, ()
    metas = _tensor_metas(value["tensors"], sum(r.length for r in frame.rows), limits)
    if not any(m.name == "token_ids" for m in metas):
        raise _fail("a step has no token_ids")
    if not {s for s, _ in frame.failed} <= {r.sequence for r in frame.rows}:
        raise _fail("a failed sequence has no row")
    return frame, metas


# -- reassembly -----------------------------------------------------------------------------------
class Assembler:
    """Puts one stream's messages together again.

    After a `ProtocolError` it must not be fed again: the stream is out of step. `epoch` set: frames
    of another epoch are refused (set once the hello has been read).
    """

    def __init__(
        self, limits: Limits, *, epoch: Epoch | None = None, kinds: frozenset[str] = frozenset(KINDS)
    ) -> None:
        self._limits = limits
        self.epoch = epoch
        self.kinds = kinds
        """The kinds that this end of the stream may be sent."""
        self._header = bytearray()
        self._payload = bytearray()
        self._header_bytes = self._body_bytes = self._crc = self._filled = self._index = 0
        self._spent = _SPENT.pack(0)
        self._arrived = 0
        self._fed_s = 0.0
        self._frame: Frame | None = None
        self._metas: tuple[_TensorMeta, ...] = ()
        self._open = False

    def feed(self, message: bytes) -> Frame | None:
        """The frame that this message completes, or None when more are to come. Raises `ProtocolError`."""
        begun = time.perf_counter()
        frame = self._take(message)
        self._arrived += len(message)
        self._fed_s += time.perf_counter() - begun
        if frame is None:
            return None
        spent_us = _SPENT.unpack(self._spent)[0] + int(self._fed_s * 1e6)
        frame = replace(frame, arrival=Arrival(self._arrived, spent_us))
        self._arrived, self._fed_s = 0, 0.0
        return frame

    def _take(self, message: bytes) -> Frame | None:
        if len(message) > CHUNK_BYTES or len(message) < _REST.size or message[:2] != _MAGIC:
            raise _fail(f"a message of {len(message)} bytes that is not ours")
        if message[2] != VERSION:
            raise ProtocolError(
                f"the sender speaks frame version {message[2]}, this build {VERSION}; "
                "run the same p2pshard version on both",
                theirs=message[2],
                ours=VERSION,
            )
        data = memoryview(message)[self._begin(message) :]
        if not len(data):
            raise _fail("a message without content")
        if self._frame is None:
            taken = data[: self._header_bytes - len(self._header)]
            self._header += taken
            data = data[len(taken) :]
            if len(self._header) < self._header_bytes:
                return None
            self._parse_header()
        end = self._filled + len(data)
        if end > len(self._payload):
            raise _fail("more bytes than announced")
        self._payload[self._filled : end] = data
        self._filled = end
        return self._finish() if end == len(self._payload) else None

    def _begin(self, message: bytes) -> int:
        """Check the message's prefix against where we are; its size."""
        if message[3] == 1:
            index = _REST.unpack_from(message)[3]
            if not self._open or index != self._index + 1:
                raise _fail(f"part {index} where part {self._index + 1 if self._open else 0} was due")
            self._index = index
            return _REST.size
        if message[3] != 0 or len(message) < _FIRST.size:
            raise _fail("unknown part")
        if self._open:
            raise _fail("a frame begins inside another")
        _, _, _, header, body, spent, crc = _FIRST.unpack_from(message)
        limits = self._limits
        if not 1 <= header <= limits.header_bytes or not 0 <= body - header <= limits.payload_bytes:
            raise _fail(
                f"{header} header and {body - header} payload bytes; "
                f"the plan allows {limits.header_bytes} and {limits.payload_bytes}"
            )
        self._header_bytes, self._body_bytes, self._crc, self._index, self._open = header, body, crc, 0, True
        self._spent = spent
        return _FIRST.size

    def _parse_header(self) -> None:
        frame, self._metas = _decode_header(bytes(self._header), self._limits)
        if self.epoch is not None and frame.epoch != self.epoch:
            raise ProtocolError(
                f"a frame of epoch ({frame.epoch.n}, {frame.epoch.proposer}), this stream is of "
                f"({self.epoch.n}, {self.epoch.proposer})"
            )
        if frame.kind not in self.kinds:
            raise _fail(f"kind {frame.kind} has no place on this stream now")
        size = sum(m.nbytes for m in self._metas)
        if size != self._body_bytes - self._header_bytes:
            raise _fail(f"tensors need {size} bytes, {self._body_bytes - self._header_bytes} announced")
        self._payload = bytearray(size)
        self._frame = frame

    def _finish(self) -> Frame:
        if zlib.crc32(self._spent, zlib.crc32(self._payload, zlib.crc32(self._header))) != self._crc:
            raise _fail("checksum is wrong")
        frame, offset = self._frame, 0
        assert frame is not None
        arrays = {}
        for meta in self._metas:
            arrays[meta.name] = codec(meta.codec).decode(self._payload, offset, meta.dtype, meta.shape)
            offset += meta.nbytes
        ids = arrays.get("token_ids")
        if ids is not None and ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limits.vocab_size):
            raise _fail(f"a token id outside the vocabulary of {self._limits.vocab_size}")
        frame = replace(frame, token_ids_T=ids, hidden_TD=arrays.get("hidden"))
        self._header, self._payload, self._frame, self._metas = bytearray(), bytearray(), None, ()
        self._filled, self._open = 0, False
        return frame
