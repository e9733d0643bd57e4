"""Products with weights of integers, whose activations are rounded to 8 bits.

An activation has a scale for each 32 columns. Products of four adjacent bytes add up to a lane of
int32, in one instruction where the CPU has it. The instructions of x86 multiply unsigned with
signed bytes. So codes of weights get an offset, and sums begin with the opposite of what this adds.
Sums of integers are exact.
"""

from collections.abc import Sequence

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel, Variable
from penstock.kernels.cpu.integers import GROUP, IntegerPointer
from penstock.kernels.cpu.llvm_elementwise import ROUND, add_lanes
from penstock.kernels.cpu.values import FLOAT, INT8, INT16, INT32, Pointer, Value

BLOCK = 32
"""columns of an activation's scale"""
LANES = BLOCK // 4
"""sums of a block"""
GROUP_WORDS = 3 * GROUP // 4
"""of 4 bytes, of a group of activations: codes; of each 4 codes the beginning of the sum, int32;
and the scale, float32"""
SUMS, SCALES = GROUP // 4, 2 * GROUP // 4
"""words of a group before the sums and the scales"""
MAX_CODE = 127
UNROLLED = 4
"""groups of a turn of a loop with few sums"""


def code_offset(target: Target, bits: int) -> int:
    """Return the offset of codes of weights in products."""
    if bits == 4:
        return 8
    return 128 if _has_vnni(target) else 0


def _has_vnni(target: Target) -> bool:
    """Return True if one instruction multiplies unsigned with signed bytes and adds four."""
    return target.has("avxvnni" if target.lanes == LANES else "avx512vnni")


def emit_rounding(k: Kernel, target: Target, bits: int) -> None:
    """Round rows to 8 bits, for products with weights of `bits` bits.

    Arguments: x, number of elements (whole groups), out. The scale of a block with NaN or an
    infinity is NaN.
    """
    x, size, out = k.arguments
    lanes = target.lanes
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
        group = out + at // GROUP * GROUP_WORDS
        block = at % GROUP // 4
        codes = group + block
        for index, vector in enumerate(values):
            shifted = vector.fma(vector.splat(factor), vector.constant(ROUND))
            codes[index * lanes // 4] = shifted.bits(INT32).truncate(INT8)
        words = codes.vector(0, LANES).bits(INT32)
        zeros, whole = words.constant(0), words.bits(INT8, BLOCK)
        sums = dot(target, bits, zeros, whole.constant(offset), whole)
        (group + block + SUMS)[0] = zeros - sums
        scale = most * (1.0 / MAX_CODE) + add_lanes([wrong], lanes).lane(0)
        (group + block + SCALES)[0] = k.zeros(LANES).splat(scale)
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
    whole = size - size % (unrolled * GROUP)

    def accumulate(at: Value, number: int) -> None:
        groups, rows = [w + at for w in ws], [x + at // GROUP * GROUP_WORDS for x in xs]
        for index in range(number):
            own = [group + index * GROUP for group in groups]
            if ahead is not None:
                for group in own:
                    group.prefetch(ahead)
            _add_group(target, own, [row + index * GROUP_WORDS for row in rows], sums)

    with k.range(0, whole, unrolled * GROUP) as at:
        accumulate(at, unrolled)
    if unrolled > 1:
        with k.range(whole, size, GROUP) as at:
            accumulate(at, 1)
    return [add_lanes([total.value for total in row], target.lanes) for row in sums]


def _add_group(
    target: Target,
    groups: list[IntegerPointer],
    xs: list[Pointer],
    sums: list[list[Variable]],
) -> None:
    """Add the products of a group of columns to the sums of each x with each weight."""
    lanes = target.lanes
    for lane in range(0, GROUP // 4, lanes):
        columns = [_codes(group, 4 * lane, 4 * lanes, target) for group in groups]
        for x, row in zip(xs, sums, strict=True):
            own = x + lane
            codes = own.vector(0, lanes).bits(INT8, 4 * lanes)
            first = (own + SUMS).vector(0, lanes).bits(INT32)
            scales = (own + SCALES).vector(0, lanes)
            for group, column, total in zip(groups, columns, row, strict=True):
                products = dot(target, group.bits, first, column, codes).to_float()
                total.value = group.scale.fma(products * scales, total.value)


def _codes(group: IntegerPointer, first: int, count: int, target: Target) -> Value:
    """Return codes of a group as bytes, with their offset."""
    if group.bits == 8:
        codes = group.codes.vector(first, count)
        return codes ^ 128 if _has_vnni(target) else codes
    both = group.codes.vector(0, GROUP // 2)
    if count == GROUP // 2:
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
