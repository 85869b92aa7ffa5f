"""The ``p2pshard`` command: one file per verb."""

from __future__ import annotations

from p2pshard.cli.main import main

__all__ = ["main"]
