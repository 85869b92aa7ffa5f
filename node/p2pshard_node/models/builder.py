"""From the files of a model to its manifest: everything is read and hashed once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from p2pshard.errors import ModelCorrupt, ModelNotFound
from p2pshard.models.gguf import GgufModel, GgufTensor, read_gguf
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.models.safetensors import HfModel, SafeTensor, folder_file, read_folder, read_json, text_config
from p2pshard_node.models.files import Signature
from p2pshard_node.models.gguf_config import gguf_config
from p2pshard_node.models.gguf_tokenizer import gguf_tokenizer
from p2pshard_node.models.tokenizer_json import load_tokenizer

__all__ = ["BUILDER_VERSION", "BuiltModel", "build_model"]

BUILDER_VERSION = 1
"""Counts up when the same files would give another manifest."""

_CHUNK = 1 << 20
_MAX_ROPE_BYTES = 1 << 20
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)

Progress = Callable[[int, int], None]
"""(bytes hashed, bytes in all)."""


@dataclass(frozen=True)
class BuiltModel:
    """A manifest and where its content lies on this node."""

    manifest: Manifest
    files: Mapping[Path, Signature]
    """Every file that the manifest came from, as it was (absent ones too: their coming changes the model)."""
    locations: Mapping[str, tuple[Path, int, int]]
    """sha256 → file, offset, bytes."""
    blobs: Mapping[str, bytes]
    """Content that was made here, by sha256: a tokenizer.json built from GGUF metadata."""


def _hash_range(file: BinaryIO, offset: int, nbytes: int, where: str) -> str:
    digest = hashlib.sha256()
    file.seek(offset)
    left = nbytes
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            raise ModelCorrupt(f"{where}: ended {left} bytes early while it was read")
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def _hash_tensors(
    tensors: Sequence[GgufTensor | SafeTensor], progress: Progress | None
) -> tuple[tuple[TensorEntry, ...], dict[str, tuple[Path, int, int]]]:
    """Entries in the order of the files' indexes; files are read front to back."""
    total, done = sum(t.nbytes for t in tensors), 0
    hashes: dict[str, str] = {}
    locations: dict[str, tuple[Path, int, int]] = {}
    for path in dict.fromkeys(t.path for t in tensors):
        with open(path, "rb", buffering=0) as file:
            for tensor in sorted((t for t in tensors if t.path == path), key=lambda t: t.offset):
                sha256 = _hash_range(file, tensor.offset, tensor.nbytes, str(path))
                hashes[tensor.name] = sha256
                locations.setdefault(sha256, (path, tensor.offset, tensor.nbytes))
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
    entries = tuple(TensorEntry(t.name, t.dtype, t.shape, t.nbytes, hashes[t.name]) for t in tensors)
    return entries, locations


def build_model(path: Path, progress: Progress | None = None) -> BuiltModel:
    """Read a ``.gguf`` file (any part of a split one) or a Hugging Face folder.

    Raises:
        ModelNotFound: nothing at that path.
        ModelCorrupt, UnsupportedModel: as the readers say; also when a file changes while it is read.
    """
    if not path.exists():
        raise ModelNotFound(f"no model at {path}: there is no such file or folder")
    if path.is_dir():
        return _build_folder(path, progress)
    return _build_gguf(path, progress)


def _unchanged(files: Mapping[Path, Signature]) -> None:
    for path, before in files.items():
        if Signature.of(path) != before:
            raise ModelCorrupt(f"{path}: changed while it was read; try again when it is complete")


# -- GGUF -----------------------------------------------------------------------------------------
def _floats(model: GgufModel, name: str) -> np.ndarray:
    tensor = next((t for t in model.tensors if t.name == name), None)
    if tensor is None or tensor.dtype != "F32" or tensor.nbytes > _MAX_ROPE_BYTES:
        raise ModelCorrupt(f"{model.paths[0]}: {name} is missing or not a small F32 tensor")
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    return np.frombuffer(data, "<f4")


def _build_gguf(path: Path, progress: Progress | None) -> BuiltModel:
    model = read_gguf(path)
    files = {p: Signature.of(p) for p in model.paths}
    config = gguf_config(model, lambda name: _floats(model, name))
    tokenizer = gguf_tokenizer(model)
    config["bos_token_id"] = tokenizer.tokens["bos_id"]
    config["eos_token_id"] = tokenizer.tokens["eos_ids"] or None
    config["pad_token_id"] = None  # a class's default may lie outside this vocabulary
    entries, locations = _hash_tensors(model.tensors, progress)
    data = tokenizer.json.encode()
    sha256 = hashlib.sha256(data).hexdigest()
    _unchanged(files)
    manifest = Manifest(
        format="gguf",
        config=config,
        tensors=entries,
        tokenizer=sha256,
        chat_template=tokenizer.chat_template,
        tokens=tokenizer.tokens,
        blobs={sha256: len(data)},
    )
    return BuiltModel(manifest, files, locations, {sha256: data})


# -- Hugging Face folders -------------------------------------------------------------------------
def _build_folder(folder: Path, progress: Progress | None) -> BuiltModel:
    model = read_folder(folder)
    files = {p: Signature.of(p) for p in [*(folder / name for name in _SIDE_FILES), *model.paths]}
    config = text_config(model.config)
    path = folder_file(folder, "tokenizer.json")
    data = path.read_bytes() if path is not None else b""
    tokens = _folder_tokens(model, config, data)
    entries, locations = _hash_tensors(model.tensors, progress)
    blobs: dict[str, int] = {}
    sha256 = ""
    if path is not None:
        files[path] = Signature.of(path)
        sha256 = hashlib.sha256(data).hexdigest()
        blobs[sha256] = len(data)
        locations.setdefault(sha256, (path, 0, len(data)))
    _unchanged(files)
    manifest = Manifest(
        format="safetensors",
        config=config,
        tensors=entries,
        tokenizer=sha256,
        chat_template=_folder_template(folder),
        tokens=tokens,
        blobs=blobs,
    )
    return BuiltModel(manifest, files, locations, {})


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _folder_tokens(model: HfModel, config: Mapping[str, Any], tokenizer_json: bytes) -> dict[str, Any]:
    generation = read_json(model.folder, "generation_config.json") or {}
    settings = read_json(model.folder, "tokenizer_config.json") or {}
    tokenizer = None
    if tokenizer_json:
        tokenizer = load_tokenizer(tokenizer_json, str(model.folder / "tokenizer.json"))

    def spelled(name: str) -> str | None:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def numbered(token: str | None, key: str) -> list[int]:
        found = tokenizer.token_to_id(token) if tokenizer is not None and token is not None else None
        return [found] if found is not None else _ids(config.get(key)) + _ids(generation.get(key))

    bos = next(iter(numbered(spelled("bos_token"), "bos_token_id")), None)
    ends = numbered(spelled("eos_token"), "eos_token_id")
    ends += _ids(generation.get("eos_token_id")) + _ids(config.get("eos_token_id"))
    add_bos = settings.get("add_bos_token")
    if tokenizer is not None and not isinstance(add_bos, bool):
        # Where nothing is said, the tokenizer's own post-processor decides.
        add_bos = bos is not None and tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]

    def token(name: str, index: int | None) -> str | None:
        if (text := spelled(name)) is not None or tokenizer is None or index is None:
            return text
        return tokenizer.id_to_token(index)

    return {
        "eos_ids": sorted(set(ends)),
        "bos_id": bos,
        "add_bos": bool(add_bos) and bos is not None,
        "bos_token": token("bos_token", bos),
        "eos_token": token("eos_token", ends[0] if ends else None),
        "pad_token": spelled("pad_token"),
    }


def _folder_template(folder: Path) -> str:
    """The chat template: its own file, else of tokenizer_config.json; empty when there is none."""
    path = folder_file(folder, "chat_template.jinja")
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelCorrupt(
                f"{folder / 'chat_template.jinja'}: cannot be read as text: {error}"
            ) from error
    value = (read_json(folder, "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
