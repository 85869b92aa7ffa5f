"""The lab's fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lan.lab import Lab, unavailable
from tests.published import model_file, models_dir


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
