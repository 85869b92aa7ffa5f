"""What this machine's devices can do, measured in under three seconds. Unknown hardware gives zeros."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

__all__ = ["measure"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MATMUL_S = 0.25
_COPY_BYTES = 48 << 20
"""Beyond most caches, and small beside a worker's libraries, for it counts in the peak memory."""
_SIDE = 512

log = logging.getLogger(__name__)


def _rate(work: Callable[[], object], finish: Callable[[], object], seconds: float) -> float:
    """Calls per second by the fastest of many: what the device can do, and not what else ran meanwhile."""
    work()  # warms up
    finish()
    until, fastest = time.perf_counter() + seconds, float("inf")
    while (begun := time.perf_counter()) < until:
        work()
        finish()
        fastest = min(fastest, time.perf_counter() - begun)
    return 1 / fastest


def _gflops(device: str, dtype: torch.dtype, finish: Callable[[], object]) -> float:
    a = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    return _rate(lambda: a @ a, finish, _MATMUL_S) * 2 * _SIDE**3 / 1e9


def _bandwidth(device: str, finish: Callable[[], object]) -> float:
    """GB/s of a copy: bytes read and bytes written."""
    source = torch.ones(_COPY_BYTES // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), finish, 0.3) * _COPY_BYTES / 1e9


def _device(device: str, name: str, total: int, free: int, finish: Callable[[], object]) -> dict[str, Any]:
    gflops: dict[str, float] = {}
    bandwidth = 0.0
    with torch.inference_mode():
        for dtype_name, dtype in DTYPES.items():
            try:
                gflops[dtype_name] = _gflops(device, dtype, finish)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                log.info("%s does not run %s: %s", device, dtype_name, error)
        try:
            bandwidth = _bandwidth(device, finish)
        except RuntimeError as error:
            log.warning("bandwidth of %s not measured: %s", device, error)
    return {
        "device": device,
        "name": name,
        "total_bytes": total,
        "free_bytes": free,
        "matmul_gflops": round(gflops.get("float32", 0.0), 2),
        "gflops": {k: round(v, 2) for k, v in gflops.items()},
        "bandwidth_gbps": round(bandwidth, 2),
        "dtypes": [*gflops, *(["int8", "int4"] if device == "cpu" else [])],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        log.debug("no /proc/cpuinfo here")
    return "cpu"


def measure() -> list[dict[str, Any]]:
    """One map per device, the fields of ``DeviceProfile``; the processor first."""
    memory = psutil.virtual_memory()
    devices = [_device("cpu", _processor(), memory.total, memory.available, lambda: None)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(_device(f"cuda:{index}", name, total, free, torch.cuda.synchronize))
    if torch.backends.mps.is_available():
        devices.append(_device("mps", "Apple GPU", memory.total, memory.available, torch.mps.synchronize))
    return devices
