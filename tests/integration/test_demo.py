"""The demo, whole and interrupted: three stages answer, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import platformdirs
import psutil
import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
MODELS = Path(
    os.environ.get("P2PSHARD_MODELS_DIR")
    or platformdirs.user_data_path("p2pshard", appauthor=False) / "models"
)

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (MODELS / "smollm2-135m-instruct.gguf").exists(),
        reason=f"smollm2-135m-instruct is not in {MODELS}",
    ),
]


def ours(folder: Path) -> list[int]:
    """Processes whose temporary directory was below ``folder``."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found


def start(folder: Path) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "TMPDIR": str(folder),
        "P2PSHARD_MODELS_DIR": str(MODELS),
        "COLUMNS": "140",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(DEMO)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


@pytest.mark.slow
def test_the_demo_answers_over_three_stages_and_leaves_nothing(tmp_path: Path) -> None:
    begin = time.monotonic()
    demo = start(tmp_path)
    out, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, out
    assert "30 layers in 3 stages" in out
    assert "Paris" in out
    assert re.search(r"short by [\d,]+ bytes", out)
    assert re.search(r"[\d.]+ tokens/s", out)
    assert re.search(r"found each other by zeroconf in [\d.]+ s", out)
    assert "left behind: no process, no port, no directory" in out
    assert time.monotonic() - begin < 180
    assert list(tmp_path.iterdir()) == []
    assert ours(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo = start(tmp_path)
    assert demo.stdout is not None
    seen = ""
    for line in demo.stdout:
        seen += line
        if "Start three daemons" in line:
            break
    time.sleep(1.5)  # some are up and some are not
    demo.send_signal(number)
    rest, _ = demo.communicate(timeout=60)
    assert demo.returncode == code, seen + rest
    assert "left behind: no process, no port, no directory" in rest
    assert list(tmp_path.iterdir()) == []
    assert ours(tmp_path) == []
