"""Us and others side by side in one run: the same file, the same cores, prompts of the same lengths.

    python benchmarks/peers.py MODEL.gguf... [--llama-cpp FOLDER] [--rounds 3] [--streams 1,4,8] [--dtype auto]...
                               [--without transformers]... [--out peers.json]

Needs two cores that nothing else uses, and llama.cpp as `benchmarks/build_llama_cpp.sh` builds it (`--llama-cpp`: the
folder given to that script). Contenders take turns, each once a round; figures are medians over the rounds, and a ratio
is the median of the rounds' ratios. `python benchmarks/report.py peers.json` makes docs/BENCHMARKS.md of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contenders import (
    Contender,
    LlamaCpp,
    LlamaCppRpc,
    Load,
    Ours,
    Transformers,
    available_cores,
    end_in_order,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    default = os.environ.get("LLAMA_CPP_DIR", Path.home() / ".cache/p2pshard-benchmarks/llama.cpp")
    parser.add_argument("--llama-cpp", type=Path, default=Path(default), metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--dtype", action="append", help="of our nodes; repeatable. Default: auto")
    parser.add_argument("--without", action="append", default=[], help="words of contenders to leave out")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    end_in_order()
    streams = tuple(int(s) for s in options.streams.split(","))
    load = Load(streams, options.prompt, options.tokens, options.prefill)
    binaries = options.llama_cpp / "build" / "bin"
    result: dict[str, Any] = {
        "machine": machine(),
        "load": vars(load),
        "rounds": options.rounds,
        "models": [],
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for model in options.models:
            contenders = line_up(binaries, Path(folder), options.dtype or ["auto"])
            chosen = [c for c in contenders if not any(word in c.name for word in options.without)]
            if any(isinstance(c, LlamaCpp) for c in chosen) and not (binaries / "ggml-rpc-server").exists():
                sys.exit(
                    f"no ggml-rpc-server in {binaries}; run benchmarks/build_llama_cpp.sh {options.llama_cpp}, "
                    "or leave llama.cpp out with --without llama"
                )
            rows = compare(chosen, model.resolve(), load, options.rounds)
            result["models"].append({"file": model.name, "bytes": model.stat().st_size, "contenders": rows})
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def line_up(binaries: Path, folder: Path, dtypes: list[str]) -> list[Contender]:
    """All contenders, the slowest last."""
    one, both = available_cores(2)[:1], available_cores(2)
    return [
        LlamaCpp(one, binaries),
        LlamaCpp(both, binaries),
        LlamaCppRpc(both, binaries),
        *(Ours(cores, folder, dtype=dtype) for dtype in dtypes for cores in (one, both)),
        Transformers(both),
    ]


def compare(contenders: list[Contender], model: Path, load: Load, rounds: int) -> list[dict[str, Any]]:
    """Rows ``{name, dtype, commands, rounds: [{decode, prefill, details}]}``."""
    measured: list[list[dict[str, Any]]] = [[] for _ in contenders]
    for number in range(rounds):
        for contender, taken in zip(contenders, measured, strict=True):
            begun = time.monotonic()
            rates = contender.run(model, load)
            taken.append(vars(rates))
            shown = ", ".join(f"{n}: {rate:.1f}" for n, rate in rates.decode.items())
            print(
                f"{model.name} round {number + 1}/{rounds} {contender.name} ({contender.dtype}): "
                f"decode {shown}; prefill {rates.prefill:.1f} tokens/s [{time.monotonic() - begun:.0f} s]",
                flush=True,
            )
    return [
        {"name": c.name, "dtype": c.dtype, "commands": c.commands, "rounds": taken}
        for c, taken in zip(contenders, measured, strict=True)
    ]


def machine() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    told = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    ).stdout.strip()
    return {
        "cpu": cpu or platform.processor(),
        "cores": str(os.cpu_count()),
        "extensions": ", ".join(told),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit,
    }


if __name__ == "__main__":
    main()
