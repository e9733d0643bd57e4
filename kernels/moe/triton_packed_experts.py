"""Grouped products with experts of packed integers, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import this_device
from penstock.kernels.linear.packed_gemm import (
    BN,
    fitting,
    is_synchronous,
    max_tile_rows,
    step_columns,
)
from penstock.kernels.linear.triton_packed import BLOCK, packed_sums
from penstock.kernels.moe.triton_moe_kernels import TILE
from penstock.kernels.quantize.packed import Packed
from penstock.kernels.triton_pdl import LAUNCH, wait


def pairs_of_tile(num_pairs: int, num_experts: int) -> int:
    """Return the pairs of a token and an expert in a tile; most experts then have one."""
    per_expert = num_pairs / num_experts
    largest = max_tile_rows(this_device())
    return next((bm for most, bm in ((8, 16), (24, 32)) if per_expert <= most), largest)


def packed_grouped(
    x: Tensor, sources: Tensor, tiles: Tensor, weight: Packed, swiglu: bool, bm: int
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

    The arguments are those of `triton_moe_kernels.multiply`, and of a packed weight.
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
        words += expert * tl.cdiv(K, BLOCK) * R * (4 * BITS)
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
