"""Published models, where they were pulled."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest


def models_dir() -> Path:
    """Where `p2pshard pull` puts them."""
    return Path(os.environ.get("P2PSHARD_MODELS_DIR") or platformdirs.user_data_path("p2pshard") / "models")


def model_file(name: str) -> Path:
    """The file of a named model; skips the test where it was not pulled."""
    path = models_dir() / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the models directory: p2pshard pull {name}")
    return path
