"""Products of grouped weights on one core: microseconds, GB/s of weights and multiplications a second.

    python benchmarks/group_products.py [--core 0] [--rows 1,2,4,8,64] [--types Q4_1,Q4_K,Q6_K,Q8_0]

Each matrix is measured over copies that together are larger than the caches, as a model's layers are. The best
of the runs counts: what others do on the machine only adds. Beside it, torch's own 4-bit product of one group
size, where torch has one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from p2pshard_node.engine.groups.features import target_features
from p2pshard_node.engine.groups.linear import GroupLinear
from p2pshard_node.engine.groups.matrix import GroupMatrix

from p2pshard.models.groups import LAYOUTS, GroupLayout

SHAPES = {
    "SmolLM2-135M": [(1152, 576), (3072, 576), (576, 1536), (49152, 576)],
    "Qwen2.5-1.5B": [(2048, 1536), (17920, 1536), (1536, 8960), (151936, 1536)],
}
"""Rows and columns of queries with keys and values, of gate with up, of down, and of the head."""
BEYOND_CACHES = 100_000_000


def best(runs: Sequence[Callable[[], object]], seconds: float = 0.4) -> float:
    """Least seconds of a run; `runs` are done in turn."""
    for run in runs[:2]:
        run()
    least, end, i = float("inf"), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or i < 2 * len(runs):
        begin = time.perf_counter()
        runs[i % len(runs)]()
        least = min(least, time.perf_counter() - begin)
        i += 1
    return least


def ours(layout: GroupLayout, rows: int, columns: int, tokens: int, wide: bool) -> tuple[float, int]:
    """Seconds, quantising the activations included, and bytes of the matrix."""
    random = np.random.default_rng(0)
    size = layout.nbytes(rows, columns)
    layers = []
    for _ in range(min(20, -(-BEYOND_CACHES // size))):
        matrix = GroupMatrix(layout, rows, columns)
        matrix.data[:] = random.integers(0, 60, size, dtype=np.uint8)
        layers.append(GroupLinear(matrix, None, wide=wide))
    x_TK = torch.from_numpy(random.normal(size=(tokens, columns)).astype(np.float32))
    return best([lambda layer=layer: layer(x_TK) for layer in layers]), size  # type: ignore[misc]


def torchs(rows: int, columns: int, tokens: int) -> float | None:
    """Seconds of torch's 4-bit product in bfloat16 (groups of 32), or None without it."""
    pack = getattr(torch, "_convert_weight_to_int4pack_for_cpu", None)
    product = getattr(torch, "_weight_int4pack_mm_for_cpu", None)
    if pack is None or product is None:
        return None
    try:
        count = min(20, -(-BEYOND_CACHES // (rows * columns // 2)))
        weights = [pack(torch.randint(0, 16, (rows, columns), dtype=torch.int32), 1) for _ in range(count)]
        scales = torch.rand(columns // 32, rows, 2).bfloat16()
        x = torch.randn(tokens, columns).bfloat16()
        return best([lambda w=w: product(x, w, 32, scales) for w in weights])  # type: ignore[misc]
    except RuntimeError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--rows", default="1,2,4,8,64")
    parser.add_argument("--types", default="Q4_1,Q4_K,Q6_K,Q8_0")
    parser.add_argument("--models", default=",".join(SHAPES))
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {asked.core})
    torch.set_num_threads(1)
    tokens = [int(n) for n in asked.rows.split(",")]
    print(f"core {asked.core}, {target_features().dot}; us (GB/s of weights) at so many rows")
    print(f"{'':34}" + "".join(f"{n:>18}" for n in tokens))
    for model in asked.models.split(","):
        for rows, columns in SHAPES[model]:
            for name in asked.types.split(","):
                if not LAYOUTS[name].fits(columns):
                    continue
                for wide in (False, True):
                    line = f"{rows:>7} x {columns:<5} {name} {'two int8' if wide else 'one int8'}"
                    cells = []
                    for n in tokens:
                        seconds, size = ours(LAYOUTS[name], rows, columns, n, wide)
                        cells.append(f"{seconds * 1e6:>10.0f} ({size / seconds / 1e9:4.1f})")
                    print(f"{line:<34}" + "".join(f"{c:>18}" for c in cells), flush=True)
            cells = []
            for n in tokens:
                other = torchs(rows, columns, n)
                rate = 0.0 if other is None else rows * columns * 0.625 / other / 1e9
                cells.append("-" if other is None else f"{other * 1e6:>10.0f} ({rate:4.1f})")
            print(f"{f'{rows:>7} x {columns:<5} torch int4, bf16':<34}" + "".join(f"{c:>18}" for c in cells))


if __name__ == "__main__":
    main()
