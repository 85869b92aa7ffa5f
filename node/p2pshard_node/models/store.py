"""All model content on this node, by its hash: files of the user's, and what came from other nodes.

Under ``data_dir`` (mode 0700): ``models/paths.json`` (paths that a client of this machine gave),
``models/manifests/DIGEST.json``, ``models/index/…`` (what was hashed already, with the files' signatures),
``models/blobs/SHA256`` (tokenizers that we built) and ``cache/tensors/SHA256`` (fetched, bounded).

A model is its digest. A name only finds files of this node: under the model roots, or a path given before by
a client of this machine; nothing that comes from another node is ever looked up by a name or a path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pshard.config import TENSOR_CACHE
from p2pshard.errors import InvalidRequest, ModelCorrupt, ModelNotFound, P2PShardError, Refused
from p2pshard.json_text import parse_json
from p2pshard.models.catalogue import CATALOGUE
from p2pshard.models.dtypes import refuse_storage, tensor_nbytes
from p2pshard.models.gguf import split_paths
from p2pshard.models.manifest import Manifest, TensorEntry
from p2pshard.models.reference import parse_reference
from p2pshard.private_files import write_private
from p2pshard_node.models.builder import BUILDER_VERSION, BuiltModel, Progress, build_model
from p2pshard_node.models.cache import BlobWriter, TensorCache, check_sha256
from p2pshard_node.models.files import Signature, make_private_dir

__all__ = ["Blob", "ModelStore", "Resolved"]

CHUNK = 256 * 1024
"""Bytes of one piece of `ModelStore.read`."""
_MAX_MANIFEST = 64 * 2**20
_MAX_PATHS = 1_000
_KEPT_MANIFESTS = 8

_log = logging.getLogger("p2pshard.models")


@dataclass(frozen=True)
class Resolved:
    """A model that this node has."""

    name: str
    manifest: Manifest
    path: Path | None
    """Its file or folder here."""


@dataclass(frozen=True)
class Blob:
    """Where content lies on this node."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Indexed:
    """A model whose files were hashed, and what tells that they are the same still."""

    name: str
    path: Path
    digest: str
    files: Mapping[Path, Signature]
    locations: Mapping[str, Blob]

    def changed(self) -> Path | None:
        """A file that is not what was hashed."""
        return next((p for p, s in self.files.items() if Signature.of(p) != s), None)

    def to_bytes(self) -> bytes:
        order = {p: i for i, p in enumerate(self.files)}
        return json.dumps(
            {
                "version": BUILDER_VERSION,
                "name": self.name,
                "path": str(self.path),
                "digest": self.digest,
                "files": [[str(p), s.size, s.mtime_ns, s.inode] for p, s in self.files.items()],
                "locations": {sha: [order[b.path], b.offset, b.nbytes] for sha, b in self.locations.items()},
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Indexed | None:
        """None: written by another version, or damaged; hashing again repairs it."""
        try:
            value = parse_json(data)
            if value["version"] != BUILDER_VERSION:
                return None
            paths = [Path(row[0]) for row in value["files"]]
            return cls(
                name=value["name"],
                path=Path(value["path"]),
                digest=check_sha256(value["digest"]),
                files={p: Signature(*row[1:]) for p, row in zip(paths, value["files"], strict=True)},
                locations={
                    check_sha256(sha): Blob(paths[i], offset, nbytes)
                    for sha, (i, offset, nbytes) in value["locations"].items()
                },
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, P2PShardError) as error:
            _log.warning("index of a model cannot be read, its files will be hashed again: %s", error)
            return None

    @classmethod
    def of(cls, built: BuiltModel, path: Path, name: str) -> _Indexed:
        locations = {sha: Blob(*place) for sha, place in built.locations.items()}
        return cls(name, path, built.manifest.digest, dict(built.files), locations)


class ModelStore:
    """Blocking and thread-safe; the daemon calls it in threads."""

    def __init__(self, data_dir: Path, roots: Sequence[Path], *, cache_bytes: int = TENSOR_CACHE) -> None:
        """
        Args:
            data_dir: the daemon's own folder.
            roots: folders in which names are looked up; need not exist.
            cache_bytes: bound of what is kept of other nodes' tensors.
        """
        self._roots = tuple(Path(os.path.abspath(r)) for r in roots)
        base = make_private_dir(Path(os.path.abspath(data_dir))) / "models"
        self._paths_file = make_private_dir(base) / "paths.json"
        self._manifests = make_private_dir(base / "manifests")
        self._index = make_private_dir(base / "index")
        self._blobs = make_private_dir(base / "blobs")
        self._lock = threading.RLock()
        self._building = threading.Lock()
        self._known: OrderedDict[str, Manifest] = OrderedDict()
        self._models: dict[Path, _Indexed] = {}
        self._sources: dict[Path, frozenset[str]] = {}
        self._cache = TensorCache(make_private_dir(data_dir / "cache") / "tensors", cache_bytes, self._pinned)
        for entry in sorted(self._index.glob("*.json")):
            indexed = _Indexed.from_bytes(entry.read_bytes())
            if indexed is None:
                entry.unlink(missing_ok=True)
            else:
                self._models[indexed.path] = indexed

    # -- names and paths --------------------------------------------------------------------------
    def resolve(self, ref: str, *, local_client: bool, progress: Progress | None = None) -> Resolved:
        """The model that a reference means on this node; hashes its files when that was not done yet.

        Args:
            ref: a name, or an absolute path.
            local_client: the reference comes from this machine's user: only then may it be a path, which is
                remembered, so that its name finds it later.
            progress: (bytes hashed, bytes in all).

        Raises:
            ModelNotFound, ModelCorrupt, UnsupportedModel, InvalidRequest; Refused: a path from elsewhere.
        """
        reference = parse_reference(ref)
        if reference.path is None:
            path = self._find(reference.name)
        elif not local_client:
            raise Refused(
                f"{ref!r} is a path: files are read only for clients on this machine. "
                "Use the model's name, or run the command there"
            )
        else:
            path = reference.path
            if path.suffix.lower() == ".gguf":
                path = split_paths(path)[0]
        resolved = self._resolve_path(path, reference.name, progress)
        if reference.path is not None:
            self._register(path)
        return resolved

    def _resolve_path(self, path: Path, name: str, progress: Progress | None) -> Resolved:
        with self._building:  # two clients that ask for one model: hashed once
            indexed = self._models.get(path)
            manifest = None
            if indexed is not None and indexed.changed() is None:
                manifest = self.get(indexed.digest)
                if manifest is not None and manifest.tokenizer and not self.holds(manifest.tokenizer):
                    manifest = None
            if manifest is None:
                manifest = self._build(path, name, progress)
        return Resolved(name, manifest, path)

    def _build(self, path: Path, name: str, progress: Progress | None) -> Manifest:
        built = build_model(path, progress)
        indexed = _Indexed.of(built, path, name)
        for sha256, data in built.blobs.items():
            write_private(self._blobs / sha256, data)
        self._keep(built.manifest, built.manifest.to_bytes())
        key = hashlib.sha256(os.fsencode(path)).hexdigest()
        write_private(self._index / f"{key}.json", indexed.to_bytes())
        with self._lock:
            self._models[path] = indexed
        return built.manifest

    def _find(self, name: str) -> Path:
        """The file or folder of a name."""
        found = [path for path in self._candidates() if self._name(path) == name]
        in_roots = [p for p in found if any(p.is_relative_to(r) for r in self._roots)]
        found = in_roots[:1] or found
        if not found:
            hint = (
                f"get it with `p2pshard pull {name}`"
                if name in CATALOGUE
                else "see `p2pshard ls`, or give its path"
            )
            raise ModelNotFound(f"no model {name!r} on this node; {hint}", model=name)
        if len(found) > 1:
            places = ", ".join(str(p) for p in found)
            raise InvalidRequest(
                f"{len(found)} models are called {name!r}: {places}; give the path", field="model"
            )
        return found[0]

    @staticmethod
    def _name(path: Path) -> str:
        return parse_reference(str(path)).name

    def _candidates(self) -> list[Path]:
        """Models under the roots, then registered paths."""
        found: dict[Path, None] = {}
        for root in self._roots:
            for path in sorted(root.iterdir()) if root.is_dir() else ():
                if not path.resolve().is_relative_to(root.resolve()):
                    continue  # a link out of the root: named by its own path or not at all
                if path.suffix.lower() == ".gguf" and path.is_file():
                    if split_paths(path)[0] == path:
                        found[path] = None
                elif (path / "config.json").is_file():
                    found[path] = None
        for path in self._registered():
            if path.exists():
                found[path] = None
        return list(found)

    def _registered(self) -> list[Path]:
        try:
            value = parse_json(self._paths_file.read_bytes())
            return [Path(p) for p in value if isinstance(p, str) and os.path.isabs(p)][:_MAX_PATHS]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            _log.warning("%s cannot be read, registered models are forgotten: %s", self._paths_file, error)
            return []

    def _register(self, path: Path) -> None:
        if any(path.parent == root for root in self._roots):
            return
        with self._lock:
            paths = self._registered()
            if path not in paths:
                kept = [p for p in paths if p.exists()][-_MAX_PATHS + 1 :]
                write_private(self._paths_file, json.dumps([str(p) for p in [*kept, path]]).encode())

    def names(self) -> list[dict[str, Any]]:
        """What this node can resolve: ``{name, size_bytes, digest|None, path}``; None: not hashed yet."""
        rows = []
        for path in self._candidates():
            try:
                parts = split_paths(path) if path.is_file() else tuple(path.glob("*.safetensors"))
                size = sum(p.stat().st_size for p in parts)
                indexed = self._models.get(path)
                digest = indexed.digest if indexed is not None and indexed.changed() is None else None
            except (OSError, P2PShardError) as error:
                _log.warning("model not listed path=%s reason=%s", path, error)
                continue
            rows.append({"name": self._name(path), "size_bytes": size, "digest": digest, "path": str(path)})
        return rows

    def recognise(self, name: str, digest: str) -> bool:
        """See whether a model of that name lies in this node's own folders with that content, and hash it for that if it was
        not: whatever is there need not be fetched. Whether it has that content."""
        try:
            path = self._find(name)
            return self._resolve_path(path, name, None).manifest.digest == digest
        except (P2PShardError, OSError) as error:
            _log.debug("no model %s of ours: %s", name, error)
            return False

    # -- manifests --------------------------------------------------------------------------------
    def get(self, digest: str) -> Manifest | None:
        """The manifest of a digest, when this node has seen it."""
        check_sha256(digest)
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
        try:
            data = (self._manifests / f"{digest}.json").read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            _log.warning("manifest %s was damaged on disk; dropped", digest[:12])
            (self._manifests / f"{digest}.json").unlink(missing_ok=True)
            return None
        return self._remember(Manifest.from_bytes(data))

    def _remember(self, manifest: Manifest) -> Manifest:
        with self._lock:
            self._known[manifest.digest] = manifest
            self._known.move_to_end(manifest.digest)
            while len(self._known) > _KEPT_MANIFESTS:
                self._known.popitem(last=False)
        return manifest

    def _keep(self, manifest: Manifest, data: bytes) -> Manifest:
        write_private(self._manifests / f"{manifest.digest}.json", data)
        return self._remember(manifest)

    def add_manifest(self, data: bytes, digest: str) -> Manifest:
        """Take a manifest that another node sent.

        Raises `ModelCorrupt` unless it is one, in canonical form, with that digest and sizes that agree;
        `UnsupportedModel` for a quantisation that is not read here.
        """
        check_sha256(digest)
        if len(data) > _MAX_MANIFEST:
            raise ModelCorrupt(f"a manifest of {len(data)} bytes, above the limit of {_MAX_MANIFEST}")
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ModelCorrupt(f"manifest {digest[:12]}: what arrived has the hash {found[:12]}")
        manifest = Manifest.from_bytes(data)
        _check_manifest(manifest, digest)
        return self._keep(manifest, data)

    # -- content ----------------------------------------------------------------------------------
    def _locate_file(self, sha256: str) -> tuple[Blob | None, str]:
        """Content in a user's file that is unchanged; else None and why."""
        reason = ""
        with self._lock:
            models = list(self._models.values())
        for indexed in models:
            blob = indexed.locations.get(sha256)
            if blob is None:
                continue
            if Signature.of(blob.path) == indexed.files[blob.path]:
                return blob, ""
            reason = f"{blob.path} changed or vanished after it was hashed; deploy the model again"
        return None, reason

    def _find_blob(self, sha256: str) -> tuple[Blob | None, str]:
        check_sha256(sha256)
        built = self._blobs / sha256
        if built.is_file():
            return Blob(built, 0, built.stat().st_size), ""
        blob, reason = self._locate_file(sha256)
        if blob is None and (cached := self._cache.find(sha256)) is not None:
            return Blob(cached[0], 0, cached[1]), ""
        return blob, reason

    def holds(self, sha256: str) -> bool:
        """This node has that content, unchanged."""
        return self._find_blob(sha256)[0] is not None

    def trouble(self, sha256: str) -> str:
        """Why content that this node had cannot be used; empty when it can, and when this node never had it."""
        return self._find_blob(sha256)[1]

    def locate(self, sha256: str) -> Blob:
        """Where content lies.

        Raises:
            ModelCorrupt: the file that had it changed after it was hashed, and nothing else has it.
            ModelNotFound: this node never had it, or has it no longer.
            ProtocolError: not a hash.
        """
        blob, reason = self._find_blob(sha256)
        if blob is None:
            if reason:
                raise ModelCorrupt(f"content {sha256[:12]}: {reason}", sha256=sha256)
            raise ModelNotFound(f"content {sha256[:12]} is not on this node", sha256=sha256)
        return blob

    def read(self, sha256: str, offset: int = 0) -> Iterator[bytes]:
        """Content from ``offset`` on, in pieces of 256 KiB. Raises as `locate`, also while it is read."""
        blob = self.locate(sha256)
        if not 0 <= offset <= blob.nbytes:
            raise InvalidRequest(f"offset {offset} of content with {blob.nbytes} bytes", field="offset")
        return self._pieces(sha256, blob, offset)

    def _pieces(self, sha256: str, blob: Blob, offset: int) -> Iterator[bytes]:
        fetched = blob.path.parent == self._cache.folder  # its times say when it was used
        with open(blob.path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            file.seek(blob.offset + offset)
            left = blob.nbytes - offset
            while left:
                chunk = file.read(min(CHUNK, left))
                now = os.fstat(file.fileno())
                if not chunk or not (
                    fetched or (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
                ):
                    raise ModelCorrupt(f"content {sha256[:12]}: {blob.path} changed while it was read")
                left -= len(chunk)
                yield chunk

    def writer(self, sha256: str, nbytes: int) -> BlobWriter:
        """Begin or resume fetched content; see `TensorCache.writer` for what is raised."""
        return self._cache.writer(sha256, nbytes)

    def abandon(self, hashes: Set[str]) -> None:
        """No source file will name what was fetched of these: it may be evicted."""
        self._cache.settle(hashes)

    # -- what workers load from -------------------------------------------------------------------
    def _pinned(self) -> frozenset[str]:
        with self._lock:
            for path in [p for p in self._sources if not p.exists()]:
                del self._sources[path]
            return frozenset().union(*self._sources.values())

    def write_source(self, manifest: Manifest, entries: Iterable[TensorEntry], path: Path) -> None:
        """Write the source file of a worker; while it exists, what it names is not evicted.

        Raises as `locate` for content that is missing.
        """
        entries = tuple(entries)
        with self._lock:
            self._sources[path] = frozenset(e.sha256 for e in entries)
        places = {}
        files: dict[str, list[int]] = {}
        for entry in entries:
            blob = self.locate(entry.sha256)
            if blob.nbytes != entry.nbytes:
                raise ModelCorrupt(
                    f"tensor {entry.name!r}: {blob.nbytes} bytes here, the manifest says {entry.nbytes}"
                )
            places[entry.name] = [str(blob.path), blob.offset, blob.nbytes]
            signature = Signature.of(blob.path)
            files[str(blob.path)] = [signature.size, signature.mtime_ns]
        cached = {str(self._cache.folder / e.sha256) for e in entries}
        manifest_path = self._manifests / f"{manifest.digest}.json"
        if not manifest_path.is_file():
            self._keep(manifest, manifest.to_bytes())
        value = {
            "manifest": str(manifest_path),
            "tensors": places,
            # blobs of the cache are touched when used: their time says nothing
            "files": {p: [s[0], None] if p in cached else s for p, s in files.items()},
        }
        write_private(path, json.dumps(value, separators=(",", ":")).encode())
        self._cache.settle({e.sha256 for e in entries})


def _check_manifest(manifest: Manifest, digest: str) -> None:
    """What a node may rely on in a manifest that came from outside."""
    where = f"manifest {digest[:12]}"
    try:
        if manifest.digest != digest:
            raise ModelCorrupt(f"{where}: not in canonical form")
        if manifest.format not in ("gguf", "safetensors") or not isinstance(manifest.config, dict):
            raise ModelCorrupt(f"{where}: format {str(manifest.format)[:40]!r}")
        if not isinstance(manifest.tokens, dict) or not isinstance(manifest.chat_template, str):
            raise ModelCorrupt(f"{where}: its tokens or chat template are of the wrong type")
        if len({t.name for t in manifest.tensors}) != len(manifest.tensors):
            raise ModelCorrupt(f"{where}: two tensors have the same name")
        for tensor in manifest.tensors:
            check_sha256(tensor.sha256)
            if not isinstance(tensor.name, str) or not 1 <= len(tensor.name) <= 1024 or len(tensor.shape) > 8:
                raise ModelCorrupt(f"{where}: tensor {str(tensor.name)[:80]!r} of shape {tensor.shape[:9]}")
            if not all(isinstance(n, int) and 0 <= n <= 2**48 for n in tensor.shape):
                raise ModelCorrupt(f"{where}: tensor {tensor.name!r} has the shape {tensor.shape}")
            if manifest.format == "safetensors":
                refuse_storage(tensor.dtype, tensor.name, where)
            if (
                tensor_nbytes(manifest.format, tensor.dtype, tensor.shape, tensor.name, where)
                != tensor.nbytes
            ):
                raise ModelCorrupt(f"{where}: tensor {tensor.name!r} cannot have {tensor.nbytes} bytes")
        for sha256, nbytes in manifest.blobs.items():
            check_sha256(sha256)
            if not isinstance(nbytes, int) or not 0 <= nbytes <= 2**30:
                raise ModelCorrupt(f"{where}: content {sha256[:12]} of {nbytes} bytes")
        if manifest.tokenizer and manifest.tokenizer not in manifest.blobs:
            raise ModelCorrupt(f"{where}: its tokenizer is not among its blobs")
    except (TypeError, AttributeError) as error:
        raise ModelCorrupt(f"{where}: a field is of the wrong type: {error}") from error
