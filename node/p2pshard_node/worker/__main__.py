"""``python -m p2pshard_node.worker --control-fd N``: started by the daemon, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket

from p2pshard_node.platform import die_with_parent
from p2pshard_node.worker.process import WorkerProcess
from p2pshard_node.worker.protocol import ControlChannel


async def _serve(descriptor: int) -> None:
    control = socket.socket(fileno=descriptor)
    control.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=control)
    await WorkerProcess(ControlChannel(reader, writer)).run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m p2pshard_node.worker")
    parser.add_argument(
        "--control-fd", type=int, required=True, help="inherited end of the daemon's socket pair"
    )
    arguments = parser.parse_args()
    logging.basicConfig(
        level=os.environ.get("P2PSHARD_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname)s worker[{os.getpid()}] %(name)s: %(message)s",
    )
    die_with_parent()  # where the system can; the control channel's end does it everywhere
    # Ctrl-C reaches the whole terminal group; the daemon decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(arguments.control_fd))
    # A computation may be under way on its thread; nothing of it is wanted, and it must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
