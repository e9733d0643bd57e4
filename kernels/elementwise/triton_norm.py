"""RMSNorm in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

MAX_SIZE = 16384
"""columns of a row, which a program holds in registers"""
TILE = 1024
"""elements that a program takes at least: several rows, where they are short"""
ELEMENTS_PER_WARP = 256
"""16 bytes of bfloat16 for each thread"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x contiguous [num_rows, size], weight [size]; ValueError if size is above MAX_SIZE."""
    num_rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"x has {size} columns; at most {MAX_SIZE} are possible")
    out = torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(size)
        rows = max(1, TILE // block)
        num_warps = min(16, rows * block // ELEMENTS_PER_WARP)
        grid = (triton.cdiv(num_rows, rows),)
        _rms_norm_kernel[grid](
            x, weight, out, num_rows, eps, size, block, rows, num_warps=num_warps, **LAUNCH
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows of SIZE columns, filled up to BLOCK."""
    launch_dependents()
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, columns < SIZE, 0).to(tl.float32)
    wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = rows.to(tl.int64) * SIZE + columns
    mask = (rows < num_rows) & (columns < SIZE)
    x = tl.load(x_ptr + offsets, mask, 0).to(tl.float32)
    mean_square = tl.sum(x * x, 1, keep_dims=True) / SIZE
    # rounded before the weight, as Qwen3's own implementation does
    normed = (x * tl.rsqrt(mean_square + eps)).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offsets, (normed * weight).to(out_ptr.dtype.element_ty), mask)
