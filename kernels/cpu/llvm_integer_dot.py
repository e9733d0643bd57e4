"""Products with weights of integers, whose activations are rounded to 8 bits.

An activation has a scale for each 32 columns. Products of four adjacent bytes add up to a lane of
int32, in one instruction where the CPU has it. The instructions of x86 multiply unsigned with
signed bytes. So codes of weights get an offset, and sums begin with the opposite of what this adds.
Sums of integers are exact.
"""

import itertools
from collections.abc import Sequence

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel, Variable
from penstock.kernels.cpu.integer_pointer import IntegerKind, IntegerPointer
from penstock.kernels.cpu.llvm_elementwise import ROUND, add_lanes
from penstock.kernels.cpu.values import FLOAT, INT8, INT16, INT32, Pointer, Value
from penstock.kernels.quantize.integers import UNIT

BLOCK = 32  # columns of an activation's scale
LANES = BLOCK // 4  # sums of a block
# words of 4 bytes of the codes of a unit of activations, and of each part that follows: of each 4
# codes the beginning of the sum, int32; their scale; for a shift, their sum times the scale
PART = UNIT // 4
SUMS, SCALES, SHIFTED = PART, 2 * PART, 3 * PART  # words of a unit before a part
MAX_UNIT_WORDS = 4 * PART
MAX_CODE = 127
MAX_ROWS = 4  # of a tile; more would leave too few registers for codes and scales
UNROLLED = 4  # units of a turn of a loop with few sums


def unit_words(kind: IntegerKind) -> int:
    """Return the words of a unit of activations, for weights of a kind."""
    return MAX_UNIT_WORDS if kind.has_shift else 3 * PART


def code_offset(target: Target, bits: int) -> int:
    """Return the offset of codes of weights in products."""
    if bits == 4:
        return 8
    return 128 if _has_vnni(target) else 0


def _has_vnni(target: Target) -> bool:
    """Return True if one instruction multiplies unsigned with signed bytes and adds four."""
    return target.has("avxvnni" if target.lanes == LANES else "avx512vnni")


def emit_rounding(k: Kernel, target: Target, kind: IntegerKind) -> None:
    """Round rows to 8 bits, for products with weights of a kind.

    Arguments: x, number of elements (whole units), out. The scale of a block with NaN or an
    infinity is NaN.
    """
    x, size, out = k.arguments
    lanes, bits = target.lanes, kind.bits
    offset = code_offset(target, bits)
    with k.range(0, size, BLOCK) as at:
        values = [x.vector(at + first, lanes) for first in range(0, BLOCK, lanes)]
        largest, wrong = k.zeros(lanes), k.zeros(lanes)
        for vector in values:
            absolute = vector.intrinsic("fabs")
            largest = (absolute > largest).choose(absolute, largest)
            wrong = vector.fma(vector.constant(0.0), wrong)
        most = largest.intrinsic("vector.reduce.fmax", FLOAT)
        factor = (most > 0.0).choose(MAX_CODE / most, 0.0)
        codes = out + at // UNIT * unit_words(kind) + at % UNIT // 4
        for index, vector in enumerate(values):
            shifted = vector.fma(vector.splat(factor), vector.constant(ROUND))
            codes[index * lanes // 4] = shifted.bits(INT32).truncate(INT8)
        words = codes.vector(0, LANES).bits(INT32)
        zeros, whole = words.constant(0), words.bits(INT8, BLOCK)
        sums = dot(target, bits, zeros, whole.constant(offset), whole)
        (codes + SUMS)[0] = zeros - sums
        scale = most * (1.0 / MAX_CODE) + add_lanes([wrong], lanes).lane(0)
        scales = k.zeros(LANES).splat(scale)
        (codes + SCALES)[0] = scales
        if kind.has_shift:
            # codes of 4 bits: a byte that is positive with and without a sign
            ones = dot(target, 4, zeros, whole.constant(1), whole)
            (codes + SHIFTED)[0] = ones.to_float() * scales
    k.end()


def integer_dot_tile(
    k: Kernel,
    target: Target,
    xs: list[Pointer],
    ws: Sequence[IntegerPointer],
    size: Value,
    ahead: Value | None = None,
) -> list[Value]:
    """Compute `llvm_linear.dot_tile`; xs: rows from `emit_rounding`."""
    sums = [[k.variable(k.zeros(target.lanes)) for _ in ws] for _ in xs]
    unrolled = UNROLLED if len(xs) * len(ws) <= 2 else 1  # few sums take little time each
    whole, words = size - size % (unrolled * UNIT), unit_words(ws[0].kind)

    def accumulate(at: Value, number: int) -> None:
        units, rows = [w + at for w in ws], [x + at // UNIT * words for x in xs]
        for index in range(number):
            own = [unit + index * UNIT for unit in units]
            if ahead is not None:
                for unit in own:
                    unit.prefetch(ahead)
            _add_unit(k, target, own, [row + index * words for row in rows], sums)

    with k.range(0, whole, unrolled * UNIT) as at:
        accumulate(at, unrolled)
    if unrolled > 1:
        with k.range(whole, size, UNIT) as at:
            accumulate(at, 1)
    return [add_lanes([total.value for total in row], target.lanes) for row in sums]


def _add_unit(
    k: Kernel,
    target: Target,
    units: list[IntegerPointer],
    xs: list[Pointer],
    sums: list[list[Variable]],
) -> None:
    """Add the products of a unit of columns to the sums of each x with each weight."""
    kind, lanes = units[0].kind, target.lanes
    has_offset = code_offset(target, kind.bits) > 0
    vectors = range(0, PART, lanes)
    # vectors that share a weight's scale are added before they are multiplied with it
    spans = [vectors] if kind.group_size >= UNIT else [[lane] for lane in vectors]
    for span, (number, unit) in itertools.product(spans, enumerate(units)):
        k.forget()
        place = 4 * span[0], 4 * lanes
        columns = [_codes(unit, 4 * lane, 4 * lanes, target) for lane in span]
        scale = unit.scale(*place)
        for x, row in zip(xs, sums, strict=True):
            total, own = row[number], k.zeros(lanes)
            for lane, column in zip(span, columns, strict=True):
                codes = (x + lane).vector(0, lanes).bits(INT8, 4 * lanes)
                first = (x + SUMS).vector(lane, lanes) if has_offset else k.zeros(lanes)
                first = first.bits(INT32)
                products = dot(target, kind.bits, first, column, codes).to_float()
                scales = (x + SCALES).vector(lane, lanes)
                own = products * scales if lane == span[0] else products.fma(scales, own)
                if kind.has_shift:
                    ones = (x + SHIFTED).vector(lane, lanes)
                    total.value = unit.shift(*place).fma(ones, total.value)
            total.value = scale.fma(own, total.value)


def _codes(unit: IntegerPointer, first: int, count: int, target: Target) -> Value:
    """Return codes of a unit as bytes, with their offset."""
    if unit.kind.bits == 8:
        codes = unit.codes.vector(first, count)
        return codes ^ 128 if _has_vnni(target) else codes
    both = unit.codes.vector(0, UNIT // 2)
    if count == UNIT // 2:
        return (both.shift_right(4) if first else both) & 15
    twice = both.lanes([*range(count // 2)] * 2).bits(INT32, count // 4)
    shifts = [0] * (count // 8) + [4] * (count // 8)
    return (twice.shift_right(shifts) & 0x0F0F0F0F).bits(INT8, count)


def dot(target: Target, bits: int, sums: Value, weights: Value, codes: Value) -> Value:
    """Return the sums plus the products of four adjacent bytes each.

    weights: of `_codes`; codes: int8.
    """
    lanes = sums.raw.type.count
    if _has_vnni(target):
        return sums.call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums, weights, codes)
    if lanes > LANES:  # instructions of fewer lanes
        halves = [
            dot(target, bits, *(_half(one, index) for one in (sums, weights, codes)))
            for index in range(2)
        ]
        return halves[0].lanes(range(lanes), halves[1])
    if target.has("avx2"):
        if bits == 8:  # the instruction saturates for larger products than these
            codes = codes.call("llvm.x86.avx2.psign.b", codes, weights)
            weights = (weights < 0).choose(0 - weights, weights)
        pairs = sums.bits(INT16, 2 * lanes)
        pairs = pairs.call("llvm.x86.avx2.pmadd.ub.sw", weights, codes)
        return sums + sums.call("llvm.x86.avx2.pmadd.wd", pairs, pairs.constant(1))
    if target.has("dotprod"):
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        parts = [[_half(one, index) for one in (sums, weights, codes)] for index in range(2)]
        low, high = (one[0].call(name, *one) for one in parts)
        return low.lanes(range(lanes), high)
    products = weights.widened(INT32) * codes.widened(INT32)
    for first in range(4):
        sums = sums + products.lanes(range(first, 4 * lanes, 4))
    return sums


def _half(vector: Value, index: int) -> Value:
    size = vector.raw.type.count // 2
    return vector.lanes(range(index * size, (index + 1) * size))
