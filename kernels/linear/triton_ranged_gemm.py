"""Products of many rows with the sums, in their order, of `triton_small_m_gemm`.

There, each range of the inner dimension has a warp, or a program, and the last one adds the ranges.
Here one program computes all ranges of a tile, one after the other, and adds each to the total.
"""

import triton
import triton.language as tl

from penstock.kernels.linear.triton_block_scales import place_of_tile
from penstock.kernels.linear.triton_epilogue import (
    load_residual,
    load_scales,
    norm_factor,
    store_result,
)
from penstock.kernels.linear.triton_small_m_gemm import in_turn, scaled, weight_tile
from penstock.kernels.triton_pdl import launch_dependents, wait

RANGES = tl.constexpr(4)  # ranges of a small weight
ROWS = tl.constexpr(16)  # rows of a tile of tensor cores


@triton.jit
def _range(
    x_at, weight_at, scale, weight_row, begin, end, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return sums over [begin, end): of gate (or the only product) and of up."""
    k = tl.arange(0, BK)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for first in tl.range(begin, end, BK):
        inside = first + k < end
        x_tile = tl.load(x_at + first) if EVEN else tl.load(x_at + first, inside, 0.0)
        tile = weight_tile(
            weight_at + first, inside, scale, weight_row, first, K, EVEN, BLOCKS, BK, 1
        )
        acc = tl.dot(x_tile, _narrowed(tile, x_tile).T, acc, input_precision="ieee")
        if SWIGLU:
            up_at, up_row = weight_at + N * K + first, weight_row + N
            up = weight_tile(up_at, inside, scale, up_row, first, K, EVEN, BLOCKS, BK, 1)
            acc_up = tl.dot(x_tile, _narrowed(up, x_tile).T, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def _ranges_in_one_loop(
    x_at, weight_at, range_size, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the totals of all ranges as `_range`, without a new pipeline for each range."""
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up, total, total_up = acc, acc, acc
    for first in tl.range(0, K, BK):
        x_tile = tl.load(x_at + first)
        acc = tl.dot(x_tile, tl.load(weight_at + first).T, acc, input_precision="ieee")
        is_end = (first + BK) % range_size == 0
        total = tl.where(is_end, total + acc, total)
        if SWIGLU:
            up = tl.load(weight_at + N * K + first)
            acc_up = tl.dot(x_tile, up.T, acc_up, input_precision="ieee")
            total_up = tl.where(is_end, total_up + acc_up, total_up)
            acc_up = tl.where(is_end, 0.0, acc_up)
        acc = tl.where(is_end, 0.0, acc)
    return total, total_up


@triton.jit
def _narrowed(tile, x_tile):
    """Return weights in x's type, as the kernel of few rows converts them."""
    if tile.dtype != x_tile.dtype:
        tile = tile.to(tl.float32).to(x_tile.dtype)
    return tile


@triton.jit(do_not_specialize=["num_rows"])
def ranged_gemm_kernel(
    x, factors, weight, scale, residual, out, num_rows, N, K, range_size,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, HAS_RANGES: tl.constexpr, ONE_LOOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out in each program; HAS_RANGES: the inner dimension has several.

    factors: [num_rows], of the norm, optional. ONE_LOOP: for small tiles of weights in 16 bits. The
    other arguments are those of `small_m_gemm_kernel`.
    """
    launch_dependents()
    first_row, first_column = place_of_tile(num_rows, N, BM, BN, GROUP)
    row, column = first_row + tl.arange(0, BM), first_column + tl.arange(0, BN)
    weight_row = tl.minimum(column, N - 1).to(tl.int64)
    k = tl.arange(0, BK)[None, :]
    x_at = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * K + k
    weight_at = weight + weight_row[:, None] * K + k
    gate_scale, up_scale = load_scales(scale, column[None, :], N, SWIGLU, BLOCKS)
    wait()
    total = tl.zeros((BM, BN), tl.float32)
    total_up = total
    if ONE_LOOP:
        total, total_up = _ranges_in_one_loop(x_at, weight_at, range_size, N, K, SWIGLU, BM, BN, BK)
    elif HAS_RANGES:
        for begin in tl.range(0, K, range_size):
            acc, acc_up = _range(
                x_at, weight_at, scale, weight_row, begin, begin + range_size, N, K,
                SWIGLU, BM, BN, BK, EVEN, BLOCKS,
            )  # fmt: skip
            total += acc
            if SWIGLU:
                total_up += acc_up
    else:
        total, total_up = _range(
            x_at, weight_at, scale, weight_row, 0, K, N, K, SWIGLU, BM, BN, BK, EVEN, BLOCKS
        )
    exists = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    more = load_residual(residual, at, exists, ADD)
    norm = 1.0
    if factors is not None:
        norm = tl.load(factors + row, row < num_rows, 0.0)[:, None]
    store_result(total, total_up, norm, gate_scale, up_scale, more, out, at, exists, SWIGLU)


@triton.jit
def _offsets(range_size, BK: tl.constexpr):
    """Return the first BK places of each range of the inner dimension, [RANGES, 1, BK]."""
    ranges = tl.arange(0, RANGES)[:, None, None] * range_size
    return ranges + tl.arange(0, BK)[None, None, :]


@triton.jit
def _scaled_rows(x, norm_weight, k, row, num_rows, squares, K):
    """Return a tile of x times the norm's weight, and the sums of its squares."""
    tile = tl.load(x + row.to(tl.int64) * K + k, row < num_rows, 0.0)
    return scaled(tile, tl.load(norm_weight + k), squares, True, k.shape[2], RANGES)


@triton.jit(do_not_specialize=["num_rows"])
def scaled_rows_kernel(
    x, norm_weight, out, factors, num_rows, K, range_size, eps,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write x times the norm's weight, and the norm's factor of each row, BM rows a program."""
    launch_dependents()
    wait()
    place = tl.arange(0, ROWS)
    row = tl.where(place < BM, tl.program_id(0) * BM + place, num_rows)
    rows = row[None, :, None]
    squares = tl.zeros((RANGES, ROWS, 8), tl.float32)
    for begin in tl.range(0, range_size, BK):
        k = begin + _offsets(range_size, BK)
        tile, squares = _scaled_rows(x, norm_weight, k, rows, num_rows, squares, K)
        tl.store(out + rows.to(tl.int64) * K + k, tile, rows < num_rows)
    norm = norm_factor(tl.max(in_turn(squares), 1), K, eps, True)
    tl.store(factors + row, norm, row < num_rows)
