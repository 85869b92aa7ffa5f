"""Which dot-product instructions compiled code may use: those of the processor that numba compiles for."""

from __future__ import annotations

from dataclasses import dataclass

from numba.core.registry import cpu_target

__all__ = ["Features", "target_features"]


@dataclass(frozen=True)
class Features:
    """Of the target; every combination computes the same bits."""

    dot: str
    """``vnni512``, ``vnni256``, ``maddubs`` (AVX2), ``madd`` (SSE2), ``sdot`` (ARM) or ``generic``."""
    madd_lanes: int = 0
    """16-bit lanes of the widest multiply-and-add-pairs instruction; 0: none."""
    half: bool = False
    """Whether float16 is converted by an instruction."""

    @property
    def tile(self) -> int:
        """Rows whose sums fit into the registers together."""
        return {"vnni512": 8, "sdot": 4}.get(self.dot, 2)


def target_features() -> Features:
    """What the target has; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES hold it to less."""
    triple, _, flags = cpu_target.target_context.codegen().magic_tuple()
    return parse_features(triple, flags)


def parse_features(triple: str, flags: str) -> Features:
    """`flags`: LLVM's feature string, ``+avx2,-avx512f``. What is not named is not there."""
    has = {flag[1:] for flag in flags.split(",") if flag.startswith("+")}
    if triple.startswith(("aarch64", "arm64")):
        return Features("sdot" if "dotprod" in has else "generic", half=True)
    if not triple.startswith(("x86_64", "amd64")):
        return Features("generic")
    wide = {"avx512f", "avx512bw", "avx512vl"} <= has
    lanes = 32 if wide else 16 if "avx2" in has else 8
    half = "f16c" in has or wide
    if wide and "avx512vnni" in has:
        return Features("vnni512", lanes, half)
    if "avxvnni" in has and "avx2" in has:
        return Features("vnni256", lanes, half)
    return Features("maddubs" if "avx2" in has else "madd", lanes, half)
