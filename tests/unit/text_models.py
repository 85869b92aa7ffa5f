"""Tokenizer and template of the downloaded models, without their tensors."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
from p2pshard_node.gateway.tokenizer import TextModel
from p2pshard_node.models.gguf_tokenizer import gguf_tokenizer

from p2pshard.models.gguf import read_gguf
from p2pshard.models.manifest import Manifest


def model_path(name: str) -> Path:
    """The file of a named model; skips the test where it was not downloaded."""
    import platformdirs

    folder = os.environ.get("P2PSHARD_MODELS_DIR") or Path(platformdirs.user_data_dir("p2pshard")) / "models"
    path = Path(folder) / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is not there; p2pshard pull {name}")
    return path


@lru_cache(maxsize=4)
def text_model(name: str) -> TextModel:
    made = gguf_tokenizer(read_gguf(model_path(name)))
    manifest = Manifest("gguf", {}, (), "0" * 64, chat_template=made.chat_template, tokens=made.tokens)
    return TextModel(manifest, made.json.encode())
