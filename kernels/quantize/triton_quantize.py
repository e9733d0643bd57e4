"""Quantization to 8 bits in Triton, fused with the norm or activation before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quantize.triton_e4m3 import as_operand, narrow
from penstock.kernels.quantize.types import FP8, LARGEST, SMALLEST
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

MAX_SIZE = 32768  # columns of a row, which one program holds in registers
ELEMENTS_PER_WARP = 512
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


def quantize(
    x: Tensor, norm_weight: Tensor | None, eps: float, swiglu: bool
) -> tuple[Tensor, Tensor]:
    """Return values float8_e4m3fn [num_rows, size] and scales float32 [num_rows].

    x contiguous [num_rows, size], with swiglu [num_rows, 2 * size]; ValueError if size is above
    MAX_SIZE.
    """
    num_rows, size = x.shape[0], x.shape[1] // (2 if swiglu else 1)
    if size > MAX_SIZE:
        raise ValueError(f"x: got {size} columns, expected at most {MAX_SIZE}")
    values = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        num_warps = min(32, max(1, block // ELEMENTS_PER_WARP))
        _quantize_kernel[(num_rows,)](
            x, norm_weight, as_operand(values), scale, eps, size, block, swiglu,
            num_warps=num_warps, **LAUNCH,
        )  # fmt: skip
    return values, scale


@triton.jit
def _quantize_kernel(
    x, norm_weight, values, scale, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Quantize one row in each program."""
    launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    factor = 1.0
    if norm_weight is not None:
        factor = tl.load(norm_weight + columns, inside, 0).to(tl.float32)
    wait()
    row = tl.program_id(0).to(tl.int64)
    at = x + row * (2 * SIZE if SWIGLU else SIZE) + columns
    result = tl.load(at, inside, 0).to(tl.float32)
    if SWIGLU:
        result = result / (1 + tl.exp(-result)) * tl.load(at + SIZE, inside, 0).to(tl.float32)
    if norm_weight is not None:
        result *= tl.rsqrt(tl.sum(result * result) / SIZE + eps)
        # rounded before the weight, as Qwen3's own implementation does
        result = result.to(x.dtype.element_ty).to(tl.float32) * factor
    row_scale = tl.maximum(tl.max(tl.abs(result)), _SMALLEST) / _LARGEST
    stored = narrow(result / row_scale, values.dtype.element_ty)
    tl.store(values + row * SIZE + columns, stored, inside)
    tl.store(scale + row, row_scale)
