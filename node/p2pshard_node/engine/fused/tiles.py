"""Sums of byte products over small tiles, in LLVM IR: the instruction for it where the processor has one.

A panel is 64 rows of a weight matrix: for every four columns, 64 x 4 bytes of value + 128. Sums are int32 and
exact, so every way of computing them gives the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from p2pshard_node.engine.fused.vectors import I8, I16, I32, I64, INTS, LANES, spread
from p2pshard_node.engine.groups.features import target_features

__all__ = ["PANEL", "has_dot_instruction", "tile1", "tile2", "tile4"]

PANEL = 64
_BYTES = ir.VectorType(I8, 64)
_DOT = "llvm.x86.avx512.vpdpbusd.512"


def has_dot_instruction() -> bool:
    """Whether numba's target has AVX512-VNNI."""
    return target_features().dot == "vnni512"


def _dot(builder: Any, so_far: Any, weight: Any, value: Any) -> Any:
    """so_far[i] + sum of four unsigned bytes of `weight` times four signed ones of `value`."""
    if has_dot_instruction():
        module = builder.module
        function = module.globals.get(_DOT) or ir.Function(
            module, ir.FunctionType(INTS, [INTS, _BYTES, _BYTES]), _DOT
        )
        return builder.call(function, [so_far, weight, value])
    wide = ir.VectorType(I16, 64)
    weights, values = builder.zext(weight, wide), builder.sext(value, wide)
    for step in range(4):
        index = ir.Constant(ir.VectorType(I32, LANES), list(range(step, 64, 4)))
        if step % 2:
            continue
        other = ir.Constant(ir.VectorType(I32, LANES), list(range(step + 1, 64, 4)))
        products = [
            builder.mul(
                builder.zext(builder.shuffle_vector(weights, weights, where), INTS),
                builder.sext(builder.shuffle_vector(values, values, where), INTS),
            )
            for where in (index, other)
        ]
        so_far = builder.add(so_far, builder.add(*products))
    return so_far


def _prefetch(builder: Any, pointer: Any) -> None:
    """Into the second level of the cache and up: never an error, whatever the address."""
    module, name = builder.module, "llvm.prefetch.p0i8"
    function = module.globals.get(name) or ir.Function(
        module, ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32]), name
    )
    builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (0, 2, 1))])


def _tile(rows: int) -> Any:
    @intrinsic
    def tile(
        typing: Any, values: Any, stride: Any, panel: Any, steps: Any, sums: Any, ahead: Any, pace: Any
    ) -> Any:
        """`rows` rows at address `values` (`stride` bytes apart) times the panel: int32 [rows, 64] to `sums`.

        Meanwhile asks the memory for two lines (128 bytes) with each of the `steps`: at `ahead`, and `pace` bytes further
        with each.
        """

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            values, stride, panel, steps, sums, ahead, pace = args
            function, before = builder.function, builder.block
            loop, end = function.append_basic_block("columns"), function.append_basic_block("write")

            def at(address: Any, kind: Any) -> Any:
                return builder.inttoptr(address, kind.as_pointer())

            def plus(address: Any, count: int) -> Any:
                return builder.add(address, ir.Constant(I64, count))

            starts = [builder.add(values, builder.mul(stride, ir.Constant(I64, r))) for r in range(rows)]
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(I64)
            index.add_incoming(ir.Constant(I64, 0), before)
            so_far = [[builder.phi(INTS) for _ in range(4)] for _ in range(rows)]
            place = builder.add(panel, builder.shl(index, ir.Constant(I64, 8)))
            asked = builder.add(ahead, builder.mul(index, pace))
            for line in range(2):
                _prefetch(builder, at(plus(asked, 64 * line), I8))
            weights = []
            for i in range(4):
                weight = builder.load(at(plus(place, 64 * i), _BYTES))
                weight.align = 64
                weights.append(weight)
            after = []
            for row in range(rows):
                four = builder.load(
                    at(builder.add(starts[row], builder.shl(index, ir.Constant(I64, 2))), I32)
                )
                four.align = 4
                value = builder.bitcast(spread(builder, four), _BYTES)
                after.append([_dot(builder, so_far[row][i], weights[i], value) for i in range(4)])
            following = builder.add(index, ir.Constant(I64, 1))
            index.add_incoming(following, loop)
            for phis, results in zip(so_far, after, strict=True):
                for phi, result in zip(phis, results, strict=True):
                    phi.add_incoming(ir.Constant(INTS, [0] * LANES), before)
                    phi.add_incoming(result, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, end)
            builder.position_at_end(end)
            for row, results in enumerate(after):
                for i, result in enumerate(results):
                    builder.store(result, at(plus(sums, (row * 4 + i) * 64), INTS)).align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return tile


tile1, tile2, tile4 = _tile(1), _tile(2), _tile(4)
