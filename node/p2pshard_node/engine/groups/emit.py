"""The product's inner loop, written as LLVM IR.

Sixteen lanes stand for sixteen rows of weights, so nothing is ever summed across lanes; integer sums are exact,
and floats are added group after group in one order. Hence the same bits on every processor and for every
number of activation rows that share a weight's load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from p2pshard.models.groups import FINE, GROUP, LANES, NESTED, GroupLayout
from p2pshard_node.engine.groups.features import Features

__all__ = ["emit_panel", "emit_record", "record_bytes"]

_TAIL = 16


def record_bytes(wide: bool) -> int:
    """Of one activation row in one group: its 32 values as int8 (wide: high parts, then low parts), scale,
    scale x sum (float32), minus the sum, minus the sum of the first half (int32)."""
    return (2 if wide else 1) * GROUP + _TAIL


I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
F32 = ir.FloatType()
_QUADS = GROUP // 4


def _vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


V64I8, V32I16, V16I32 = _vector(I8, 64), _vector(I16, 32), _vector(I32, 16)
V16F32 = _vector(F32, LANES)


def _every(type_: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(type_, [value] * type_.count)


class _Emitter:
    def __init__(self, builder: ir.IRBuilder, features: Features) -> None:
        self.b = builder
        self.features = features

    # -- small things ---------------------------------------------------------------------------
    def load(self, base: ir.Value, offset: int, type_: ir.Type) -> ir.Value:
        b = self.b
        address = b.add(base, ir.Constant(base.type, offset)) if offset else base
        value = b.load(b.inttoptr(address, type_.as_pointer()))
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 1

    def splat(self, scalar: ir.Value) -> ir.Value:
        b = self.b
        type_ = _vector(scalar.type, LANES)
        one = b.insert_element(ir.Constant(type_, ir.Undefined), scalar, ir.Constant(I32, 0))
        return b.shuffle_vector(one, ir.Constant(type_, ir.Undefined), _every(V16I32, 0))

    def part(self, vector: ir.Value, first: int, count: int) -> ir.Value:
        mask = ir.Constant(_vector(I32, count), list(range(first, first + count)))
        return self.b.shuffle_vector(vector, vector, mask)

    def join(self, parts: Sequence[ir.Value]) -> ir.Value:
        parts = list(parts)
        while len(parts) > 1:
            count = 2 * parts[0].type.count
            mask = ir.Constant(_vector(I32, count), list(range(count)))
            parts = [self.b.shuffle_vector(x, y, mask) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    def in_parts(self, count: int, of: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
        """`of` applied to each of `count` equal parts of the vectors."""
        if count == 1:
            return of(*vectors)
        made = []
        for i in range(count):
            widths = [v.type.count // count for v in vectors]
            made.append(of(*(self.part(v, i * w, w) for v, w in zip(vectors, widths, strict=True))))
        return self.join(made)

    def halfs(self, base: ir.Value, offset: int) -> ir.Value:
        """Sixteen float16 as float32."""
        if self.features.half:
            return self.b.fpext(self.load(base, offset, _vector(ir.HalfType(), LANES)), V16F32)
        # the exponent's bias is made up for by a multiplication, which is exact for subnormals too
        b = self.b
        bits = b.zext(self.load(base, offset, _vector(I16, LANES)), V16I32)
        size = b.shl(b.and_(bits, _every(V16I32, 0x7FFF)), _every(V16I32, 13))
        value = b.fmul(b.bitcast(size, V16F32), _every(V16F32, 2.0**112))
        sign = b.shl(b.and_(bits, _every(V16I32, 0x8000)), _every(V16I32, 16))
        return b.bitcast(b.or_(b.bitcast(value, V16I32), sign), V16F32)

    def bytes_as_floats(self, base: ir.Value, offset: int, *, signed: bool) -> ir.Value:
        value = self.load(base, offset, _vector(I8, LANES))
        wide = self.b.sext(value, V16I32) if signed else self.b.zext(value, V16I32)
        return self.b.sitofp(wide, V16F32)

    # -- dot products ---------------------------------------------------------------------------
    def dot(
        self, start: ir.Value, weights: Sequence[ir.Value], xs: Sequence[ir.Value], bits: int
    ) -> ir.Value:
        """int32 lanes: `start` plus, for each pair, the lane's four u8 weights times the four s8 of x."""
        kind = self.features.dot
        if kind == "maddubs" and bits < 8:
            return self._maddubs(start, weights, xs, 8 if bits == 4 else 2)
        one = {
            "vnni512": self._vnni512,
            "vnni256": self._vnni256,
            "sdot": self._sdot if bits < 8 else self._sdot_of_bytes,
        }.get(kind, self._madd)
        for weight, x in zip(weights, xs, strict=True):
            start = one(start, weight, x)
        return start

    def _vnni512(self, start: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        return self.call("llvm.x86.avx512.vpdpbusd.512", V16I32, start, weight, x)

    def _vnni256(self, start: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        result = _vector(I32, 8)
        return self.in_parts(
            2, lambda a, w, v: self.call("llvm.x86.avx512.vpdpbusd.256", result, a, w, v), start, weight, x
        )

    def _sdot(self, start: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        result = _vector(I32, 4)
        return self.in_parts(
            4,
            lambda a, w, v: self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", result, a, w, v),
            start,
            weight,
            x,
        )

    def _sdot_of_bytes(self, start: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        # to a signed product, weights above 127 are negative; the halves of their top bit are not
        b = self.b
        high = b.lshr(b.and_(weight, _every(V64I8, 128)), _every(V64I8, 1))
        start = self._sdot(start, b.and_(weight, _every(V64I8, 127)), x)
        return self._sdot(self._sdot(start, high, x), high, x)

    def _maddubs(
        self, start: ir.Value, weights: Sequence[ir.Value], xs: Sequence[ir.Value], together: int
    ) -> ir.Value:
        """Pairs are added in 16 bits, `together` of them at most: 8 x 2 x 15 x 127 and 2 x 2 x 63 x 127 fit."""
        b = self.b
        half = _vector(I16, 16)
        for first in range(0, len(weights), together):
            pairs: ir.Value | None = None
            for weight, x in zip(
                weights[first : first + together], xs[first : first + together], strict=True
            ):
                made = self.in_parts(
                    2, lambda w, v: self.call("llvm.x86.avx2.pmadd.ub.sw", half, w, v), weight, x
                )
                pairs = made if pairs is None else b.add(pairs, made)
            start = b.add(start, self._pairs(pairs, _every(V32I16, 1)))
        return start

    def _madd(self, start: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        b = self.b
        w, v, eight = b.bitcast(weight, V32I16), b.bitcast(x, V32I16), _every(V32I16, 8)
        even = self._pairs(b.and_(w, _every(V32I16, 255)), b.ashr(b.shl(v, eight), eight))
        odd = self._pairs(b.lshr(w, eight), b.ashr(v, eight))
        return b.add(b.add(start, even), odd)

    def _pairs(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Products of 16-bit lanes, neighbours added: sixteen int32."""
        b, lanes = self.b, self.features.madd_lanes
        if lanes:
            name = {32: "avx512.pmaddw.d.512", 16: "avx2.pmadd.wd", 8: "sse2.pmadd.wd"}[lanes]
            result = _vector(I32, lanes // 2)
            return self.in_parts(32 // lanes, lambda p, q: self.call(f"llvm.x86.{name}", result, p, q), x, y)
        products = b.mul(b.sext(x, _vector(I32, 32)), b.sext(y, _vector(I32, 32)))
        even, odd = (ir.Constant(V16I32, list(range(i, 32, 2))) for i in (0, 1))
        return b.add(b.shuffle_vector(products, products, even), b.shuffle_vector(products, products, odd))

    # -- weights --------------------------------------------------------------------------------
    def quads(self, base: ir.Value, bits: int) -> list[ir.Value]:
        """The eight vectors of a group, as u8."""
        b = self.b
        if bits == 8:
            return [self.load(base, 64 * i, V64I8) for i in range(_QUADS)]
        packed = [self.load(base, 64 * i, V64I8) for i in range(4)]
        low = [b.and_(p, _every(V64I8, 15)) for p in packed]
        high = [self._shifted(p, -4, 15) for p in packed]
        nibbles = low + high
        if bits == 4:
            return nibbles
        tops = [self.load(base, 256 + 64 * i, V64I8) for i in range(2)]
        return [b.or_(nibbles[j], self._shifted(tops[j // 4], 4 - 2 * (j % 4), 0x30)) for j in range(_QUADS)]

    def _shifted(self, value: ir.Value, left: int, mask: int) -> ir.Value:
        """Bytes shifted as 16-bit lanes; `mask` removes what came from the neighbour."""
        b = self.b
        if left:
            wide = b.bitcast(value, V32I16)
            by = _every(V32I16, abs(left))
            value = b.bitcast(b.shl(wide, by) if left > 0 else b.lshr(wide, by), V64I8)
        return b.and_(value, _every(V64I8, mask))


def _loop(
    b: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value], body: Callable[..., list[ir.Value]]
) -> list[ir.Value]:
    """``for i in range(count): carried = body(i, *carried)``; `count` is at least 1."""
    before, start, end = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
    b.branch(start)
    b.position_at_end(start)
    i = b.phi(count.type)
    i.add_incoming(ir.Constant(count.type, 0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    made = body(i, *phis)
    following = b.add(i, ir.Constant(count.type, 1))
    for phi, value in zip([i, *phis], [following, *made], strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), start, end)
    b.position_at_end(end)
    return made


def emit_panel(
    builder: ir.IRBuilder,
    layout: GroupLayout,
    features: Features,
    rows: int,
    wide: bool,
    panel: ir.Value,
    records: ir.Value,
    blocks: ir.Value,
    bias: ir.Value,
    out: ir.Value,
    stride: ir.Value,
) -> None:
    """Products of one panel with `rows` activation rows: sixteen float32 at `out`, at `out` + `stride`, ...

    Addresses and sizes are integers. Records lie group after group, `rows` of them each. The sum is
    ``y += (float(sum q x) s) a - m (a sum x)``, group after group, and at the end the sixteen float32 at `bias`.
    """
    e, b = _Emitter(builder, features), builder
    long = panel.type
    size = record_bytes(wide)
    tail = size - _TAIL

    def at(base: ir.Value, index: ir.Value, step: int) -> ir.Value:
        return b.add(base, b.mul(index, ir.Constant(long, step)))

    def integer(
        quads: list[ir.Value], record: ir.Value, offset: int, first: int, start: ir.Value
    ) -> ir.Value:
        """``sum (q - zero) x`` of some quads, the first of them being quad `first` of the group."""
        total = _every(V16I32, 0)
        if layout.zero:
            start = e.splat(b.mul(start, ir.Constant(I32, layout.zero)))
        else:
            start = total
        parts = [(offset, total), (offset + GROUP, start)] if wide else [(offset, start)]
        dots = []
        for base, begin in parts:
            places = range(base + 4 * first, base + 4 * (first + len(quads)), 4)
            xs = [b.bitcast(e.splat(e.load(record, place, I32)), V64I8) for place in places]
            dots.append(e.dot(begin, quads, xs, layout.bits))
        return b.add(b.shl(dots[0], _every(V16I32, 7)), dots[1]) if wide else dots[0]

    def group(
        weights: ir.Value, record: ir.Value, scales: list[ir.Value], minimum: ir.Value | None, sums: Any
    ) -> list[ir.Value]:
        quads = e.quads(weights, layout.bits)
        made = []
        for row in range(rows):
            offset = row * size
            whole = e.load(record, offset + tail + 8, I32)
            if layout.scales == FINE:
                first = e.load(record, offset + tail + 12, I32)
                halves = [(quads[:4], 0, first), (quads[4:], 4, b.sub(whole, first))]
            else:
                halves = [(quads, 0, whole)]
            terms = [
                b.fmul(b.sitofp(integer(some, record, offset, begin, start), V16F32), scale)
                for (some, begin, start), scale in zip(halves, scales, strict=True)
            ]
            term = terms[0] if len(terms) == 1 else b.fadd(*terms)
            term = b.fmul(term, e.splat(e.load(record, offset + tail, F32)))
            if minimum is not None:
                term = b.fsub(term, b.fmul(minimum, e.splat(e.load(record, offset + tail + 4, F32))))
            made.append(b.fadd(sums[row], term))
        return made

    def block(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        head = at(panel, i, layout.block_bytes)
        base = e.halfs(head, 0)
        low = e.halfs(head, 2 * LANES) if layout.minimum else None
        weights = b.add(head, ir.Constant(long, layout.head_bytes))
        record = at(records, i, layout.groups * rows * size)
        if layout.groups == 1:
            return group(weights, record, [base], low, sums)

        def one(j: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            here = at(weights, j, layout.group_bytes)
            sub = [e.bytes_as_floats(here, k, signed=layout.scales == FINE) for k in (0, LANES)]
            scales = [b.fmul(base, s) for s in (sub[:1] if layout.scales == NESTED else sub)]
            minimum = None if low is None else b.fmul(low, sub[1])
            here = b.add(here, ir.Constant(long, layout.sub_bytes))
            return group(here, at(record, j, rows * size), scales, minimum, sums)

        return _loop(b, ir.Constant(long, layout.groups), sums, one)

    sums = _loop(b, blocks, [_every(V16F32, 0.0)] * rows, block)
    last = e.load(bias, 0, V16F32)
    for row, value in enumerate(sums):
        e.store(b.fadd(value, last), at(out, stride, row))


def emit_record(builder: ir.IRBuilder, wide: bool, x: ir.Value, record: ir.Value) -> ir.Value:
    """Quantise the 32 float32 at `x` into a record; whether all are finite.

    The largest becomes 127 (wide: 127 x 128, in two int8 parts). Of values that are not all finite the scale is
    NaN, so that no product hides them.
    """
    e, b = _Emitter(builder, Features("generic")), builder
    most = ir.Constant(F32, 127.0 * 128 if wide else 127.0)
    values = [e.load(x, 64 * i, V16F32) for i in range(2)]
    sizes = [b.and_(b.bitcast(v, V16I32), _every(V16I32, 0x7FFFFFFF)) for v in values]
    larger = b.select(b.icmp_unsigned(">", *sizes), *sizes)
    top = e.call("llvm.vector.reduce.umax.v16i32", I32, larger)
    largest = b.bitcast(top, F32)
    some = b.fcmp_ordered(">", largest, ir.Constant(F32, 2.0**-100))
    finite = b.icmp_unsigned("<", top, ir.Constant(I32, 0x7F800000))
    scale = b.select(some, b.fdiv(largest, most), ir.Constant(F32, 0.0))
    scale = b.select(finite, scale, ir.Constant(F32, float("nan")))
    inverse = e.splat(b.select(some, b.fdiv(most, largest), ir.Constant(F32, 0.0)))
    magic = 1.5 * 2.0**23  # adding it rounds to the nearest integer, and leaves that in the low bits
    integers = [
        b.sub(
            b.bitcast(b.fadd(b.fmul(v, inverse), _every(V16F32, magic)), V16I32),
            _every(V16I32, 0x4B400000),
        )
        for v in values
    ]
    for i, whole in enumerate(integers):
        high = whole
        if wide:
            high = b.ashr(b.add(whole, _every(V16I32, 64)), _every(V16I32, 7))
            low = b.sub(whole, b.shl(high, _every(V16I32, 7)))
            e.store(b.trunc(low, _vector(I8, 16)), b.add(record, ir.Constant(record.type, GROUP + 16 * i)))
        e.store(b.trunc(high, _vector(I8, 16)), b.add(record, ir.Constant(record.type, 16 * i)))
    sums = [b.neg(e.call("llvm.vector.reduce.add.v16i32", I32, v)) for v in integers]
    whole = b.add(*sums)
    tail = record_bytes(wide) - _TAIL
    product = b.fmul(scale, b.sitofp(b.neg(whole), F32))
    for i, value in enumerate((scale, product, whole, sums[0])):
        e.store(value, b.add(record, ir.Constant(record.type, tail + 4 * i)))
    return finite
