"""Compiling ahead: heard of while it lasts, tried once, and never the end of a load."""

from __future__ import annotations

import subprocess
import sys

import pytest
from p2pshard_node.engine.fused import prepare

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1)"]


def test_it_is_heard_of_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PULSE_S", 0.1)
    pulses: list[None] = []
    prepare._run(SLEEPS, lambda: pulses.append(None))
    assert len(pulses) >= 5


def test_it_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PULSE_S", 0.05)
    monkeypatch.setattr(prepare, "_SECONDS", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        prepare._run([sys.executable, "-c", "import time; time.sleep(60)"], lambda: None)


def test_what_fails_is_a_warning_and_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepare, "_seen_to", set())
    for _ in range(3):
        prepare.prepare("no layout")
    assert len([r for r in caplog.records if "not compiled ahead" in r.message]) == 1
