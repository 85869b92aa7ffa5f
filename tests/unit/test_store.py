"""The store: identity by content, nothing outside the roots, change noticed, fetched content verified."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from p2pshard_node.engine.source import TensorSource
from p2pshard_node.models.store import ModelStore
from p2pshard_node.models.tokenizer_json import load_tokenizer

from p2pshard.errors import (
    Conflict,
    DoesNotFit,
    InvalidRequest,
    ModelCorrupt,
    ModelNotFound,
    P2PShardError,
    ProtocolError,
    Refused,
    UnsupportedModel,
)
from p2pshard.models.layout import needed_tensors
from p2pshard.models.manifest import Manifest
from tests.tiny import write_tokenizer
from tests.unit.gguf_files import TINY_LLAMA, tiny_llama_tensors, write_gguf
from tests.unit.test_models_safetensors import write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", tiny_llama_tensors(), TINY_LLAMA)
    return folder


def store_of(tmp_path: Path, root: Path, name: str = "a", **options: Any) -> ModelStore:
    return ModelStore(tmp_path / name, [root], **options)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: ModelStore, data: bytes) -> str:
    writer = store.writer(sha(data), len(data))
    writer.write(data)
    writer.finish()
    writer.close()
    return sha(data)


# -- what a name finds ----------------------------------------------------------------------------
def test_hashes_are_those_of_the_files_bytes(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    resolved = store.resolve("tiny", local_client=False)
    data = (root / "tiny.gguf").read_bytes()
    for tensor in resolved.manifest.tensors:
        blob = store.locate(tensor.sha256)
        assert sha(data[blob.offset : blob.offset + blob.nbytes]) == tensor.sha256
        assert b"".join(store.read(tensor.sha256)) == data[blob.offset : blob.offset + blob.nbytes]
    assert store.holds(resolved.manifest.tokenizer)
    assert resolved.manifest.config["eos_token_id"] == [260]


def test_hashed_once_also_across_restarts(tmp_path: Path, root: Path) -> None:
    calls: list[tuple[int, int]] = []
    store = store_of(tmp_path, root)
    first = store.resolve("tiny", local_client=False, progress=lambda *c: calls.append(c))
    assert calls[-1][0] == calls[-1][1] == first.manifest.tensor_bytes
    calls.clear()
    for again in (store, store_of(tmp_path, root)):
        assert again.resolve("tiny", local_client=False, progress=lambda *c: calls.append(c)) == first
        assert again.names() == [
            {
                "name": "tiny",
                "size_bytes": (root / "tiny.gguf").stat().st_size,
                "digest": first.manifest.digest,
                "path": str(root / "tiny.gguf"),
            }
        ]
    assert not calls


def test_the_digest_is_the_identity_not_the_name(tmp_path: Path, root: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "tiny.gguf", tiny_llama_tensors(seed=1), TINY_LLAMA)
    shutil.copy(root / "tiny.gguf", other / "copy.gguf")
    ours, theirs = store_of(tmp_path, root, "a"), store_of(tmp_path, other, "b")
    one, two = ours.resolve("tiny", local_client=False), theirs.resolve("tiny", local_client=False)
    assert one.manifest.digest != two.manifest.digest
    assert theirs.resolve("copy", local_client=False).manifest.digest == one.manifest.digest
    assert not ours.holds(two.manifest.tensors[0].sha256)


def test_paths_are_for_clients_of_this_machine(tmp_path: Path, root: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (root / "tiny.gguf").rename(away / "mine.gguf")
    store = store_of(tmp_path, root)
    with pytest.raises(Refused, match="this machine"):
        store.resolve(str(away / "mine.gguf"), local_client=False)
    with pytest.raises(ModelNotFound, match="mine"):
        store.resolve("mine", local_client=False)
    with pytest.raises(InvalidRequest, match="not absolute"):
        store.resolve("../away/mine.gguf", local_client=True)
    digest = store.resolve(str(away / "mine.gguf"), local_client=True).manifest.digest
    # once given by a client here, its name finds it, for others and after a restart
    assert store_of(tmp_path, root).resolve("mine", local_client=False).manifest.digest == digest
    (away / "mine.gguf").unlink()
    with pytest.raises(ModelNotFound):
        store.resolve("mine", local_client=False)
    assert store.names() == []


def test_a_link_out_of_the_root_is_not_a_name(tmp_path: Path, root: Path) -> None:
    (root / "tiny.gguf").rename(tmp_path / "secret.gguf")
    os.symlink(tmp_path / "secret.gguf", root / "tiny.gguf")
    with pytest.raises(ModelNotFound):
        store_of(tmp_path, root).resolve("tiny", local_client=False)


def test_two_registered_models_of_one_name_must_be_told_apart(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, tmp_path / "none")
    for folder, seed in (("x", 1), ("y", 2)):
        (tmp_path / folder).mkdir()
        path = write_gguf(tmp_path / folder / "m.gguf", tiny_llama_tensors(seed), TINY_LLAMA)
        store.resolve(str(path), local_client=True)
    with pytest.raises(InvalidRequest, match="2 models are called 'm'"):
        store.resolve("m", local_client=False)


def test_a_name_of_the_catalogue_says_how_to_get_it(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ModelNotFound, match="p2pshard pull gemma3-270m"):
        store_of(tmp_path, root).resolve("gemma3-270m", local_client=False)


def test_a_folder_of_several_files(tmp_path: Path, root: Path) -> None:
    folder = write_folder(
        root / "hf", files=3, config={"model_type": "llama", "num_hidden_layers": 1, "eos_token_id": 5}
    )
    write_tokenizer(folder)
    store = store_of(tmp_path, root)
    manifest = store.resolve("hf", local_client=False).manifest
    assert (manifest.format, len(manifest.tensors)) == ("safetensors", 3)
    assert manifest.tokens["eos_ids"] == [5, 258]
    assert manifest.tokens["eos_token"] == "<|im_end|>"
    assert "im_start" in manifest.chat_template
    assert b"".join(store.read(manifest.tokenizer)) == (folder / "tokenizer.json").read_bytes()
    (folder / "chat_template.jinja").write_text("new")
    again = store.resolve("hf", local_client=False).manifest
    assert again.chat_template == "new", "a file that comes later counts, too"
    assert again.digest != manifest.digest


def test_a_tokenizer_that_panics_the_library_is_an_error_like_others(tmp_path: Path, root: Path) -> None:
    bad = b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[["a","a"]]}}'
    for data in (bad, b"{", b"\xff", b""):
        with pytest.raises(ModelCorrupt, match="x: not a tokenizer"):
            load_tokenizer(data, "x")
    folder = write_folder(root / "hf")
    (folder / "tokenizer.json").write_bytes(bad)
    with pytest.raises(ModelCorrupt, match=r"tokenizer\.json"):
        store_of(tmp_path, root).resolve("hf", local_client=False)


# -- change ---------------------------------------------------------------------------------------
def test_a_file_that_changed_is_noticed_before_and_after(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    manifest = store.resolve("tiny", local_client=False).manifest
    tensor = manifest.tensors[3]
    source = tmp_path / "source.json"
    store.write_source(manifest, manifest.tensors, source)
    stream = store.read(manifest.tensors[0].sha256)
    write_gguf(root / "tiny.gguf", tiny_llama_tensors(seed=9), TINY_LLAMA)
    os.utime(root / "tiny.gguf", ns=(1, 1))
    with pytest.raises(ModelCorrupt, match="changed"):
        store.locate(tensor.sha256)
    assert not store.holds(tensor.sha256)
    with pytest.raises(ModelCorrupt, match="changed"):
        TensorSource.open(source)
    del stream
    again = store.resolve("tiny", local_client=False).manifest
    assert again.digest != manifest.digest
    assert store.names()[0]["digest"] == again.digest


def test_a_file_that_changes_while_it_is_sent(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    big = tiny_llama_tensors(vocab=9000)
    write_gguf(root / "big.gguf", big, TINY_LLAMA)
    manifest = store.resolve("big", local_client=False).manifest
    entry = next(t for t in manifest.tensors if t.name == "token_embd.weight")
    stream = store.read(entry.sha256)
    assert len(next(stream)) == 256 * 1024
    with open(root / "big.gguf", "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ModelCorrupt, match="changed while it was read"):
        list(stream)


def test_a_truncated_file_is_refused_whole(tmp_path: Path, root: Path) -> None:
    with open(root / "tiny.gguf", "r+b") as file:
        file.truncate((root / "tiny.gguf").stat().st_size - 1000)
    with pytest.raises(ModelCorrupt, match="truncated"):
        store_of(tmp_path, root).resolve("tiny", local_client=False)


# -- what comes from other nodes ------------------------------------------------------------------
def test_content_moves_from_node_to_node(tmp_path: Path, root: Path) -> None:
    a, b = store_of(tmp_path, root, "a"), store_of(tmp_path, tmp_path / "none", "b")
    resolved = a.resolve("tiny", local_client=False).manifest
    manifest = b.add_manifest(resolved.to_bytes(), resolved.digest)
    assert b.get(resolved.digest) == manifest == resolved
    wanted = needed_tensors(manifest, 1, 1, False, True)
    for entry in wanted:
        assert not b.holds(entry.sha256)
        with pytest.raises(ModelNotFound):
            b.locate(entry.sha256)
        writer = b.writer(entry.sha256, entry.nbytes)
        for piece in a.read(entry.sha256, writer.offset):
            writer.write(piece)
        writer.finish()
        writer.close()
    source = tmp_path / "b.json"
    b.write_source(manifest, wanted, source)
    with TensorSource.open(source) as tensors:
        assert tensors.names == [e.name for e in wanted]
        for entry in wanted:
            data, found = tensors.read(entry.name)
            assert (sha(bytes(data)), found) == (entry.sha256, entry)
        assert tensors.bytes_read == sum(e.nbytes for e in wanted)
        with pytest.raises(ModelCorrupt, match="not among"):
            tensors.read("blk.0.attn_q.weight")
    with pytest.raises(ModelNotFound):
        b.write_source(manifest, manifest.tensors, tmp_path / "all.json")


def test_a_download_goes_on_where_it_stopped(tmp_path: Path, root: Path) -> None:
    data = os.urandom(300_000)
    first = store_of(tmp_path, root).writer(sha(data), len(data))
    first.write(data[:123_456])
    with pytest.raises(ModelCorrupt, match="123456 of 300000"):
        first.finish()
    first.close()
    store = store_of(tmp_path, root)  # also after a restart
    assert not store.holds(sha(data))
    second = store.writer(sha(data), len(data))
    assert second.offset == 123_456
    second.write(data[second.offset :])
    second.finish()
    second.close()
    second.close()
    assert b"".join(store.read(sha(data), 299_000)) == data[299_000:]
    assert store_of(tmp_path, root).holds(sha(data))


def test_wrong_bytes_are_never_kept(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    name = sha(b"right")
    writer = store.writer(name, 5)
    writer.write(b"wrong")
    with pytest.raises(ModelCorrupt, match="must be fetched again"):
        writer.finish()
    writer.close()
    writer = store.writer(name, 5)
    assert writer.offset == 0
    with pytest.raises(ModelCorrupt, match="more than its 5 bytes"):
        writer.write(b"righteous")
    writer.close()
    assert not store.holds(name)
    assert list((tmp_path / "a" / "cache" / "tensors").iterdir()) == []


def test_one_writer_at_a_time(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    writer = store.writer(sha(b"x"), 1)
    with pytest.raises(Conflict):
        store.writer(sha(b"x"), 1)
    writer.close()
    store.writer(sha(b"x"), 1).close()


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "A" * 64, "0" * 63, "0" * 63 + "/", "", "0" * 64 + "\n"]
)
def test_only_hashes_become_file_names(tmp_path: Path, root: Path, name: str) -> None:
    store = store_of(tmp_path, root)
    for call in (store.holds, store.locate, store.read, store.get, lambda s: store.writer(s, 1)):
        with pytest.raises(ProtocolError):
            call(name)
    with pytest.raises(ProtocolError):
        store.add_manifest(b"{}", name)


def test_manifests_from_outside_are_checked(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    good = store.resolve("tiny", local_client=False).manifest
    with pytest.raises(ModelCorrupt, match="has the hash"):
        store.add_manifest(good.to_bytes() + b" ", good.digest)

    def changed(**change: Any) -> bytes:
        return json.dumps({**good.to_json(), **change}, sort_keys=True, separators=(",", ":")).encode()

    tensor = good.to_json()["tensors"][0]
    bad: list[tuple[bytes, type[P2PShardError]]] = [
        (b"{}", ModelCorrupt),
        (b"\xff", ModelCorrupt),
        (json.dumps(good.to_json()).encode(), ModelCorrupt),  # not in canonical form
        (changed(format="pickle"), ModelCorrupt),
        (changed(config=[]), ModelCorrupt),
        (changed(extra=1), ModelCorrupt),
        (changed(blobs={"../x": 1}, tokenizer=""), ProtocolError),
        (changed(tokenizer="0" * 64), ModelCorrupt),
        (changed(tensors=[tensor, tensor]), ModelCorrupt),
        (changed(tensors=[{**tensor, "nbytes": 2**62}]), ModelCorrupt),
        (changed(tensors=[{**tensor, "shape": [-1, 5]}]), ModelCorrupt),
        (changed(tensors=[{**tensor, "shape": ["a"]}]), ModelCorrupt),
        (changed(tensors=[{**tensor, "name": 7}]), ModelCorrupt),
        (changed(tensors=[{**tensor, "sha256": "../" * 20}]), ProtocolError),
        (changed(tensors=[{**tensor, "sha256": 5}]), ModelCorrupt),
        (changed(tensors=[{**tensor, "dtype": "IQ2_XS"}]), UnsupportedModel),
        (changed(tensors=5), ModelCorrupt),
        (b"[" * 100_000, ModelCorrupt),
    ]
    for data, error in bad:
        with pytest.raises(error):
            store.add_manifest(data, sha(data))
    assert store.add_manifest(good.to_bytes(), good.digest) == good


# -- bounds ---------------------------------------------------------------------------------------
def test_the_cache_is_bounded_and_keeps_what_is_used(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pshard_node.models.cache._FRESH_S", 0.0)
    store = store_of(tmp_path, root, cache_bytes=350)
    blobs = [put(store, bytes([i]) * 100) for i in range(3)]
    store.locate(blobs[0])
    blobs.append(put(store, bytes([3]) * 100))
    assert [store.holds(b) for b in blobs] == [True, False, True, True]


def test_what_a_worker_may_read_is_not_evicted(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pshard_node.models.cache._FRESH_S", 0.0)
    manifest = store_of(tmp_path, root, "a").resolve("tiny", local_client=False).manifest
    entry = manifest.tensors[1]
    a = store_of(tmp_path, root, "a")
    b = store_of(tmp_path, tmp_path / "none", "b", cache_bytes=entry.nbytes + 100)
    put(b, b"".join(a.read(entry.sha256)))
    source = tmp_path / "source.json"
    b.write_source(manifest, [entry], source)
    with pytest.raises(DoesNotFit, match="in use") as refused:
        b.writer(sha(b"x" * 101), 101)
    assert refused.value.details["shortfall_bytes"] == 1
    assert b.holds(entry.sha256)
    source.unlink()
    b.writer(sha(b"x" * 101), 101).close()
    assert not b.holds(entry.sha256)


def test_what_was_just_fetched_waits_for_its_source_file(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root, cache_bytes=150)
    first = put(store, b"a" * 100)
    with pytest.raises(DoesNotFit):
        store.writer(sha(b"b" * 100), 100)
    assert store.holds(first)
    store.abandon({first})  # its load failed: there will be none
    store.writer(sha(b"b" * 100), 100).close()
    assert not store.holds(first)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
def test_all_of_it_is_private(tmp_path: Path, root: Path) -> None:
    os.umask(0o022)
    store = store_of(tmp_path, root)
    manifest = store.resolve("tiny", local_client=False).manifest
    put(store, b"abc")
    store.write_source(manifest, manifest.tensors, tmp_path / "a" / "source.json")
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} {mode:o}"


def test_a_cached_blob_damaged_on_disk_is_dropped(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    name = put(store, b"abcdef")
    (tmp_path / "a" / "cache" / "tensors" / name).write_bytes(b"abc")
    assert not store.holds(name)
    assert put(store, b"abcdef") == name
    assert store.holds(name)


def test_many_threads(tmp_path: Path, root: Path) -> None:
    store = store_of(tmp_path, root)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            manifest = store.resolve("tiny", local_client=False).manifest
            name = put(store, bytes([seed]) * 1000)
            assert b"".join(store.read(name)) == bytes([seed]) * 1000
            store.write_source(manifest, manifest.tensors, tmp_path / f"{seed}.json")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"blk.0.attn_q.weight": ["/nowhere", 0, 16384]}},
        {"tensors": {"blk.0.attn_q.weight": ["FILE", 2**40, 16384]}},
        {"tensors": {"blk.0.attn_q.weight": ["FILE", -1, 16384]}},
        {"tensors": {"blk.0.attn_q.weight": ["FILE", 0, 5]}},
        {"tensors": {"unknown": ["FILE", 0, 5]}},
        {"tensors": 5},
        {"manifest": "/nowhere"},
    ],
)
def test_source_files_are_checked(tmp_path: Path, root: Path, change: dict[str, Any]) -> None:
    store = store_of(tmp_path, root)
    manifest: Manifest = store.resolve("tiny", local_client=False).manifest
    path = tmp_path / "source.json"
    store.write_source(manifest, manifest.tensors, path)
    text = json.dumps({**json.loads(path.read_text()), **change}).replace(
        '"FILE"', json.dumps(str(root / "tiny.gguf"))
    )
    path.write_text(text)
    with pytest.raises(ModelCorrupt):
        TensorSource.open(path)
