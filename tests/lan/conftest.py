"""The lab's fixtures, and where the real models are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from tests.lan.lab import Lab, unavailable


def models_dir() -> Path:
    return Path(os.environ.get("P2PSHARD_MODELS_DIR") or platformdirs.user_data_path("p2pshard") / "models")


def model_file(name: str) -> Path:
    path = models_dir() / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the models directory: p2pshard pull {name}")
    return path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Lab(tmp_path, hidden=[models_dir()]) as lab:
        yield lab


@pytest.fixture
def smollm2() -> Path:
    return model_file("smollm2-135m-instruct")


@pytest.fixture
def qwen() -> Path:
    return model_file("qwen2.5-coder-1.5b-instruct")
