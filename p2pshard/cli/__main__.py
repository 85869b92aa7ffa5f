"""``python -m p2pshard.cli``."""

from __future__ import annotations

from p2pshard.cli.app import main

main()
