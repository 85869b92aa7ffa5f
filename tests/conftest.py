"""For every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import platformdirs

# A shell starts its background jobs with SIGINT ignored, and children inherit that: tests that interrupt a process
# would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Daemons that tests start have data folders of their own; kernels need not be compiled again for each.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(platformdirs.user_cache_dir("p2pshard")) / "kernels"))
