"""Run the demo and save what it printed as docs/demo.svg, the picture in the README.

.venv/bin/python docs/record_demo.py
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import demo  # noqa: E402  # a script beside this folder


def main() -> int:
    signal.signal(signal.SIGTERM, demo.stop)
    console = Console(record=True, width=118, highlight=False, force_terminal=True)
    code = demo.main(console)
    if code == 0:
        console.save_svg(str(HERE / "demo.svg"), title="make demo")
    return code


if __name__ == "__main__":
    sys.exit(main())
