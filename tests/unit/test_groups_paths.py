"""Every instruction path gives the same bits: processes held to older processors, and what cannot run here compiled."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from p2pshard_node.engine.groups.emit import emit_panel
from p2pshard_node.engine.groups.features import Features, parse_features, target_features

from p2pshard.models.groups import LAYOUTS

CHILD = """
import hashlib
import numpy as np
import torch
from p2pshard_node.engine.groups.features import target_features
from p2pshard_node.engine.groups.linear import GroupLinear
from p2pshard_node.engine.groups.make import make_groups
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.groups.repack import repack
from p2pshard.models.groups import LAYOUTS
from tests.unit.group_files import random_blocks

x = np.random.default_rng(3).normal(size=(11, 512)).astype(np.float32)
x[:, ::64] *= 50
digest = hashlib.sha256()
kinds = "Q4_1 narrow", "Q5_0 narrow", "Q3_K narrow", "Q4_K wide", "Q6_K wide", "Q8_0 wide"
for name, width in map(str.split, kinds):
    layout = LAYOUTS[name]
    rows = repack(name, random_blocks(name, 37, 512))
    matrix = GroupMatrix(layout, 37, 512)
    matrix.fill(0, rows)
    out = GroupLinear(matrix, None, wide=width == "wide")(torch.from_numpy(x)).numpy()
    assert np.isfinite(out).all()
    digest.update(out.tobytes())
made = make_groups(LAYOUTS["Q4_1"], x)
digest.update(made.q_RGK.tobytes() + made.scale_RB.tobytes() + made.low_RB.tobytes())
print(target_features().dot, digest.hexdigest())
"""

#: Name → processor and features, from the oldest to what this one may have.
TARGETS = {
    "madd": ("nehalem", "+sse4.2,+ssse3"),
    "maddubs": ("haswell", "+avx2,+f16c,+fma"),
    "vnni256": ("alderlake", "+avx2,+f16c,+fma,+avxvnni"),
    "vnni512": ("znver4", "+avx2,+f16c,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"),
}


def can_run(flags: str) -> bool:
    host = llvm.get_host_cpu_features()
    return all(host.get(flag[1:], False) for flag in flags.split(","))


@functools.cache
def child(processor: str, flags: str) -> tuple[str, str]:
    root = Path(__file__).resolve().parents[2]
    held = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": flags} if processor else {}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=root,
        env={**os.environ, **held, "PYTHONPATH": os.pathsep.join([str(root), str(root / "node")])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    dot, digest = done.stdout.split()
    return dot, digest


@pytest.mark.slow  # every path is compiled anew
@pytest.mark.parametrize("name", TARGETS)
def test_every_path_gives_the_bits_of_this_processor(name: str) -> None:
    processor, flags = TARGETS[name]
    if not can_run(flags):
        pytest.skip(f"this processor has no {flags}")
    dot, digest = child(processor, flags)
    assert dot == name
    assert digest == child("", "")[1]


def machine_code(features: Features, triple: str, processor: str, flags: str, layout: str) -> str:
    """Assembly of one panel's product on another machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 6), "panel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_panel(builder, LAYOUTS[layout], features, 2, True, *function.args)
    builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=flags, opt=3)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("layout", ["Q4_1", "Q6_K", "Q8_0"])
def test_other_processors_get_their_own_instruction(layout: str) -> None:
    """Compiled, not run: the bits of these are not known from here."""
    for triple, processor, flags, instruction in (
        ("aarch64-unknown-linux-gnu", "cortex-a76", "+dotprod", "sdot"),
        ("x86_64-unknown-linux-gnu", "alderlake", "+avx2,+avxvnni", "vpdpbusd"),
        (
            "x86_64-unknown-linux-gnu",
            "cascadelake",
            "+avx2,+avx512f,+avx512bw,+avx512vl,+avx512vnni",
            "vpdpbusd",
        ),
    ):
        features = parse_features(triple, flags)
        assert instruction in machine_code(features, triple, processor, flags, layout)
    generic = machine_code(Features("generic"), "aarch64-unknown-linux-gnu", "generic", "", layout)
    assert "sdot" not in generic


def test_no_multiplication_and_addition_is_contracted() -> None:
    """A fused one rounds once: other bits than where there is none."""
    flags = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512vnni"
    code = machine_code(parse_features("x86_64", flags), "x86_64-unknown-linux-gnu", "znver4", flags, "Q4_K")
    assert "vmulps" in code and "vfmadd" not in code and "vfnmadd" not in code


def test_this_process_uses_the_best_path_there_is() -> None:
    if can_run(TARGETS["vnni512"][1]):
        assert target_features().dot == "vnni512"
