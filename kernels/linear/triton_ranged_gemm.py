"""Products of many rows with the sums, in their order, of `triton_small_m_gemm` with split-K.

There, each range of the inner dimension has a program, and the last program adds the ranges. Here
one program computes all ranges of a tile, one after the other, and adds each to the total.
"""

import triton
import triton.language as tl

from penstock.kernels.linear.triton_block_scales import place_of_tile
from penstock.kernels.linear.triton_small_m_gemm import (
    load_residual,
    load_scales,
    store_result,
    weight_tile,
)
from penstock.kernels.triton_pdl import launch_dependents, wait


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
def _narrowed(tile, x_tile):
    """Return weights in x's type, as the kernel of few rows converts them."""
    if tile.dtype != x_tile.dtype:
        tile = tile.to(tl.float32).to(x_tile.dtype)
    return tile


@triton.jit(do_not_specialize=["num_rows"])
def ranged_gemm_kernel(
    x, weight, scale, residual, out, num_rows, N, K, range_size,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, RANGES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out in each program; RANGES: the inner dimension has several.

    The other arguments are those of `small_m_gemm_kernel`.
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
    if RANGES:
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
    store_result(total, total_up, 1.0, gate_scale, up_scale, more, out, at, exists, SWIGLU)
