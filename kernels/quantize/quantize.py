"""Quantization to 8 bits, by rows or by blocks."""

from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.elementwise.elementwise import rms_norm, silu_and_mul
from penstock.kernels.quantize.types import BLOCK, FP8, LARGEST, SMALLEST, Quantized, Rows


def quantize(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, *, swiglu: bool = False
) -> Quantized:
    """Quantize x [num_rows, num_columns], `rms_norm(x)` or `silu_and_mul(x)` by rows.

    On a GPU x is contiguous and the result has at most 32768 columns.
    """
    check_tensor("x", x, (-1, -1))
    if x.is_cuda:
        from penstock.kernels.quantize import triton_quantize

        check_contiguous("x", x)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype)
        values, scale = triton_quantize.quantize(x, norm_weight, eps, swiglu)
        return Quantized(values, scale, x.dtype)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if swiglu:
        x = silu_and_mul(x)
    scale = x.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    return Quantized((x / scale[:, None]).to(FP8), scale, x.dtype)


def quantize_blocks(x: Tensor) -> Quantized:
    """Quantize x [num_rows, num_columns] by blocks of 128 by 128."""
    rows, columns = x.shape
    padded = functional.pad(x.float().abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK).amax((1, 3))
    scale = largest.clamp(min=SMALLEST) / LARGEST
    unit = Quantized(x.new_ones(x.shape), scale).dequantized()
    return Quantized((x / unit).to(FP8), scale)


def copy_into(target: Rows, source: Rows) -> None:
    """Copy `source` into `target`, quantizing a tensor if `target` is a `Quantized`."""
    if isinstance(target, Tensor):
        target.copy_(source if isinstance(source, Tensor) else source.dequantized())
        return
    if isinstance(source, Tensor):
        source = source.to(target.device).contiguous()
        source = quantize_blocks(source) if target.in_blocks else quantize(source)
    target.values.copy_(source.values)
    target.scale.copy_(source.scale)
