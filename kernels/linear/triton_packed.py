"""Products with packed integers of 4 or 8 bits (`penstock.kernels.quantize.packed`) in Triton.

The weights are the rows of a tile and the rows of x its columns, so that a product of one row
wastes few columns of the tensor cores. Codes become 16 bits in registers: of 4 bits by writing them
into the mantissa of 128 or 1024, two at a time. A sum over the columns of a group is exact in the
integers, and multiplied by the scale in float32.
"""

import triton
import triton.language as tl

from penstock.kernels.linear.triton_epilogue import load_residual, merge, store_result
from penstock.kernels.quantize import packed
from penstock.kernels.triton_pdl import PDL, launch_dependents, prefetch, wait

BLOCK = tl.constexpr(packed.BLOCK)
ZERO_BITS = tl.constexpr(packed.ZERO_BITS)
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter has no assembly
PREFETCH = tl.constexpr(4)  # blocks of columns of a tile that are read before previous kernels end


@triton.jit
def _prefetch(words, groups, rows, begin, end, R, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Prefetch the first blocks of columns [begin, end) of rows into the L2."""
    if PDL:
        column = tl.minimum(begin + tl.arange(0, PREFETCH) * BLOCK, end - 1)[:, None]
        prefetch(words + (rows + column // BLOCK * R) * (4 * BITS))
        prefetch(groups + rows + column // GROUP * R)


@triton.jit
def _pairs(words, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of words [BN, W] as two numbers of 16 bits: int32 [BN, W, 16 / BITS].

    Of 4 bits, a number is 128 + code in bfloat16, 1024 + code in float16; of 8 bits, it is the
    code as an integer.
    """
    if BITS == 8:
        return tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF)
    else:
        SHIFT: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        if ASSEMBLY:  # a compiler does not keep both constants in registers
            a, b, c, d = tl.inline_asm_elementwise(
                "{ .reg .b32 mask, shift, word; mov.b32 mask, 0x000F000F; mov.b32 shift, $5; "
                "lop3.b32 $0, $4, mask, shift, 0xEA; shr.u32 word, $4, 4; "
                "lop3.b32 $1, word, mask, shift, 0xEA; shr.u32 word, $4, 8; "
                "lop3.b32 $2, word, mask, shift, 0xEA; shr.u32 word, $4, 12; "
                "lop3.b32 $3, word, mask, shift, 0xEA; }",
                "=r,=r,=r,=r,r,r", [words, tl.full(words.shape, SHIFT, tl.int32)],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b = words & 0x000F000F | SHIFT, (words >> 4) & 0x000F000F | SHIFT
            c, d = (words >> 8) & 0x000F000F | SHIFT, (words >> 12) & 0x000F000F | SHIFT
        both = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.reshape(both, (words.shape[0], words.shape[1], 4))


@triton.jit
def _minus(pairs, shift, dtype: tl.constexpr):
    """Subtract shift [BN] from both numbers of 16 bits in pairs [BN, W, P]."""
    if ASSEMBLY:
        bits = (-shift).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        both = (bits | bits << 16)[:, None, None]
        KIND: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        ONE: tl.constexpr = "0x3F803F80" if dtype == tl.bfloat16 else "0x3C003C00"
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, " + ONE + "; fma.rn." + KIND + " $0, $1, one, $2; }",
            "=r,r,r", [pairs, both], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    if not ASSEMBLY:
        low, high = low - shift[:, None, None], high - shift[:, None, None]
    return low, high


@triton.jit
def integers(words, zero, dtype: tl.constexpr, BITS: tl.constexpr, SYNC: tl.constexpr = False):
    """Return code - zero of words [BN, W], in dtype: [BN, columns].

    zero: float32 [BN]. SYNC: columns in the order of `_for_sync`.
    """
    BN: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    pairs = _pairs(words, dtype, BITS)
    if BITS == 4:
        low, high = _minus(pairs, (zero + (128 if dtype == tl.bfloat16 else 1024)).to(dtype), dtype)
    else:
        low = ((pairs & 0xFF).to(tl.float32) - zero[:, None, None]).to(dtype)
        high = ((pairs >> 16).to(tl.float32) - zero[:, None, None]).to(dtype)
    both = tl.join(low, high)
    if SYNC:
        numbers = tl.reshape(both, (BN, W // 4, 4, 8 // BITS, 2, 2))  # r, c, half of p, p, h
        numbers = tl.permute(numbers, (0, 1, 3, 2, 4, 5))
    else:
        numbers = tl.permute(tl.reshape(both, (BN, W // 4, 4, 16 // BITS, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(numbers, (BN, W * 32 // BITS))


@triton.jit
def _for_sync(x_tile, BITS: tl.constexpr):
    """Return x_tile [BK, BM] with its columns in the order of synchronous tensor cores.

    There a thread has four adjacent columns of the product. Those of a word are two pairs, eight
    columns apart: the order of all columns changes, and the sums are the same.
    """
    BK: tl.constexpr = x_tile.shape[0]
    BM: tl.constexpr = x_tile.shape[1]
    HALVES: tl.constexpr = 8 // BITS
    tile = tl.reshape(x_tile, (BK // (16 * HALVES), HALVES, 2, 4, 2, BM))
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4, 5)), (BK, BM))


@triton.jit
def _group(words):
    """Return scale and zero point of groups' words, in float32."""
    factor = (words & ~ZERO_BITS).to(tl.float32, bitcast=True)
    return factor, (words & ZERO_BITS).to(tl.float32)


@triton.jit
def _scaled(
    x_tile, acc, words, group, rows, step, R,
    BITS: tl.constexpr, BK: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Return acc plus the product of the BK columns of a step. group: words of groups, [BN]."""
    WORDS: tl.constexpr = BK * BITS // 32
    block = step * BK // BLOCK
    at = rows * (4 * BITS) + block * (R * (4 * BITS)) + (step * BK - block * BLOCK) * BITS // 32
    tile = tl.load(words + at[:, None] + tl.arange(0, WORDS)[None, :])
    factor, zero = _group(group)
    weight = integers(tile, zero, x_tile.dtype, BITS, SYNC)
    return acc + tl.dot(weight, x_tile, input_precision="ieee") * factor[:, None]


@triton.jit
def _x_tile(x_at, x_exists, order, step, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """Return the columns of x of a step, [BK, BM]; zeros from column K on."""
    column = step * BK + tl.arange(0, BK)[:, None]
    exists = x_exists
    if not EVEN:
        exists = exists & (column < K)
    if order is not None:
        column = tl.load(order + column, column < K, 0)
    return tl.load(x_at + column, exists, 0.0)


@triton.jit
def _groups(
    groups, rows, step, end, R,
    GROUP: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the words of the groups of one or two steps, each [BN].

    Two are loaded together: the compiler loads fewer numbers than a program has threads twice, once
    without copying ahead.
    """
    if STEPS == 1:
        return (tl.load(groups + rows + step * BK // GROUP * R),)
    else:
        steps = step + tl.arange(0, 2)[None, :]
        if not EVEN:
            steps = tl.minimum(steps, end - 1)
        return tl.split(tl.load(groups + rows[:, None] + steps * BK // GROUP * R))


@triton.jit
def packed_sums(
    x_at, x_exists, words, groups, order, rows, begin, end, N, R, K,
    SWIGLU: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SYNC: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Return sums over steps [begin, end), [BN, BM]: of gate (or the only product), and of up.

    x_at: addresses of x's rows, [1, BM]. rows: of the weight, [BN], of R; up's are N further on.
    GROUP: columns with one scale, a multiple of BK, the columns of a step. EVEN: the STEPS of an
    iteration divide K.
    SYNC: the tensor cores are synchronous ones.
    """
    acc = tl.zeros((rows.shape[0], BM), tl.float32)
    acc_up = acc
    for first in tl.range(begin, end, STEPS):
        words_of_groups = _groups(groups, rows, first, end, R, GROUP, BK, EVEN, STEPS)
        ups = words_of_groups
        if SWIGLU:
            ups = _groups(groups, rows + N, first, end, R, GROUP, BK, EVEN, STEPS)
        for n in tl.static_range(STEPS):
            x_tile = _x_tile(x_at, x_exists, order, first + n, K, BK, EVEN)
            x_tile = _for_sync(x_tile, BITS) if SYNC else x_tile
            step = first + n if EVEN else tl.minimum(first + n, end - 1)
            acc = _scaled(x_tile, acc, words, words_of_groups[n], rows, step, R, BITS, BK, SYNC)
            if SWIGLU:
                acc_up = _scaled(x_tile, acc_up, words, ups[n], rows + N, step, R, BITS, BK, SYNC)
    return acc, acc_up


@triton.jit(do_not_specialize=["num_rows"])
def packed_gemm_kernel(
    x, words, groups, order, residual, out, partials, counters, num_rows, N, K,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, RANGES: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr, SYNC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of BM rows of out over one range of the inner dimension, or over RANGES.

    SPLIT: programs on axis 1 are ranges. Programs on axis 2 have other rows of x. EARLY: the next
    kernel may overlap this kernel.
    """
    if EARLY:
        launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1)
    num_steps = tl.cdiv(K, BK)
    share = tl.cdiv(tl.cdiv(num_steps, 2), tl.num_programs(1) * RANGES) * 2  # for any STEPS
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, num_steps)
    row = tl.program_id(2) * BM + tl.arange(0, BM)[None, :]
    R = 2 * N if SWIGLU else N
    _prefetch(words, groups, rows, begin * BK, end * BK, R, GROUP, BITS)
    if SWIGLU:
        _prefetch(words, groups, rows + N, begin * BK, end * BK, R, GROUP, BITS)
    wait()
    acc, acc_up = packed_sums(
        x + row.to(tl.int64) * K, row < num_rows, words, groups, order, rows,
        begin, end, N, R, K, SWIGLU, GROUP, BITS, BM, BK, EVEN, SYNC, STEPS,
    )  # fmt: skip
    if RANGES > 1:
        for number in tl.range(1, RANGES):
            other, other_up = packed_sums(
                x + row.to(tl.int64) * K, row < num_rows, words, groups, order, rows,
                number * share, tl.minimum((number + 1) * share, num_steps), N, R, K,
                SWIGLU, GROUP, BITS, BM, BK, EVEN, SYNC, STEPS,
            )  # fmt: skip
            acc += other
            acc_up += other_up
    exists = (row < num_rows) & (column < N)[:, None]
    at = row.to(tl.int64) * N + column[:, None]
    if SPLIT:
        merge(
            acc, acc_up, 0.0, 1.0, 1.0, partials, counters, residual, out,
            at, row, exists, num_rows.to(tl.int64) * N, num_rows, K, 0.0, False, SWIGLU, ADD,
        )  # fmt: skip
    else:
        more = load_residual(residual, at, exists, ADD)
        store_result(acc, acc_up, 1.0, 1.0, 1.0, more, out, at, exists, SWIGLU)


@triton.jit
def dequantize_kernel(
    words, groups, order, out, R, K,
    GROUP: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the numbers of BN rows and BK columns, of one group, in each program."""
    launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(row, R - 1)
    first = tl.program_id(1) * BK
    word = tl.arange(0, BK * BITS // 32)
    block = first // BLOCK
    at = (rows + block * R) * (4 * BITS) + (first - block * BLOCK) * BITS // 32
    tile = tl.load(words + at[:, None] + word[None, :])
    factor, zero = _group(tl.load(groups + rows + first // GROUP * R))
    column = first + tl.arange(0, BK)
    exists = (row < R)[:, None] & (column < K)[None, :]
    if order is not None:
        column = tl.load(order + column, column < K, 0)
    if out.dtype.element_ty == tl.bfloat16:
        weight = integers(tile, zero, tl.bfloat16, BITS)
    else:
        weight = integers(tile, zero, tl.float16, BITS)
    numbers = weight.to(tl.float32) * factor[:, None]
    wait()
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(out + place, numbers.to(out.dtype.element_ty), exists)
