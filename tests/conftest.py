"""For every test."""

from __future__ import annotations

import signal

# A shell starts its background jobs with SIGINT ignored, and children inherit that: tests that interrupt a process
# would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
