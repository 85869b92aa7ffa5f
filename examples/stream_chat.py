"""A conversation whose answers are printed as they arrive, with asyncio. One question a line of input.

python examples/stream_chat.py [MODEL] [--node HOST:PORT]
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from p2pshard import AsyncClient
from p2pshard.errors import P2PShardError


async def converse(client: AsyncClient, model: str) -> None:
    history: list[dict[str, str]] = []
    while question := (await asyncio.to_thread(sys.stdin.readline)).strip():
        history.append({"role": "user", "content": question})
        stream = client.chat(model, history, max_tokens=128)
        async for piece in stream:  # leaving this loop early would cancel the request on every node
            print(piece, end="", flush=True)
        print()
        history.append({"role": "assistant", "content": (await stream).text})


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument(
        "--node", action="append", help="HOST:PORT; default: this machine's, else found by zeroconf"
    )
    options = parser.parse_args()
    try:
        async with AsyncClient(options.node) as client:
            deployment = await client.deploy(options.model)
            await converse(client, deployment.model)
    except P2PShardError as error:
        sys.exit(f"{error.code}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main())
