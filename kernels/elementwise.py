"""RMSNorm, SwiGLU's activation, embedding lookup, and quantization to 8 bits by rows or blocks.

RMSNorm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; SwiGLU: Shazeer 2020,
https://arxiv.org/abs/2002.05202.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.matrices import BLOCK, FP8, LARGEST, SMALLEST, Quantized, Rows


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` on any device."""
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return (weight * (wide * torch.rsqrt(mean_square + eps)).to(weight.dtype)).to(x.dtype)


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """Compute `silu_and_mul` on any device."""
    gate, up = x.float().chunk(2, dim=-1)
    # On a CPU, torch's silu rounds elements outside a whole vector differently. Which elements
    # these are depends on the number of rows. torch.exp gives the same bits everywhere.
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `x / rms(x) * weight` over the last dimension; weight: [x.shape[-1]].

    The weight has x's dtype, to which the quotient is rounded, or float32: then only the result is
    rounded. On a GPU x is contiguous [num_rows, size] with up to 16384 columns.
    """
    check_tensor("weight", weight, (x.shape[-1],), x.dtype, torch.float32)
    if not x.is_cuda:
        return rms_norm_reference(x, weight, eps)
    from penstock.kernels import triton_elementwise

    check_tensor("x", x, (-1, -1))
    check_contiguous("x", x)
    check_contiguous("weight", weight)
    return triton_elementwise.rms_norm(x, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute `silu(gate) * up`; x [num_tokens, 2 * intermediate_size] holds gate, then up."""
    if x.shape[-1] % 2:
        raise ValueError(f"x: got {x.shape[-1]} columns, expected an even number")
    if not x.is_cuda:
        return silu_and_mul_reference(x)
    from penstock.kernels import triton_elementwise

    check_tensor("x", x, (-1, -1))
    check_contiguous("x", x)
    return triton_elementwise.silu_and_mul(x)


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Compute `sigmoid(gate) * x`; both are [num_tokens, heads, size] of one dtype.

    On a GPU x is contiguous, and so are the last values of gate.
    """
    check_tensor("gate", gate, tuple(x.shape), x.dtype)
    if x.is_cuda:
        from penstock.kernels import triton_elementwise

        check_contiguous("x", x)
        return triton_elementwise.sigmoid_and_mul(gate, x)
    # torch.exp gives the same bits for any shape, as in `silu_and_mul_reference`
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


def add_gated(
    out: Tensor, x: Tensor, gate_input: Tensor, norm_weight: Tensor, eps: float, gate_weight: Tensor
) -> Tensor:
    """Add `sigmoid(rms_norm(gate_input) @ gate_weight.T) * x` to `out`, in place.

    out, x and gate_input: [num_tokens, size]; norm_weight [size], in their dtype or float32;
    gate_weight [1, size]. On a GPU all are contiguous.
    """
    for name, tensor in (("x", x), ("gate_input", gate_input)):
        check_tensor(name, tensor, tuple(out.shape), out.dtype)
    check_tensor("norm_weight", norm_weight, (out.shape[1],), out.dtype, torch.float32)
    check_tensor("gate_weight", gate_weight, (1, out.shape[1]), out.dtype)
    if out.is_cuda:
        from penstock.kernels import triton_elementwise

        for name, tensor in (("out", out), ("x", x), ("gate_input", gate_input)):
            check_contiguous(name, tensor)
        triton_elementwise.add_gated(out, x, gate_input, norm_weight, eps, gate_weight)
        return out
    normed = rms_norm(gate_input, norm_weight, eps)
    gate = (normed.float() * gate_weight.float()).sum(1, keepdim=True)
    return out.add_(x * (1 / (1 + torch.exp(-gate))).to(x.dtype))


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[input_ids], [num_tokens, size].

    input_ids: int64 [num_tokens], each a row of weight [num_rows, size].
    """
    check_tensor("input_ids", input_ids, (-1,), torch.int64)
    check_tensor("weight", weight, (-1, -1))
    if not weight.is_cuda:
        return functional.embedding(input_ids, weight)
    from penstock.kernels import triton_elementwise

    check_contiguous("weight", weight)
    return triton_elementwise.embedding(input_ids, weight)


def quantize(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, *, swiglu: bool = False
) -> Quantized:
    """Quantize by rows: x [num_rows, num_columns], `rms_norm(x)` or `silu_and_mul(x)`.

    On a GPU x is contiguous and the result has at most 32768 columns.
    """
    check_tensor("x", x, (-1, -1))
    if x.is_cuda:
        from penstock.kernels import triton_elementwise

        check_contiguous("x", x)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype, torch.float32)
        values, scale = triton_elementwise.quantize(x, norm_weight, eps, swiglu)
        return Quantized(values, scale, x.dtype)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if swiglu:
        x = silu_and_mul(x)
    scale = x.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    return Quantized((x / scale[:, None]).to(FP8), scale, x.dtype)


def quantize_blocks(x: Tensor) -> Quantized:
    """Quantize x [num_rows, num_columns] with a scale for each block of 128 by 128."""
    rows, columns = x.shape
    padded = functional.pad(x.float().abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK).amax((1, 3))
    scale = largest.clamp(min=SMALLEST) / LARGEST
    unit = Quantized(x.new_ones(x.shape), scale).dequantized()
    return Quantized((x / unit).to(FP8), scale)


def copy_into(target: Rows, source: Rows) -> None:
    """Copy `source` into `target`; a tensor is quantized if `target` is a `Quantized`."""
    if isinstance(target, Tensor):
        target.copy_(source if isinstance(source, Tensor) else source.dequantized())
        return
    if isinstance(source, Tensor):
        source = source.to(target.device).contiguous()
        source = quantize_blocks(source) if target.in_blocks else quantize(source)
    target.values.copy_(source.values)
    target.scale.copy_(source.scale)
