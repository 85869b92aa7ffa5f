"""What one node's status says, several times a second: run inside a host by `Host.watch`."""

from __future__ import annotations

import json
import sys
import time

from p2pshard import Client
from p2pshard.errors import P2PShardError


def main(address: str) -> None:
    """One line of JSON per answer, with the moment it was asked for: this machine's monotonic clock, one for all hosts."""
    with Client([address]) as client:
        while True:
            asked = time.monotonic()
            try:
                status = client.status()
            except P2PShardError:
                status = {}  # a line all the same: nothing is what it says now
            print(json.dumps({"asked": asked, **status}), flush=True)
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
