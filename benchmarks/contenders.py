"""Programs that answer prompts, each started, loaded, measured and stopped in one call, on the cores it is given.

All are asked the same: prompts of random tokens of one length, so many at once, so many tokens given to each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.local_cluster import LocalCluster, free_port

_LIMIT_S = 1800
"""For one command; a hang must not last for ever."""


@dataclass(frozen=True)
class Load:
    """What every contender is asked."""

    streams: tuple[int, ...]
    prompt: int
    """Tokens of each prompt before decoding."""
    tokens: int
    """Given to each stream."""
    prefill: int
    """Tokens of the one prompt that prefill is measured with."""


@dataclass
class Rates:
    """Tokens per second."""

    decode: dict[int, float] = field(default_factory=dict)
    """Of all streams together, by their number."""
    prefill: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    """What else the contender tells of itself."""


class Contender(ABC):
    """``name`` is shown, ``dtype`` says what it computes with, ``commands`` is filled with what was run."""

    name: str
    dtype: str

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)
        self.commands: list[str] = []

    @abstractmethod
    def run(self, model: Path, load: Load) -> Rates: ...

    def execute(self, argv: Sequence[str], *, cores: Sequence[int] | None = None) -> str:
        """Standard output of a command on our cores. Raises `RuntimeError` with the end of its output."""
        argv = pinned(argv, cores or self.cores)
        self.note(argv)
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"{argv} gave {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def note(self, argv: Sequence[str]) -> None:
        """Keep a command once, without what differs between machines and runs."""
        line = " ".join(Path(a).name if a.startswith("/") else a for a in argv)
        line = re.sub(r"-p \d+", "-p PORT", re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", line))
        if line not in self.commands:
            self.commands.append(line)


def context_for(tokens: int) -> int:
    """Room for so many tokens, in the steps of 256 that llama.cpp allocates."""
    return -(-tokens // 256) * 256


def pinned(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *argv]


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# -- llama.cpp ------------------------------------------------------------------------------------
class LlamaCpp(Contender):
    """``llama-batched-bench`` in one process, a thread for each core."""

    def __init__(self, cores: Sequence[int], binaries: Path) -> None:
        super().__init__(cores)
        self.binaries = binaries
        self.name = f"llama.cpp, {len(cores)} core{'s'[: len(cores) > 1]}"
        self.dtype = "of the file"

    def run(self, model: Path, load: Load) -> Rates:
        return self._bench(model, load, ["-t", str(len(self.cores)), "-tb", str(len(self.cores))])

    def _bench(self, model: Path, load: Load, flags: Sequence[str]) -> Rates:
        most = max(load.streams)
        common = [
            str(self.binaries / "llama-batched-bench"),
            *("-m", str(model), "-b", "2048", "-ub", "512", "--output-format", "jsonl", *flags),
        ]
        shape = ["-npp", str(load.prompt), "-ntg", str(load.tokens), "-npl", ",".join(map(str, load.streams))]
        # Each sequence has its own part of the context.
        context = str(most * context_for(load.prompt + load.tokens))
        rows = json_lines(self.execute([*common, "-c", context, *shape]))
        shape = ["-npp", str(load.prefill), "-ntg", "2", "-npl", "1"]
        context = str(context_for(load.prefill + 2))
        (prefill,) = json_lines(self.execute([*common, "-c", context, *shape]))
        return Rates({row["pl"]: row["speed_tg"] for row in rows}, prefill["speed_pp"])


class LlamaCppRpc(LlamaCpp):
    """A server of one thread on each core; the client may use all of them, as ours may."""

    def __init__(self, cores: Sequence[int], binaries: Path) -> None:
        super().__init__(cores, binaries)
        self.name = f"llama.cpp RPC, {len(cores)} servers"

    def run(self, model: Path, load: Load) -> Rates:
        with contextlib.ExitStack() as running:
            servers = [running.enter_context(self._server(core)) for core in self.cores]
            split = ",".join("1" for _ in servers)
            flags = ["--rpc", ",".join(servers), "-ngl", "99", "-sm", "layer", "-ts", split, "-fit", "off"]
            return self._bench(model, load, [*flags, "-t", "1", "-tb", "1"])

    @contextlib.contextmanager
    def _server(self, core: int) -> Iterator[str]:
        port = free_port()
        argv = pinned([str(self.binaries / "ggml-rpc-server"), "-t", "1", "-p", str(port)], [core])
        self.note(argv)
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for_port(process, port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args} does not listen on port {port}")


# -- transformers ---------------------------------------------------------------------------------
class Transformers(Contender):
    """The library alone, which computes in float32 what it reads from a quantised file."""

    def __init__(self, cores: Sequence[int]) -> None:
        super().__init__(cores)
        self.name = f"transformers, {len(cores)} core{'s'[: len(cores) > 1]}"
        self.dtype = "float32"

    def run(self, model: Path, load: Load) -> Rates:
        script = Path(__file__).with_name("with_transformers.py")
        argv = [sys.executable, str(script), str(model), "--threads", str(len(self.cores))]
        shape = ["--prompt", str(load.prompt), "--tokens", str(load.tokens), "--prefill", str(load.prefill)]
        (row,) = json_lines(self.execute([*argv, *shape, "--streams", ",".join(map(str, load.streams))]))
        return Rates({int(k): v for k, v in row["decode"].items()}, row["prefill"])


# -- ours -----------------------------------------------------------------------------------------
class Ours(Contender):
    """Daemons of one core each, measured by ``p2pshard bench``; its own process may use all their cores."""

    def __init__(
        self, cores: Sequence[int], folder: Path, *, dtype: str = "auto", memory: str = "8GB"
    ) -> None:
        super().__init__(cores)
        self._folder, self._asked, self._memory = folder, dtype, memory
        self.name = f"p2pshard, {len(cores)} node{'s'[: len(cores) > 1]}"
        self.dtype = dtype
        """What was asked for; after a run, what the plan says."""

    def run(self, model: Path, load: Load) -> Rates:
        nodes = len(self.cores)
        # The folder is kept between runs: hashes of the file and compiled kernels are in it, as on any machine.
        cluster = LocalCluster(
            self._folder / f"{nodes}-nodes", "--memory", self._memory, "--no-warm-worker", nodes=nodes
        )
        for node, core in zip(cluster.nodes, self.cores, strict=True):
            node.core = core
        context = context_for(max(load.prompt + load.tokens, load.prefill + 2))
        with cluster:
            cluster.wait_measured()
            bench = [
                *(sys.executable, "-m", "p2pshard.cli", "bench", str(model), "--json", "--rounds", "1"),
                *("--nodes", str(nodes), "--dtype", self._asked, "--context", str(context)),
                *("--concurrency", str(max(load.streams)), "--node", cluster.nodes[0].address),
            ]
            streams = ",".join(map(str, load.streams))
            shape = ["--streams", streams, "--prompt", str(load.prompt), "--tokens", str(load.tokens)]
            (decode,) = json_lines(self.execute([*bench, *shape]))
            shape = ["--streams", "1", "--prompt", str(load.prefill), "--tokens", "2"]
            (prefill,) = json_lines(self.execute([*bench, *shape]))
        self.dtype = decode["plan"]["dtype"]
        (prefilled,) = prefill["results"]
        rates = {
            r["streams"]: r["tokens_per_second"] or r["overall_tokens_per_second"] for r in decode["results"]
        }
        details = {
            "numerics": decode["plan"]["numerics"],
            "layers": [stage["layers"] for stage in decode["plan"]["replicas"][0]["stages"]],
            "decode": {r["streams"]: _summary(r) for r in decode["results"]},
        }
        return Rates(rates, prefilled["prefill_tokens_per_second"], details)


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    phase = (row["trace"] or {}).get("decode")
    return {
        "ttft_ms": row["ttft_ms"],
        "inter_token_ms": row["inter_token_ms"],
        "busy": [round(s["busy"], 3) for s in phase["stages"]] if phase else None,
        "hop_overhead_ms": phase["hop_overhead_ms"]["median"] if phase else None,
    }


def end_in_order() -> None:
    """Let SIGTERM end this program as Ctrl-C does: through every ``with``, so that no daemon is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def available_cores(count: int) -> list[int]:
    """The first ``count`` cores of this process. Raises `SystemExit` when there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise SystemExit(f"needs {count} cores, this process may use {len(cores)}")
    return cores[:count]
