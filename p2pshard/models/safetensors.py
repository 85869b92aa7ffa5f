"""Index of a Hugging Face model folder: its configuration and where each tensor lies. Reads headers only.

The header of a safetensors file is an 8-byte little-endian length and JSON ``{name: {dtype, shape,
data_offsets}}`` (github.com/huggingface/safetensors, "Format"). Files are material from outside: what a
header claims is checked against the file before it is used.

A folder's files may be links, as the Hugging Face cache makes them (``snapshots/REV/x`` → ``blobs/HASH``):
their targets must lie in the folder itself or in the ``blobs`` folder of the same cached repository. Any
other link, and any file name of an index that leaves the folder, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.json_text import parse_json
from p2pshard.models.dtypes import refuse_storage, tensor_nbytes
from p2pshard.models.layout import layer_of

__all__ = ["HfModel", "SafeTensor", "folder_file", "read_folder", "refuse_quantised", "text_config"]

_MAX_HEADER = 100 * 2**20
_MAX_JSON = 64 * 2**20
_MAX_FILES = 4_096
_MAX_DIMS = 8
_QUANTISED = (".weight_scale_inv", ".weight_scale", ".input_scale", ".qweight", ".qzeros", ".g_idx")


@dataclass(frozen=True)
class SafeTensor:
    """Where one tensor lies."""

    name: str
    dtype: str
    """As the format writes it: ``F32``, ``BF16`` and so on."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class HfModel:
    """A model folder."""

    folder: Path
    config: Mapping[str, Any]
    """config.json as it is."""
    tensors: tuple[SafeTensor, ...]
    """Of the text decoder."""
    paths: tuple[Path, ...]
    """The weight files."""


def folder_file(folder: Path, name: str) -> Path | None:
    """The real path of a file of the folder; None when there is none.

    Raises `ModelCorrupt` when the name or a link leads out of the folder (see the module's text).
    """
    if not name or name != Path(name).name or name in (".", ".."):
        raise ModelCorrupt(f"{folder}: names the file {name!r}, which is not in the folder itself")
    path = folder / name
    if not path.exists():
        if path.is_symlink():
            raise ModelCorrupt(f"{path}: a link to a file that is missing ({os.readlink(path)})")
        return None
    real, home = path.resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(base) for base in allowed):
        raise ModelCorrupt(f"{path}: a link that leaves the model's folder (to {real}); copy the file there")
    if not real.is_file():
        raise ModelCorrupt(f"{path}: not a regular file")
    return real


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON object of the folder; None when the file is absent. Raises `ModelCorrupt`."""
    path = folder_file(folder, name)
    if path is None:
        return None
    size = path.stat().st_size
    if size > _MAX_JSON:
        raise ModelCorrupt(f"{folder / name}: {size} bytes, above the limit of {_MAX_JSON}")
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{folder / name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{folder / name}: not a JSON object")
    return value


def refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    """Raise `UnsupportedModel`, by name, when a configuration says that its weights are quantised."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and (quantisation := part.get("quantization_config")):
            method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
            name = str(method or "an unnamed method").upper()
            raise UnsupportedModel(
                f"{where}: its weights are quantised with {name}, which is not read here; "
                "use the unquantised checkpoint or a GGUF file of the model",
                quantisation=name,
            )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text decoder: ``text_config`` of a multimodal model, else the whole."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    result = dict(inner)
    for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "dtype"):
        if key in config:
            result.setdefault(key, config[key])
    if "model_type" not in result:
        raise ModelCorrupt(f"the text_config of this {config.get('model_type')} model has no model_type")
    return result


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def read_index(path: Path) -> tuple[SafeTensor, ...]:
    """Tensors of one safetensors file.

    Raises:
        ModelCorrupt: a truncated or malformed file.
        UnsupportedModel: a storage type that is not read, by name.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelCorrupt(f"{path}: not safetensors, or truncated: {size} bytes, header of {length}")
            raw = file.read(length)
    except OSError as error:
        raise ModelCorrupt(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = parse_json(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelCorrupt(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    start, tensors = 8 + length, []
    for name, item in header.items():
        tensors.append(_tensor(path, name, item, start))
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            raise ModelCorrupt(f"{path}: tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.nbytes
    if end > size:
        raise ModelCorrupt(f"{path}: truncated: tensors end at byte {end}, the file has {size}; get it again")
    return tuple(tensors)


def _tensor(path: Path, name: str, item: Any, start: int) -> SafeTensor:
    item = item if isinstance(item, dict) else {}
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or len(shape) > _MAX_DIMS
        or not all(_size(n) for n in shape)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_size(n) for n in offsets)
    ):
        raise ModelCorrupt(f"{path}: tensor {name[:200]!r} is described as {str(item)[:200]}")
    nbytes = tensor_nbytes("safetensors", dtype, tuple(shape), name, str(path))
    if offsets[1] - offsets[0] != nbytes:
        raise ModelCorrupt(
            f"{path}: tensor {name!r} of {dtype} {shape} needs {nbytes} bytes, has {offsets[1] - offsets[0]}"
        )
    return SafeTensor(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weight files; and tensor → file where there is an index of several."""
    index = read_json(folder, "model.safetensors.index.json")
    if index is not None:
        weights = index.get("weight_map")
        if (
            not isinstance(weights, dict)
            or not weights
            or not all(isinstance(v, str) for v in weights.values())
        ):
            raise ModelCorrupt(f"{folder / 'model.safetensors.index.json'}: no weight_map in it")
        names = sorted(set(weights.values()))
        if len(names) > _MAX_FILES:
            raise ModelCorrupt(f"{folder}: its index names {len(names)} files; the limit is {_MAX_FILES}")
        return names, weights
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        return ["model.safetensors"], None
    if len(names) > 1:
        raise ModelCorrupt(f"{folder}: {len(names)} safetensors files and no model.safetensors.index.json")
    if not names:
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; {other[0]} is a pickle file, which is never read" if other else ""
        raise ModelCorrupt(f"{folder}: no safetensors files in it{hint}")
    return names, None


def read_folder(folder: Path) -> HfModel:
    """Read configuration and tensor index of a model folder.

    Raises:
        ModelCorrupt: a missing, truncated or malformed file, or one that leads out of the folder.
        UnsupportedModel: weights in a quantisation that is not read, by name.
    """
    config = read_json(folder, "config.json")
    if config is None:
        raise ModelCorrupt(f"{folder}: no config.json in it")
    refuse_quantised(config, str(folder))
    names, weights = _weight_files(folder)
    tensors: list[SafeTensor] = []
    paths: list[Path] = []
    for name in names:
        path = folder_file(folder, name)
        if path is None:
            raise ModelCorrupt(f"{folder / name}: missing; the model's index names it")
        paths.append(path)
        found = read_index(path)
        if weights is not None:
            found = tuple(t for t in found if weights.get(t.name) == name)
        tensors.extend(found)
    if weights is not None and (missing := set(weights) - {t.name for t in tensors}):
        raise ModelCorrupt(
            f"{folder}: {len(missing)} tensors of its index are in no file, as {min(missing)!r}"
        )
    text = tuple(t for t in tensors if layer_of(t.name, "safetensors") is not None)
    for tensor in text:
        if tensor.name.endswith(_QUANTISED):
            raise UnsupportedModel(
                f"{folder}: {tensor.name!r} belongs to quantised weights (FP8, GPTQ or AWQ), not read here; "
                "use the unquantised checkpoint or a GGUF file of the model"
            )
        refuse_storage(tensor.dtype, tensor.name, str(folder))
    if not text:
        raise ModelCorrupt(f"{folder}: no tensors of a text decoder in it")
    return HfModel(folder, config, text, tuple(paths))
