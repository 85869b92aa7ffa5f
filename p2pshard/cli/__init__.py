"""The ``p2pshard`` command: one file per verb."""

from __future__ import annotations

import os

# gRPC's core logs every lost connection to standard error; our errors say it in words
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from p2pshard.cli.app import main

__all__ = ["main"]
