"""The gated norm after the delta rule, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

NUM_WARPS = 4
ELEMENTS = 1024  # of a program


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `penstock.kernels.recurrent.delta_rule.gated_rms_norm` on a GPU.

    x: contiguous [num_tokens, heads, size]. z: the same shape, with any stride of tokens.
    """
    num_tokens, heads, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    rows = max(1, ELEMENTS // block)
    if num_tokens:
        grid = (triton.cdiv(num_tokens * heads, rows),)
        _gated_norm_kernel[grid](
            x, z, z.stride(0), weight, out, num_tokens * heads, eps, heads, size,
            block, rows, num_warps=NUM_WARPS, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, z_ptr, z_stride, weight_ptr, out_ptr, num_rows, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS heads of SIZE values, padded to BLOCK, in each program."""
    launch_dependents()
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, columns < SIZE, 0).to(tl.float32)
    wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask = (row < num_rows) & (columns < SIZE)
    x = tl.load(x_ptr + row * SIZE + columns, mask, 0).to(tl.float32)
    z_at = row // HEADS * z_stride + row % HEADS * SIZE + columns
    z = tl.load(z_ptr + z_at, mask, 0).to(tl.float32)
    mean_square = tl.sum(x * x, 1, keep_dims=True) / SIZE
    # rounded before and after the multiplication by the weight, as the models' own code does
    dtype = out_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(mean_square + eps)).to(dtype).to(tl.float32)
    normed = (normed * weight).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (normed * (z / (1 + tl.exp(-z)))).to(dtype), mask)
