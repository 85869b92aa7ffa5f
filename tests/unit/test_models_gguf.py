"""The GGUF index reader: right on good files, quick and clear on bad ones."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from p2pshard.errors import ModelCorrupt, P2PShardError, UnsupportedModel
from p2pshard.models.dtypes import GGML_TYPES
from p2pshard.models.gguf import read_gguf, split_paths
from tests.unit.gguf_files import TINY_LLAMA, tiny_llama_tensors, write_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    types = {
        "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.Q4_0,
    }
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama_tensors(), TINY_LLAMA, types=types)


def test_agrees_with_the_gguf_package(tiny: Path) -> None:
    ours, theirs = read_gguf(tiny), gguf.GGUFReader(tiny)
    assert [(t.name, t.dtype, t.shape[::-1], t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()), int(t.data_offset), int(t.n_bytes))
        for t in theirs.tensors
    ]
    for key, value in ours.metadata.items():
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs.fields[
            key
        ].contents(), key


def test_block_sizes_are_ggmls() -> None:
    for number, storage in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (storage.name, (storage.block, storage.nbytes))


def test_parts_with_a_first_one_of_metadata_alone(tmp_path: Path) -> None:
    tensors = list(tiny_llama_tensors().items())
    parts = [{}, dict(tensors[:7]), dict(tensors[7:])]
    paths = [tmp_path / f"m-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
        write_gguf(
            path, part, TINY_LLAMA if index == 0 else {}, split=(index, 3, len(tensors)), tokenizer=index == 0
        )
    for given in paths:
        model = read_gguf(given)
        assert model.paths == tuple(paths)
        assert [t.name for t in model.tensors] == [name for name, _ in tensors]
        assert model.metadata["llama.block_count"] == 2
    paths[1].rename(tmp_path / "away.gguf")
    with pytest.raises(ModelCorrupt, match=r"1 of 3 files missing.*00002-of-00003"):
        read_gguf(paths[0])
    paths[2].rename(paths[1])
    (tmp_path / "away.gguf").rename(paths[2])
    with pytest.raises(ModelCorrupt, match="says it is part 2"):
        read_gguf(paths[0])


def test_part_alone_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_tensors(), TINY_LLAMA, split=(0, 2, 40))
    with pytest.raises(ModelCorrupt, match="one of 2 parts"):
        read_gguf(path)


def test_impossible_part_number(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="part 4 of 3"):
        split_paths(tmp_path / "m-00004-of-00003.gguf")


def test_a_file_of_the_other_form_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ModelCorrupt, match=f"given by its folder: {tmp_path}"):
        read_gguf(tmp_path / "model.safetensors")


def test_truncation_is_seen_by_size(tiny: Path) -> None:
    data = tiny.read_bytes()
    for size in (0, 3, 24, 200, len(data) // 2, len(data) - 1):
        tiny.write_bytes(data[:size])
        with pytest.raises(ModelCorrupt, match=r"tiny\.gguf.*(truncated|not a GGUF)"):
            read_gguf(tiny)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (16, "IQ2_XXS"),
        (20, "IQ4_NL"),
        (23, "IQ4_XS"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (77, "number 77"),
    ],
)
def test_other_quantisations_are_refused_by_name(tiny: Path, number: int, name: str) -> None:
    data = tiny.read_bytes()
    head = struct.pack("<Q", 17) + b"token_embd.weight" + struct.pack("<IQQ", 2, 64, 262)
    at = data.index(head) + len(head)
    tiny.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
    with pytest.raises(UnsupportedModel, match=f"token_embd.weight.*{name}"):
        read_gguf(tiny)


def test_other_versions_and_byte_orders(tiny: Path) -> None:
    data = tiny.read_bytes()
    for version, words in ((1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")):
        tiny.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        with pytest.raises(UnsupportedModel, match=words):
            read_gguf(tiny)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<QQ", 2**63, 0),
        struct.pack("<QQ", 0, 2**40),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62) + b"key",
        struct.pack("<QQ", 0, 1) + _string(b"k") + struct.pack("<I", 8) + struct.pack("<Q", 2**50),
        struct.pack("<QQ", 0, 1) + _string(b"k") + struct.pack("<IIQ", 9, 4, 2**61),
        struct.pack("<QQ", 0, 1) + _string(b"k") + struct.pack("<IIQ", 9, 8, 2**61),
        struct.pack("<QQ", 0, 1) + _string(b"k") + struct.pack("<IIQ", 9, 9, 1),
        struct.pack("<QQ", 0, 1) + _string(b"k") + struct.pack("<I", 99),
        struct.pack("<QQ", 0, 1) + _string(b"\xff\xfe") + struct.pack("<II", 4, 1),
        struct.pack("<QQ", 0, 2) + 2 * (_string(b"k") + struct.pack("<II", 4, 1)),
        struct.pack("<QQ", 1, 0) + _string(b"t") + struct.pack("<I", 2**31),
        struct.pack("<QQ", 1, 0) + _string(b"t") + struct.pack("<IQQIQ", 2, 2**47, 2**47, 0, 0),
        struct.pack("<QQ", 1, 0) + _string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0),
        struct.pack("<QQ", 1, 0) + _string(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0),
        struct.pack("<QQ", 1, 0) + _string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1),
        struct.pack("<QQ", 2, 0) + 2 * (_string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)),
        struct.pack("<QQ", 1, 1)
        + _string(b"general.alignment")
        + struct.pack("<II", 4, 3)
        + _string(b"t")
        + struct.pack("<IQIQ", 1, 8, 0, 0),
    ],
)
def test_claims_that_cannot_be(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body + bytes(4096))
    tracemalloc.start()
    with pytest.raises(ModelCorrupt, match=r"bad\.gguf"):
        read_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


def test_mutated_headers_give_typed_errors_only(tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    header = min(t.offset for t in read_gguf(tiny).tensors)
    chance = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    start = time.monotonic()
    for _ in range(1500):
        mutated = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(header)
            kind = chance.randrange(3)
            if kind == 0:
                mutated[at] = chance.randrange(256)
            elif kind == 1:
                mutated[at : at + 8] = struct.pack(
                    "<Q", chance.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
                )
            else:
                del mutated[at : at + chance.randint(1, 64)]
        tiny.write_bytes(mutated)
        try:
            read_gguf(tiny)
            outcomes["read"] += 1
        except P2PShardError as error:
            assert isinstance(error, ModelCorrupt | UnsupportedModel)
            assert "tiny.gguf" in error.message
            outcomes["refused"] += 1
    assert outcomes["refused"] > 500
    assert time.monotonic() - start < 60
