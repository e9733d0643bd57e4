"""Products of any number of rows with weights in 8 bits, widened to x's type in registers.

For GPUs whose tensor cores don't multiply 8 bits; elsewhere x is quantized too (`linear`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.linear.triton_block_scales import GROUP, place_of_tile
from penstock.kernels.linear.triton_small_m_gemm import weight_tile
from penstock.kernels.quantize.triton_e4m3 import as_operand
from penstock.kernels.quantize.types import Quantized
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

FEW_ROWS = 32
# tile sizes of experts in 8 bits, measured on an H200; they take 32 KB of shared memory
BN, BK, NUM_WARPS, NUM_STAGES = 128, 64, 4, 3


def weight_only_product(
    x: Tensor, weight: Quantized, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `x @ weight.T`; x [num_rows, K], weight [N, K]; out_dtype: default x's.

    out: memory of the result. All tensors are contiguous.
    """
    (num_rows, inner), num_columns = x.shape, len(weight)
    if out is None:
        out = x.new_empty(num_rows, num_columns, dtype=out_dtype)
    bm = 16 if num_rows <= FEW_ROWS else 64
    tiles = triton.cdiv(num_rows, bm) * triton.cdiv(num_columns, BN)
    if tiles:
        _weight_only_kernel[(tiles,)](
            x, as_operand(weight.values), weight.scale, out, num_rows, num_columns, inner,
            BM=bm, BN=BN, BK=BK, GROUP=GROUP, EVEN=inner % BK == 0, BLOCKS=weight.in_blocks,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _weight_only_kernel(
    x, weight, scale, out, num_rows, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out in each program; scale: of weight's rows, or its blocks."""
    launch_dependents()
    first_row, first = place_of_tile(num_rows, N, BM, BN, GROUP)
    row, column = first_row + tl.arange(0, BM), first + tl.arange(0, BN)
    weight_row = tl.minimum(column, N - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight + weight_row[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    wait()
    for begin in tl.range(0, K, BK):
        inside = begin + k[None, :] < K
        exists = row[:, None] < num_rows
        x_tile = tl.load(x_at + begin, exists if EVEN else exists & inside, 0.0)
        tile = weight_tile(
            weight_at + begin, inside, scale, weight_row, begin, K, EVEN, BLOCKS, BK, 1
        )
        acc = tl.dot(x_tile, tile.to(x_tile.dtype).T, acc, input_precision="ieee")
    if not BLOCKS:
        acc *= tl.load(scale + weight_row)[None, :]
    exists = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)
