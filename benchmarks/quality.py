"""What a dtype costs: perplexity of one model on a fixed text, against float32 of the same file.

    python benchmarks/quality.py MODEL.gguf --dtypes float32,int8 --windows 16

The text is ours and at hand everywhere: this repository's README, architecture notes and licence, then docstrings
of Python's standard library, cut into windows of 256 tokens that are predicted from their own beginning. It exits
with 1 when a dtype costs more than its limit (--limit int8=1.5, in per cent).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from engine import BLOCK, whole_model
from p2pshard_node.engine.stage import Row, StageModel, StepBatch
from p2pshard_node.models.gguf_tokenizer import gguf_tokenizer
from p2pshard_node.models.tokenizer_json import load_tokenizer

from p2pshard.models.gguf import read_gguf

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/ARCHITECTURE.md", "LICENSE")
MODULES = ("argparse", "asyncio/streams", "collections/__init__", "datetime", "decimal", "difflib", "functools",
           "heapq", "inspect", "random", "statistics", "subprocess", "tempfile", "textwrap", "typing")  # fmt: skip
WINDOW = 256


def passages() -> Iterator[str]:
    """The text, in pieces."""
    for name in DOCUMENTS:
        yield (ROOT / name).read_text(encoding="utf-8")
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        tree = ast.parse((library / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text + "\n\n"


def windows(path: Path, count: int) -> list[np.ndarray]:
    """`count` windows of token ids, spread evenly over the text."""
    tokenizer = load_tokenizer(gguf_tokenizer(read_gguf(path)).json.encode(), str(path))
    ids = np.array(tokenizer.encode("".join(passages()), add_special_tokens=False).ids, dtype=np.int32)
    whole = len(ids) // WINDOW
    chosen = np.linspace(0, whole - 1, min(count, whole)).astype(int)
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in chosen]


def losses(model: StageModel, parts: list[np.ndarray]) -> np.ndarray:
    """Nats of each token but the first, float64 [windows, WINDOW - 1]: all windows are decoded side by side."""
    per_row = -(-WINDOW // BLOCK)
    tables = [tuple(range(i * per_row, (i + 1) * per_row)) for i in range(len(parts))]
    ids = np.stack(parts)
    result = np.empty((len(parts), WINDOW - 1))
    for position in range(WINDOW - 1):
        rows = tuple(Row(i, position, 1, table, "logits") for i, table in enumerate(tables))
        logits = model.forward(StepBatch(rows, ids[:, position].copy()), None)
        # a row at a time: a vocabulary of float64 for all of them would be much memory
        for i, line in enumerate(logits):
            shifted = line.astype(np.float64) - float(line.max())
            result[i, position] = np.log(np.exp(shifted).sum()) - shifted[ids[i, position + 1]]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="float32,int8")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--limit", action="append", default=[], help="DTYPE=PER_CENT")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    limits = {name: float(value) for name, _, value in (text.partition("=") for text in arguments.limit)}
    parts = windows(arguments.model, arguments.windows)
    base: float | None = None
    worst = False
    for dtype in arguments.dtypes.split(","):
        model = whole_model(arguments.model, dtype, WINDOW * len(parts))
        mean = float(losses(model, parts).mean())
        base = mean if base is None else base
        more = 100 * (np.exp(mean - base) - 1)
        worst |= more > limits.get(dtype, np.inf)
        line = {
            "model": arguments.model.name,
            "dtype": dtype,
            "kernels": model.kernels,
            "tokens": len(parts) * (WINDOW - 1),
            "perplexity": round(float(np.exp(mean)), 4),
            "more_per_cent": round(more, 2),
        }
        print(json.dumps(line), flush=True)
        del model
    sys.exit(int(worst))


if __name__ == "__main__":
    main()
