"""SwiGLU's activation in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

BLOCK = 1024
NUM_WARPS = 4
"""so that a thread reads 16 bytes of bfloat16 from gate and from up"""


def silu_and_mul(x: Tensor) -> Tensor:
    """x contiguous [num_tokens, 2 * size] → [num_tokens, size]."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, size)
    num_programs = num_tokens * triton.cdiv(size, BLOCK)
    if num_programs:
        _silu_and_mul_kernel[(num_programs,)](x, out, size, BLOCK, num_warps=NUM_WARPS, **LAUNCH)
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK columns of one token."""
    launch_dependents()
    wait()
    programs_per_token: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // programs_per_token).to(tl.int64)
    columns = tl.program_id(0) % programs_per_token * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * 2 * SIZE + columns, mask, 0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * SIZE + SIZE + columns, mask, 0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask)
