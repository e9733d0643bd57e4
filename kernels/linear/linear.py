"""Matrix products, fused with the norm before them and the activation or sum after them.

On a CPU a row's bits do not depend on the other rows: see `batch_invariant.py`.

On a GPU all tensors must be contiguous. Up to 64 rows of 16 bits are multiplied by one kernel of
`penstock.kernels.linear.small_m_gemm` if it is faster than cuBLAS and separate kernels.

A weight may be `Quantized`. On a CPU, in that kernel, and on GPUs without instructions for e4m3, x
is multiplied with the dequantized weight. For cuBLAS, x is quantized as well, with a scale for each
row, and tensor cores multiply 8 bits.

A weight may be a `CustomMatrix`, such as packed integers. It has its own kernel for few rows, and
is dequantized before other products.
"""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.device import this_device
from penstock.kernels.elementwise import quantize, rms_norm, silu_and_mul
from penstock.kernels.linear.batch_invariant import product
from penstock.kernels.matrices import FP8, Matrix, Quantized, Rows, parts, scale_shape

MAX_FUSED_ROWS = 64  # maximum rows of a product in one kernel


def linear(x: Rows, weight: Matrix, out: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T`; x: [num_rows, in_features]; weight: [out_features, in_features].

    out: contiguous memory of the result.
    """
    _check(x, weight)
    _check_out(x, weight, out)
    fused = _fused("add", x, weight, out=out)
    return _product(x, weight, out) if fused is None else fused


def linear_add(x: Rows, weight: Matrix, residual: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `residual + x @ weight.T`; residual [num_rows, out_features].

    out: contiguous memory of the result; without it, `residual` may be overwritten.
    """
    _check(x, weight)
    check_tensor("residual", residual, (x.shape[0], weight.shape[0]), _dtype(x))
    _check_out(x, weight, out)
    fused = _fused("add", x, weight, residual=residual, out=out)
    return add_separately(x, weight, residual, out) if fused is None else fused


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Matrix,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `rms_norm(x) @ weight.T`; norm_weight [in_features], in x's dtype or float32.

    out_dtype: x's, the default, or torch.float32; other dtypes raise ValueError. out: contiguous
    memory of the result.
    """
    _check(x, weight)
    check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype, torch.float32)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype: got {out_dtype}, expected {x.dtype} or torch.float32")
    out_dtype = out_dtype or x.dtype
    _check_out(x, weight, out, out_dtype)
    kind = "norm" if out_dtype == x.dtype else "logits"
    fused = _fused(kind, x, weight, norm_weight, eps, out=out)
    return norm_separately(x, norm_weight, eps, weight, out_dtype, out) if fused is None else fused


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, weight: Matrix) -> Rows:
    """Compute `silu_and_mul(rms_norm(x) @ weight.T)`, [num_rows, intermediate_size].

    weight: [2 * intermediate_size, in_features], the rows of gate, then of up. The result is
    `Quantized` if cuBLAS will multiply it with a `Quantized` weight.
    """
    _check(x, weight)
    check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype, torch.float32)
    if weight.shape[0] % 2:
        raise ValueError(f"weight: got {weight.shape[0]} rows, expected an even number")
    fused = _fused("swiglu", x, weight, norm_weight, eps)
    return swiglu_separately(x, norm_weight, eps, weight) if fused is None else fused


def add_separately(x: Rows, weight: Matrix, residual: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `linear_add` in separate kernels; on a GPU in place, which saves a copy."""
    if x.is_cuda and out is None:
        out = residual
    if isinstance(x, Tensor) and isinstance(weight, Tensor) and x.is_cuda:
        return torch.addmm(residual, x, weight.t(), out=out)
    return torch.add(residual, _product(x, weight), out=out)


def norm_separately(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Matrix,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `norm_linear` in separate kernels."""
    if x.is_cuda and out_dtype != x.dtype:
        if isinstance(weight, Quantized) and _takes_8_bits(weight):
            return _scaled_logits(x, norm_weight, eps, weight, out)
        if not isinstance(weight, Tensor | Quantized):
            weight = weight.rounded(x.dtype)
        normed = rms_norm(x, norm_weight, eps)
        if isinstance(weight, Quantized):
            return _weight_only_product(normed, weight, out, out_dtype)
        return torch.mm(normed, weight.t(), out_dtype=out_dtype, out=out)
    return _norm_product(x, norm_weight, eps, weight, out).to(out_dtype)


def swiglu_separately(x: Tensor, norm_weight: Tensor, eps: float, weight: Matrix) -> Rows:
    """Compute `norm_swiglu` in separate kernels."""
    gate_up = _norm_product(x, norm_weight, eps, weight)
    if _takes_8_bits(weight) and len(x) > MAX_FUSED_ROWS:
        return quantize(gate_up, swiglu=True)
    return silu_and_mul(gate_up)


def _norm_product(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Matrix, out: Tensor | None = None
) -> Tensor:
    if _takes_8_bits(weight):
        return _product(quantize(x, norm_weight, eps), weight, out)
    return _product(rms_norm(x, norm_weight, eps), weight, out)


def _takes_8_bits(weight: Matrix) -> bool:
    """Return True if x is quantized because the GPU's tensor cores multiply 8 bits."""
    return isinstance(weight, Quantized) and weight.is_cuda and this_device().has_fp8


def _check(x: Rows, weight: Matrix) -> None:
    check_tensor("x", parts(x)[0], (-1, -1))
    if not isinstance(weight, Tensor | Quantized):
        weight.check("weight", (-1, x.shape[1]))
        return
    values, scale = parts(weight)
    check_tensor("weight", values, (-1, x.shape[1]), FP8 if scale is not None else _dtype(x))
    if isinstance(weight, Quantized):
        check_tensor("weight's scale", weight.scale, scale_shape(weight), torch.float32)


def _check_out(
    x: Rows, weight: Matrix, out: Tensor | None, dtype: torch.dtype | None = None
) -> None:
    if out is not None:
        check_tensor("out", out, (x.shape[0], weight.shape[0]), dtype or _dtype(x))
        check_contiguous("out", out)


def _dtype(x: Rows) -> torch.dtype:
    """Return the dtype of a product with x."""
    return x.dtype


def _fused(
    kind: str,
    x: Rows,
    weight: Matrix,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the product of one kernel if this is faster, otherwise None."""
    if isinstance(x, Quantized) or not x.is_cuda:
        return None
    from penstock.kernels.linear.small_m_gemm import multiply

    check_contiguous("x", x)
    if isinstance(weight, Tensor | Quantized):
        check_contiguous("weight", parts(weight)[0])
    if norm_weight is not None:
        check_contiguous("norm_weight", norm_weight)
    if residual is not None:
        check_contiguous("residual", residual)
    if not isinstance(weight, Tensor | Quantized):
        return weight.multiply(kind, x, norm_weight, eps, residual, out)
    if deterministic := CHOSEN.deterministic:
        return deterministic.multiply(kind, x, weight, norm_weight, eps, residual, out)
    return multiply(kind, x, weight, norm_weight, eps, residual, out)


def _product(x: Rows, weight: Matrix, out: Tensor | None = None) -> Tensor:
    if not isinstance(weight, Tensor | Quantized):
        weight = weight.rounded(_dtype(x))
    if isinstance(weight, Quantized) and x.is_cuda:
        if isinstance(x, Tensor) and not _takes_8_bits(weight):
            return _weight_only_product(x, weight, out)
        return _scaled_product(x if isinstance(x, Quantized) else quantize(x), weight, out)
    if isinstance(x, Quantized):
        raise ValueError("x: got a Quantized, expected a tensor on a CPU or with such a weight")
    if isinstance(weight, Tensor) and x.is_cuda:
        return torch.mm(x, weight.t(), out=out)
    product = _linear_reference(x, weight)
    return product if out is None else out.copy_(product)


def _weight_only_product(
    x: Tensor, weight: Quantized, out: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    from penstock.kernels.linear.triton_fp8_gemm import weight_only_product

    return weight_only_product(x, weight, out, dtype)


def _scaled_product(x: Quantized, weight: Quantized, out: Tensor | None) -> Tensor:
    """Multiply to 16 bits: by Triton with block scales, otherwise by cuBLAS.

    cuBLAS needs multiples of 16 as in_features and out_features. With row scales it writes
    bfloat16, from which float16 is converted.
    """
    if weight.in_blocks:
        from penstock.kernels.linear.triton_fp8_gemm import block_product

        return block_product(x, weight, out)
    converts = x.dtype == torch.float16
    product = torch._scaled_mm(
        x.values,
        weight.values.t(),
        x.scale[:, None],
        weight.scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=None if converts else out,
    )
    if not converts:
        return product
    return product.to(x.dtype) if out is None else out.copy_(product)


def _scaled_logits(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Quantized, out: Tensor | None
) -> Tensor:
    """Compute float32 logits; row scales are applied after cuBLAS, which takes a single scale.

    cuBLAS takes only multiples of 16; other vocabulary sizes are multiplied in float32.
    """
    if weight.shape[0] % 16:
        product = _linear_reference(rms_norm(x, norm_weight, eps).float(), weight)
        return product if out is None else out.copy_(product)
    quantized = quantize(x, norm_weight, eps)
    unit = torch.ones((), device=x.device)
    product = torch._scaled_mm(
        quantized.values,
        weight.values.t(),
        unit,
        unit,
        out_dtype=torch.float32,
        use_fast_accum=True,
        out=out,
    )
    return product.mul_(quantized.scale[:, None]).mul_(weight.scale)


def _linear_reference(x: Tensor, weight: Rows) -> Tensor:
    if isinstance(weight, Quantized) and weight.in_blocks:
        return product(x, weight.dequantized().to(x.dtype))
    values, scale = parts(weight)
    out = product(x, values)
    return out if scale is None else out * scale
