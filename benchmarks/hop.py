"""What a token costs beside its computation: two stages as real workers, a core each, one stream of a tiny model.

    python benchmarks/hop.py [--tokens 400] [--rounds 5] [--hidden 64] [--stages 2] [--json]

Prints medians and p95 per token: the interval at the gateway, each stage's parts of it as the driver's trace tells them
and, per edge, all that no stage computed or sampled (queues, hand-offs between threads, serialising, gRPC, the driver).
Below them what the parts cost alone on this machine: encoding and decoding of such a frame, a bare gRPC stream between
two processes pinned alike, a bare TCP connection. Other processes on the same cores show in all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from p2pshard.planning.plan import Epoch
from p2pshard.trace import Spread
from p2pshard.transport.channels import EOF, add_raw_methods, bind, make_channel, make_server, raw_stream
from p2pshard.transport.frames import Assembler, Frame, Hop, Limits, RowHeader, encode
from tests.tiny import write_tiny_llama
from tests.worker_lab import make_plan, ring

PROMPT = [1, 2, 3, 4]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--echo", choices=("grpc", "tcp"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo == "grpc":
        asyncio.run(serve_grpc())
    elif options.echo == "tcp":
        serve_tcp()
    else:
        report = asyncio.run(measure(options))
        print(json.dumps(report, indent=1) if options.json else text_of(report))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    pins = [cores[i % len(cores)] for i in range(options.stages)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "tiny", layers=options.stages, hidden=options.hidden)

        def plan_of(manifest: str, layers: int) -> Any:
            return make_plan(manifest, layers, options.stages, context=max(512, options.tokens + 64))

        async with ring(model, Path(folder), plan_of, cores=pins) as made, made.gateway() as gateway:
            await gateway.generate("warm", PROMPT, 50)
            rounds = []
            for number in range(options.rounds):
                await asyncio.sleep(1.1)  # a pause begins a new window of the driver's trace
                name = f"r{number}"
                await gateway.generate(name, PROMPT, options.tokens)
                at = [t for request, t in gateway.order if request == name]
                trace = (await made.workers[0].stats())["step"]["trace"]["decode"]
                gaps = Spread.of((b - a) * 1e3 for a, b in itertools.pairwise(at))
                rounds.append(parts_of(trace, gaps))
    os.sched_setaffinity(0, {pins[0]})
    frame = decode_frame(options.hidden)
    alone = {
        "encode_ms": timed(lambda: b"".join(encode(frame))),
        "decode_ms": decoding(frame, options.hidden),
        "grpc_round_trip_ms": await grpc_round_trip(frame, pins[-1]),
        "tcp_round_trip_ms": tcp_round_trip(len(b"".join(encode(frame))), pins[-1]),
    }
    return {
        "stages": options.stages,
        "hidden": options.hidden,
        "tokens": options.tokens,
        "per_token": {key: median_of(r[key] for r in rounds) for key in rounds[0]},
        "alone": alone,
    }


def parts_of(trace: dict[str, Any], gaps: Spread) -> dict[str, dict[str, float]]:
    """One round: milliseconds a token."""
    stages = trace["stages"]

    def total(*keys: str) -> dict[str, float]:
        return {m: sum(s[k][m] for s in stages for k in keys) for m in ("median", "p95")}

    worked = total("compute_ms", "sample_ms")["median"]
    return {
        "interval": {"median": gaps.median, "p95": gaps.p95},
        "compute": total("compute_ms"),
        "sample": total("sample_ms"),
        "queue": total("queue_ms"),
        "serialise": total("serialise_ms"),
        "wire_and_hand_off": {m: trace["wire_ms"][m] * len(stages) for m in ("median", "p95")},
        "outside_per_hop": {m: (v - worked) / len(stages) for m, v in vars(gaps).items()},
    }


def median_of(parts: Any) -> dict[str, float]:
    parts = list(parts)
    return {m: round(statistics.median(p[m] for p in parts), 3) for m in ("median", "p95")}


def text_of(report: dict[str, Any]) -> str:
    lines = [f"{report['stages']} stages, hidden size {report['hidden']}, milliseconds a token: median (p95)"]
    lines += [f"  {k:20} {v['median']:8.3f} ({v['p95']:.3f})" for k, v in report["per_token"].items()]
    lines += ["alone:", *(f"  {k:20} {v:8.3f}" for k, v in report["alone"].items())]
    return "\n".join(lines)


# -- the parts alone ------------------------------------------------------------------------------
def decode_frame(hidden: int) -> Frame:
    """A step of one sequence that decodes."""
    return Frame(
        "step",
        Epoch(1, "n0"),
        1000,
        rows=(RowHeader((1 << 40) + 1, 200, 1, "sample"),),
        token_ids_T=np.array([17], np.int32),
        hidden_TD=np.ones((1, hidden), np.float32),
        hops=(Hop(0, 20, 1500),),
    )


def timed(work: Callable[[], object], times: int = 500) -> float:
    """Median milliseconds of a call."""
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begun)
    return round(statistics.median(spent) * 1e3, 4)


def decoding(frame: Frame, hidden: int) -> float:
    (message,) = encode(frame)
    assembler = Assembler(Limits(64, hidden, 300, 32, 512, 2), epoch=frame.epoch)
    return timed(lambda: assembler.feed(message))


def echo(kind: str, core: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--echo", kind],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


async def serve_grpc() -> None:
    async def back(_: Any, context: Any) -> None:
        while (message := await context.read()) is not EOF:
            await context.write(message)

    server = make_server()
    add_raw_methods(server, "bench", {"Echo": back})
    port = bind(server, None, "127.0.0.1")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def grpc_round_trip(frame: Frame, core: int) -> float:
    process, port = echo("grpc", core)
    try:
        channel = make_channel(f"127.0.0.1:{port}", None)
        call = raw_stream(channel, "/bench/Echo")
        message, spent = b"".join(encode(frame)), []
        for _ in range(1000):
            begun = time.perf_counter()
            await call.write(message)
            await call.read()
            spent.append(time.perf_counter() - begun)
        call.cancel()
        await channel.close()
    finally:
        process.kill()
        process.wait()
    return round(statistics.median(spent) * 1e3, 4)


def serve_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def tcp_round_trip(size: int, core: int) -> float:
    process, port = echo("tcp", core)
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            message = bytes(size)

            def once() -> None:
                connection.sendall(message)
                left = size
                while left:
                    left -= len(connection.recv(left))

            return timed(once, 1000)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
