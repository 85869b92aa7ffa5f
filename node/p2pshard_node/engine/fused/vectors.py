"""Vectors of sixteen float32 or int32 lanes for numba.

LLVM keeps their order of operations on every target and splits them where registers are narrower, so sums
over lanes come out bit for bit alike on all processors. Addresses are integers, or arrays with an offset in
elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import create_struct_proxy
from numba.core.datamodel import PrimitiveModel
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

__all__ = [
    "LANES",
    "bits",
    "float_of",
    "floats",
    "highest",
    "highest_int",
    "int_of",
    "ints",
    "keep",
    "larger",
    "larger_int",
    "load",
    "lowest_bits",
    "pick",
    "scores",
    "shifted",
    "store",
    "store_bytes",
    "total",
    "total_int",
]

LANES = 16
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


class FloatLanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="FloatLanes")


class IntLanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="IntLanes")


float_lanes, int_lanes = FloatLanes(), IntLanes()


@register_model(FloatLanes)
class _FloatModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


@register_model(IntLanes)
class _IntModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, INTS)


def _operator(function: Any, kind: Any, build: str) -> None:
    @infer_global(function)
    class _(ConcreteTemplate):
        cases = [signature(kind, kind, kind)]  # noqa: RUF012

    @lower_builtin(function, kind, kind)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, build)(*args)


for _function, _build in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, float_lanes, _build)
for _function, _build in ((operator.add, "add"), (operator.sub, "sub"), (operator.and_, "and_")):
    _operator(_function, int_lanes, _build)


def number(value: int) -> ir.Constant:
    return ir.Constant(I32, value)


def lanes(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(values)), list(values))


def spread(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """`scalar` in every lane."""
    kind = ir.VectorType(scalar.type, count)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, number(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes([0] * count))


def pointer(context: Any, builder: Any, kind: Any, base: Any, offset: Any, target: Any, size: int) -> Any:
    """To the element `offset` (of `size` bytes) of an array or an integer address."""
    if isinstance(kind, types.Array):
        array = create_struct_proxy(kind)(context, builder, base)
        address = builder.ptrtoint(array.data, I64)
    else:
        address = base
    address = builder.add(address, builder.mul(offset, ir.Constant(I64, size)))
    return builder.inttoptr(address, target.as_pointer())


def _is_place(kind: Any) -> bool:
    return isinstance(kind, types.Array) or (isinstance(kind, types.Integer) and kind.bitwidth == 64)


@intrinsic
def load(typing: Any, place: Any, offset: Any) -> Any:
    """Sixteen float32 from `place`, `offset` elements on."""
    if not _is_place(place):
        return None

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], FLOATS, 4)
        value = builder.load(at)
        value.align = 4
        return value

    return float_lanes(place, types.intp), generate


@intrinsic
def store(typing: Any, place: Any, offset: Any, value: Any) -> Any:
    """Sixteen float32 to `place`, `offset` elements on."""
    if not _is_place(place):
        return None

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], FLOATS, 4)
        builder.store(args[2], at).align = 4
        return context.get_dummy_value()

    return types.void(place, types.intp, float_lanes), generate


@intrinsic
def store_bytes(typing: Any, place: Any, offset: Any, value: Any) -> Any:
    """The low eight bits of sixteen int32, as bytes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(I8, LANES)
        at = pointer(context, builder, sig.args[0], args[0], args[1], kind, 1)
        builder.store(builder.trunc(args[2], kind), at).align = 1
        return context.get_dummy_value()

    return types.void(place, types.intp, int_lanes), generate


@intrinsic
def int_lanes_at(typing: Any, place: Any, offset: Any) -> Any:
    """Sixteen int32 from `place`, `offset` elements on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer(context, builder, sig.args[0], args[0], args[1], INTS, 4)
        value = builder.load(at)
        value.align = 4
        return value

    return int_lanes(place, types.intp), generate


def _simple(result: Any, arguments: Sequence[Any], build: Callable[..., Any]) -> Any:
    """An intrinsic of fixed types, made by ``build(builder, *values)``."""

    def parts() -> Any:
        return result(*arguments), lambda context, builder, sig, args: build(builder, *args)

    def one(typing: Any, a: Any) -> Any:
        return parts()

    def two(typing: Any, a: Any, b: Any) -> Any:
        return parts()

    def three(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return parts()

    def four(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return parts()

    return intrinsic((one, two, three, four)[len(arguments) - 1])


def _tree(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Lanes i and i + 8 first, then i and i + 4, i + 2, i + 1."""
    width = LANES
    while width > 1:
        width //= 2
        low = builder.shuffle_vector(vector, vector, lanes(list(range(width))))
        high = builder.shuffle_vector(vector, vector, lanes(list(range(width, 2 * width))))
        vector = join(low, high)
    return builder.extract_element(vector, number(0))


def _max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _max_int(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _convert(builder: Any, value: Any) -> Any:
    return builder.sitofp(value, FLOATS)


def _keep(builder: Any, vector: Any, first: Any, end: Any, other: Any) -> Any:
    index = lanes(list(range(LANES)))

    def limit(value: Any) -> Any:
        return spread(builder, builder.trunc(value, I32))

    inside = builder.and_(
        builder.icmp_signed(">=", index, limit(first)), builder.icmp_signed("<", index, limit(end))
    )
    return builder.select(inside, vector, other)


floats = _simple(float_lanes, [types.float32], lambda b, a: spread(b, a))
ints = _simple(int_lanes, [types.int32], lambda b, a: spread(b, a))
bits = _simple(int_lanes, [float_lanes], lambda b, a: b.bitcast(a, INTS))
lowest_bits = _simple(float_lanes, [int_lanes], lambda b, a: b.bitcast(a, FLOATS))
shifted = _simple(int_lanes, [int_lanes], lambda b, a: b.shl(a, ir.Constant(INTS, [23] * LANES)))
converted = _simple(float_lanes, [int_lanes], _convert)
larger = _simple(float_lanes, [float_lanes] * 2, _max)
larger_int = _simple(int_lanes, [int_lanes] * 2, _max_int)
total = _simple(types.float32, [float_lanes], lambda b, a: _tree(b, a, b.fadd))
total_int = _simple(types.int32, [int_lanes], lambda b, a: _tree(b, a, b.add))
highest = _simple(types.float32, [float_lanes], lambda b, a: _tree(b, a, lambda x, y: _max(b, x, y)))
highest_int = _simple(types.int32, [int_lanes], lambda b, a: _tree(b, a, lambda x, y: _max_int(b, x, y)))
#: ``pick(a, b, x, y)``: x where a < b, else y.
pick = _simple(
    float_lanes, [float_lanes] * 4, lambda b, p, q, x, y: b.select(b.fcmp_ordered("<", p, q), x, y)
)
#: ``keep(vector, first, end, other)``: lanes [first, end) of `vector`, the rest of `other`.
keep = _simple(float_lanes, [float_lanes, types.intp, types.intp, float_lanes], _keep)
float_of = _simple(types.float32, [types.int32], lambda b, a: b.bitcast(a, F32))
int_of = _simple(types.int32, [types.float32], lambda b, a: b.bitcast(a, I32))


# -- sixteen dot products at once -----------------------------------------------------------------
def _paired(builder: Any, a: Any, b: Any, first: Sequence[int]) -> Any:
    """The sum of two shuffles of `a` and `b`: lanes `first` of each group of four, and those beside them."""
    step = 2 if first == (0, 1) else 1
    low: list[int] = []
    for group in range(0, LANES, 4):
        if step == 2:
            low += [group, group + LANES, group + 1, group + 1 + LANES]
        else:
            low += [group, group + 1, group + LANES, group + 1 + LANES]
    high = [index + 2 for index in low]
    return builder.fadd(builder.shuffle_vector(a, b, lanes(low)), builder.shuffle_vector(a, b, lanes(high)))


def _quarters(builder: Any, a: Any, b: Any) -> Any:
    """Quarters 0 and 2 of `a` and of `b`, plus quarters 1 and 3."""
    low = [base + lane for base in (0, 8, LANES, LANES + 8) for lane in range(4)]
    high = [index + 4 for index in low]
    return builder.fadd(builder.shuffle_vector(a, b, lanes(low)), builder.shuffle_vector(a, b, lanes(high)))


def transposed_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """Lane i: the sum over all lanes of vector i, every one in the same order."""
    pairs = [_paired(builder, vectors[i], vectors[i + 1], (0, 1)) for i in range(0, LANES, 2)]
    fours = [_paired(builder, pairs[i], pairs[i + 1], (0, 2)) for i in range(0, 8, 2)]
    eights = [_quarters(builder, fours[i], fours[i + 1]) for i in (0, 2)]
    return _quarters(builder, eights[0], eights[1])


@intrinsic
def scores(typing: Any, query: Any, offset: Any, key: Any, stride: Any, width: Any) -> Any:
    """Lane i: the dot product of `query` (an array, from `offset` on) and the key `i` x `stride` bytes behind
    address `key`; `width` is a multiple of 16."""
    result = float_lanes(query, types.intp, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        query, offset, key, stride, width = args
        function, before = builder.function, builder.block
        loop, end = function.append_basic_block("keys"), function.append_basic_block("sums")
        starts = [builder.add(key, builder.mul(stride, ir.Constant(I64, i))) for i in range(LANES)]
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        sums = [builder.phi(FLOATS) for _ in range(LANES)]
        part = builder.load(
            pointer(context, builder, sig.args[0], query, builder.add(offset, index), FLOATS, 4)
        )
        part.align = 4
        after = []
        for start, so_far in zip(starts, sums, strict=True):
            so_far.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            value = builder.load(pointer(context, builder, types.intp, start, index, FLOATS, 4))
            value.align = 4
            after.append(builder.fadd(so_far, builder.fmul(part, value)))
        following = builder.add(index, ir.Constant(I64, LANES))
        index.add_incoming(following, loop)
        for so_far, value in zip(sums, after, strict=True):
            so_far.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, width), loop, end)
        builder.position_at_end(end)
        return transposed_sums(builder, after)

    return result, generate
