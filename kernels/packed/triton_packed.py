"""Products with packed integers (`penstock.kernels.packed.matrices`) in Triton, also for experts.

One kernel multiplies few rows. With more rows, the weights are dequantized for cuBLAS. Reading the
weights takes nearly all of the time of few rows. The inner dimension is split so that each SM has
several programs.

A tile's rows are rows of the weight, and its columns are rows of x, so that a product of one row
wastes few columns of the tensor cores. Codes become 16 bits in registers. A 4-bit code is written
into the mantissa of 128 or 1024, two codes at a time. The sum over a group's columns is exact in
the integers, and is multiplied by the scale in float32.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.back_ends import is_deterministic
from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.packed import BLOCK, ZERO_BITS, PackedTensors
from penstock.kernels.linear.small_m_gemm import EARLY, MAX_TILES, workspace
from penstock.kernels.linear.tile_sizes import MAX_PARTIALS
from penstock.kernels.linear.triton_small_m_gemm import (
    MAX_SPLIT_K,
    load_residual,
    merge,
    store_result,
)
from penstock.kernels.triton_elementwise import rms_norm
from penstock.kernels.triton_pdl import LAUNCH, PDL, launch_dependents, prefetch, wait
from penstock.kernels.triton_route import TILE

_BLOCK, _ZERO_BITS = tl.constexpr(BLOCK), tl.constexpr(ZERO_BITS)
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter lacks assembly
PREFETCH = tl.constexpr(4)  # blocks of a tile's columns that are read before previous kernels end


@triton.jit
def _prefetch(words, groups, rows, begin, end, R, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Prefetch the first blocks of columns [begin, end) of rows into the L2."""
    if PDL:
        column = tl.minimum(begin + tl.arange(0, PREFETCH) * _BLOCK, end - 1)[:, None]
        prefetch(words + (rows + column // _BLOCK * R) * (4 * BITS))
        prefetch(groups + rows + column // GROUP * R)


@triton.jit
def _pairs(words, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of words [BN, W] as pairs of 16-bit numbers: int32 [BN, W, 16 / BITS].

    With 4 bits, a number is 128 + code in bfloat16, or 1024 + code in float16. With 8 bits, it is
    the code as an integer.
    """
    if BITS == 8:
        return tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF)
    else:
        SHIFT: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        if ASSEMBLY:  # the compiler does not keep both constants in registers
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
    """Subtract shift [BN] from both 16-bit numbers of the pairs [BN, W, P]."""
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
    """Return code - zero for words [BN, W], in dtype: [BN, columns].

    zero: float32 [BN]. SYNC: order the columns as `_for_sync` does.
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

    There, a thread has four adjacent columns of the product. The columns of a word are two pairs,
    eight columns apart. Reordering all columns does not change the sums.
    """
    BK: tl.constexpr = x_tile.shape[0]
    BM: tl.constexpr = x_tile.shape[1]
    HALVES: tl.constexpr = 8 // BITS
    tile = tl.reshape(x_tile, (BK // (16 * HALVES), HALVES, 2, 4, 2, BM))
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4, 5)), (BK, BM))


@triton.jit
def _group(words):
    """Return the scales and zero points of groups' words, in float32."""
    factor = (words & ~_ZERO_BITS).to(tl.float32, bitcast=True)
    return factor, (words & _ZERO_BITS).to(tl.float32)


@triton.jit
def _scaled(
    x_tile, acc, words, group, rows, step, R,
    BITS: tl.constexpr, BK: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Return acc plus the product of the BK columns of a step; group: the groups' words, [BN]."""
    WORDS: tl.constexpr = BK * BITS // 32
    block = step * BK // _BLOCK
    at = rows * (4 * BITS) + block * (R * (4 * BITS)) + (step * BK - block * _BLOCK) * BITS // 32
    tile = tl.load(words + at[:, None] + tl.arange(0, WORDS)[None, :])
    factor, zero = _group(group)
    weight = integers(tile, zero, x_tile.dtype, BITS, SYNC)
    return acc + tl.dot(weight, x_tile, input_precision="ieee") * factor[:, None]


@triton.jit
def _x_tile(x_at, x_exists, order, step, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """Return the columns of x of a step, [BK, BM], with zeros from column K."""
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

    Two steps are loaded together: if a load has fewer numbers than the program has threads, the
    compiler issues it twice, once without copying ahead.
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
    """Return sums over steps [begin, end), [BN, BM], of gate (or of the only product), and of up.

    x_at: addresses of x's rows, [1, BM]. rows: [BN], indices of the weight's R rows; the rows of up
    are N further. GROUP: columns with one scale, a multiple of BK, the columns of a step. EVEN: the
    STEPS of an iteration divide K. SYNC: the tensor cores are synchronous.
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
    """Compute BN columns of BM rows of out in each program.

    A program computes one range of the inner dimension, or RANGES ranges. SPLIT: programs on axis 1
    are ranges. Programs on axis 2 have other rows of x. EARLY: the next kernel may overlap this
    kernel.
    """
    if EARLY:
        launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1)
    num_steps = tl.cdiv(K, BK)
    share = tl.cdiv(tl.cdiv(num_steps, 2), tl.num_programs(1) * RANGES) * 2  # valid for any STEPS
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
    """Store the numbers of BN rows and BK columns of one group in each program."""
    launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(row, R - 1)
    first = tl.program_id(1) * BK
    word = tl.arange(0, BK * BITS // 32)
    block = first // _BLOCK
    at = (rows + block * R) * (4 * BITS) + (first - block * _BLOCK) * BITS // 32
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


# rows; up to this number reading the weights once per 64 rows is faster than dequantizing them
MAX_ROWS = 128
BN = 64  # rows of a weight tile, as in an asynchronous product of compute capability 9.0
# rows of a tile → programs of products with one and with two weights, measured on an H200
PROGRAMS_PER_SM = {8: (4, 3), 16: (3, 3), 32: (2, 2), 64: (2, 2)}
MAX_STAGES = {8: (5, 3), 16: (4, 3), 32: (3, 3), 64: (3, 3)}  # rows of a tile → stages, as above
MIN_STEPS = 4  # minimum steps of a program if the inner dimension is split


class PackedTile(NamedTuple):
    """Tile sizes of a product."""

    bm: int  # rows of x
    bk: int  # columns of a step, all of one group
    split_k: int
    num_stages: int
    num_warps: int
    steps: int = 2  # steps of an iteration, 1 or 2


def is_synchronous(device: Device) -> bool:
    """Return whether Triton uses synchronous tensor cores."""
    return device.capability[0] not in (9, 10)


def min_tile_rows(device: Device) -> int:
    """Return the minimum rows of x in a tile: Triton computes 8 with synchronous tensor cores."""
    return 8 if is_synchronous(device) else 16


def max_tile_rows(device: Device) -> int:
    """Return the maximum rows of x in a tile whose sums fit into registers.

    Synchronous tensor cores need more registers for the weights.
    """
    return 32 if is_synchronous(device) else 64


def step_columns(weight: PackedTensors) -> tuple[int, int]:
    """Return the columns of a step, and of a group in kernels: a multiple of a step's columns."""
    if weight.group_size >= weight.num_columns:
        return BLOCK, -(-weight.num_columns // BLOCK) * BLOCK
    return math.gcd(weight.group_size, BLOCK), weight.group_size


def packed_shared_bytes(bits: int, num_weights: int, tile: PackedTile) -> int:
    """Return the bytes of shared memory: the tiles in flight of a product with num_weights weights.

    Asynchronous tensor cores hold one more stage of x.
    """
    words_of_groups = num_weights * BN
    codes = num_weights * BN * tile.bk * bits // 8
    of_step = 2 * tile.bm * tile.bk + codes + 4 * words_of_groups
    return (tile.num_stages - 1) * tile.steps * of_step


def fitting(
    device: Device,
    weight: PackedTensors,
    num_weights: int,
    bm: int,
    split_k: int = 1,
    per_sm: int = 1,
) -> PackedTile:
    """Return the tile of bm rows with the most stages such that per_sm programs fit an SM.

    If not even two stages fit, the SM has fewer programs.
    """
    bk, _ = step_columns(weight)
    # Larger tiles would spill registers.
    num_warps = 8 if num_weights * bm > 64 and device.capability[0] != 9 else 4
    steps = 1 if num_weights * bm > max_tile_rows(device) else 2
    most = MAX_STAGES[bm][num_weights - 1]
    tiles = [PackedTile(bm, bk, split_k, n, num_warps, steps) for n in range(most, 1, -1)]
    more = 0 if is_synchronous(device) else steps * 2 * bm * bk

    def shared_bytes(tile: PackedTile) -> int:
        return packed_shared_bytes(weight.bits, num_weights, tile) + more

    resident = [tile for tile in tiles if per_sm * shared_bytes(tile) <= device.shared_bytes]
    return device.fitting([*resident, tiles[-1]], shared_bytes)


def choose(
    kind: str, num_rows: int, weight: PackedTensors, device: Device | None = None
) -> PackedTile | None:
    """Return tile sizes that fit the device, or None if cuBLAS is faster.

    With deterministic kernels, split_k is the same for every number of rows. kind: the kind of
    product. device: default `this_device`.
    """
    always = is_deterministic()
    if not 1 <= num_rows <= MAX_ROWS and not always:
        return None
    device = device or this_device()
    num_weights = 2 if kind == "swiglu" else 1
    num_columns = len(weight) // num_weights
    bm = max(min_tile_rows(device), triton.next_power_of_2(num_rows))
    bm = min(max_tile_rows(device), bm)
    bk, _ = step_columns(weight)
    tiles = triton.cdiv(num_columns, BN)
    split_k = 1
    per_sm = PROGRAMS_PER_SM[16 if always else bm][num_weights - 1]
    if (num_rows <= bm or always) and tiles <= MAX_TILES:
        rows = max_tile_rows(device) if always else num_rows
        steps = triton.cdiv(weight.num_columns, bk)
        wanted = per_sm * device.num_sms // tiles
        sums = rows * num_columns * num_weights + rows
        most = min(MAX_SPLIT_K.value, steps // MIN_STEPS, MAX_PARTIALS // sums)
        split_k = max(1, min(wanted, most))
    resident = min(per_sm, triton.cdiv(tiles * split_k, device.num_sms))
    return fitting(device, weight, num_weights, bm, split_k, resident)


def multiply(
    kind: str,
    x: Tensor,
    weight: PackedTensors,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: PackedTile | None = None,
) -> Tensor | None:
    """Return the result; None if cuBLAS is faster. See `small_m_gemm.multiply`.

    x is in bfloat16 or float16. tile: default `choose`.
    """
    is_logits = kind == "logits"
    if (is_logits and not is_deterministic()) or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    tile = tile or choose(kind, len(x), weight)
    if tile is None:
        return None
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    num_rows, inner = x.shape
    swiglu = kind == "swiglu"
    num_columns = len(weight) // (2 if swiglu else 1)
    if out is None:
        out = x.new_empty(num_rows, num_columns, dtype=torch.float32 if is_logits else x.dtype)
    ranges = tile.split_k if num_rows > tile.bm else 1
    is_split = tile.split_k > ranges
    partials, counters = workspace(x.device) if is_split else (None, None)
    _, group = step_columns(weight)
    grid = triton.cdiv(num_columns, BN), tile.split_k // ranges, triton.cdiv(num_rows, tile.bm)
    packed_gemm_kernel[grid](
        x, weight.words, weight.groups, weight.order, residual, out,
        partials, counters, num_rows, num_columns, inner,
        SWIGLU=swiglu, ADD=residual is not None, SPLIT=is_split, RANGES=ranges, GROUP=group,
        BITS=weight.bits, BM=tile.bm, BN=BN, BK=tile.bk, EVEN=inner % (tile.steps * tile.bk) == 0,
        EARLY=weight.words.nbytes <= EARLY, SYNC=is_synchronous(this_device()), STEPS=tile.steps,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **LAUNCH,
    )  # fmt: skip
    return out


def dequantized(weight: PackedTensors, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix on a GPU, rounded once: [num_rows, num_columns]."""
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.device)
    bk, group = step_columns(weight)
    grid = triton.cdiv(num_rows, BN), triton.cdiv(num_columns, bk)
    dequantize_kernel[grid](
        weight.words, weight.groups, weight.order, out, num_rows, num_columns,
        GROUP=group, BITS=weight.bits, BN=BN, BK=bk, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def pairs_of_tile(num_pairs: int, num_experts: int) -> int:
    """Return the number of (token, expert) pairs in a tile; most experts then have one tile."""
    per_expert = num_pairs / num_experts
    largest = max_tile_rows(this_device())
    return next((bm for most, bm in ((8, 16), (24, 32)) if per_expert <= most), largest)


def packed_grouped(
    x: Tensor, sources: Tensor, tiles: Tensor, weight: PackedTensors, swiglu: bool, bm: int
) -> Tensor:
    """Compute `triton_moe.grouped` with tiles of bm pairs."""
    inner = x.shape[1]
    columns = weight.shape[1] // (2 if swiglu else 1)
    out = x.new_empty(len(sources), columns)
    bk, group = step_columns(weight)
    tile = fitting(this_device(), weight, 2 if swiglu else 1, bm)
    grid = ((len(tiles) - 1) * triton.cdiv(columns, BN),)
    multiply_packed[grid](
        x, sources, tiles, weight.words, weight.groups, weight.order, out,
        columns, inner, SWIGLU=swiglu, GROUP=group, BITS=weight.bits, BM=bm, BN=BN, BK=bk,
        EVEN=inner % (tile.steps * bk) == 0, SYNC=is_synchronous(this_device()), STEPS=tile.steps,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def multiply_packed(
    x, sources, tiles, words, groups, order, out, N, K,
    SWIGLU: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    SYNC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of one tile's pairs, out [num_pairs, N], in each program.

    Arguments: see `penstock.kernels.triton_moe.multiply`; words, groups and order are the packed
    weight's.
    """
    wait()
    columns = tl.cdiv(N, BN)
    number = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    if number < tl.load(tiles):
        tile = tiles + (number + 1) * TILE
        expert = tl.load(tile).to(tl.int64)
        pair = tl.load(tile + 1) + tl.arange(0, BM)[None, :]
        exists = pair < tl.load(tile + 2)
        row = pair
        if SWIGLU:
            row = tl.load(sources + pair, exists, 0)
        R = 2 * N if SWIGLU else N
        words += expert * tl.cdiv(K, _BLOCK) * R * (4 * BITS)
        groups += expert * tl.cdiv(K, GROUP) * R
        if order is not None:
            order += expert * K
        acc, acc_up = packed_sums(
            x + row.to(tl.int64) * K, exists, words, groups, order,
            tl.minimum(column, N - 1), 0, tl.cdiv(K, BK), N, R, K,
            SWIGLU, GROUP, BITS, BM, BK, EVEN, SYNC, STEPS,
        )  # fmt: skip
        if SWIGLU:
            acc = acc / (1 + tl.exp(-acc)) * acc_up
        at = pair.to(tl.int64) * N + column[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), exists & (column < N)[:, None])
