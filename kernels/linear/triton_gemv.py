"""One row of x times the weights, without tensor cores."""

import triton
import triton.language as tl

from penstock.kernels.linear.triton_epilogue import (
    load_residual,
    load_scales,
    norm_factor,
    store_result,
)
from penstock.kernels.linear.triton_small_m_gemm import load, weight_tile
from penstock.kernels.triton_pdl import launch_dependents, prefetch_rows, wait


@triton.jit
def _row(x, norm_weight, k, inside, NORM: tl.constexpr, EVEN: tl.constexpr):
    row = load(x + k, inside, EVEN).to(tl.float32)
    squares = row * row
    if NORM:
        row *= load(norm_weight + k, inside, EVEN).to(tl.float32)
    return row, squares


@triton.jit
def _row_products(
    x, norm_weight, weight, scale, rows, N, K,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return unreduced sums of gate (or the only product) and up [BN, BK], of x's squares [BK]."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = acc
    squares = tl.zeros((BK,), tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        inside = first + k < K
        row, more = _row(x, norm_weight, first + k, inside, NORM, EVEN)
        squares += more
        at = weight + rows[:, None] * K + (first + k)[None, :]
        tile = weight_tile(at, inside[None, :], scale, rows, first, K, EVEN, BLOCKS, BK, 1)
        acc += tile.to(tl.float32) * row[None, :]
        if SWIGLU:
            at = weight + (rows + N)[:, None] * K + (first + k)[None, :]
            up = weight_tile(at, inside[None, :], scale, rows + N, first, K, EVEN, BLOCKS, BK, 1)
            acc_up += up.to(tl.float32) * row[None, :]
    return acc, acc_up, squares


@triton.jit
def gemv_kernel(
    x, norm_weight, weight, scale, residual, out, N, K, eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of out in each program.

    WHOLE: BK >= K, and all loads are in flight, those of the weights before previous kernels end.
    """
    launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1).to(tl.int64)
    gate_scale, up_scale = load_scales(scale, column, N, SWIGLU, BLOCKS)
    if WHOLE:
        k = tl.arange(0, BK)
        inside = k < K
        at = weight + rows[:, None] * K + k[None, :]
        tile = weight_tile(at, inside[None, :], scale, rows, 0, K, EVEN, BLOCKS, BK, 1)
        up = tile
        if SWIGLU:
            at = weight + (rows + N)[:, None] * K + k[None, :]
            up = weight_tile(at, inside[None, :], scale, rows + N, 0, K, EVEN, BLOCKS, BK, 1)
        factor = 1.0
        if NORM:
            factor = load(norm_weight + k, inside, EVEN).to(tl.float32)
        wait()
        row = load(x + k, inside, EVEN).to(tl.float32)
        more = load_residual(residual, column, column < N, ADD)
        squares = row * row
        row *= factor
        acc, acc_up = tile.to(tl.float32) * row[None, :], up.to(tl.float32) * row[None, :]
    else:
        if PREFETCH:
            prefetch_rows(weight, rows, 0, K, K, PREFETCH)
            if SWIGLU:
                prefetch_rows(weight, rows + N, 0, K, K, PREFETCH)
        wait()
        more = load_residual(residual, column, column < N, ADD)
        acc, acc_up, squares = _row_products(
            x, norm_weight, weight, scale, rows, N, K, NORM, SWIGLU, BN, BK, STAGES, EVEN, BLOCKS
        )
    acc, acc_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    norm = norm_factor(tl.sum(squares, 0), K, eps, NORM)
    at, exists = column, column < N
    store_result(acc, acc_up, norm, gate_scale, up_scale, more, out, at, exists, SWIGLU)
