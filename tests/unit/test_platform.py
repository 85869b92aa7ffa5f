"""Limits that the system sets a daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits of POSIX systems")


def limited(soft: int, hard: int, program: list[str]) -> subprocess.CompletedProcess[str]:
    set_limit = f"import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
    return subprocess.run(
        [
            sys.executable,
            "-c",
            set_limit + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
            *program,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_daemon_takes_the_open_files_it_may_have() -> None:
    program = (
        "import resource; from p2pshard_node.platform import raise_file_limit; "
        "print(raise_file_limit(600), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert limited(100, 400, ["-c", program]).stdout == "400 (400, 400)\n"
    assert limited(100, 1000, ["-c", program]).stdout == "600 (600, 1000)\n"
    assert limited(800, 1000, ["-c", program]).stdout == "600 (800, 1000)\n"


def test_a_daemon_without_enough_files_does_not_start(tmp_path: Path) -> None:
    up = ["-m", "p2pshard.cli", "up", "--data-dir", str(tmp_path / "d"), "--no-mdns", "--port", "0"]
    done = limited(64, 64, up)
    assert done.returncode == 2 and "may have 64 files open" in done.stderr and "ulimit -n" in done.stderr
    assert not (tmp_path / "d").exists()
