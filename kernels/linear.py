"""Matrix products with what stands around them: a norm in front, an activation or a sum behind.

On a CPU their rows do not depend on how many there are. A GEMM adds up the products of one output
element in the order of the inner dimension, whatever the number of rows, with two exceptions,
measured with MKL 2024.2 (AVX-512, 1 and 2 threads): below 16 rows it takes other kernels, and a
long inner dimension is cut into pieces whose length depends on the number of rows and threads. So
the rows are padded to 16, and the cutting is done here.

On a GPU all tensors must be contiguous; up to 64 rows of bfloat16 are multiplied by one kernel of
`penstock.kernels.gpu.skinny` where it is faster than cuBLAS and separate kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.norm import rms_norm

MIN_ROWS = 16
INNER_PIECE = 512


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`; x [num_rows, in_features], weight [out_features, in_features]."""
    _check(x, weight)
    fused = _fused("add", x, weight)
    return _product(x, weight) if fused is None else fused


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """`residual + x @ weight.T`; residual [num_rows, out_features], which may be overwritten."""
    _check(x, weight)
    check_tensor("residual", residual, (x.shape[0], weight.shape[0]), x.dtype)
    fused = _fused("add", x, weight, residual=residual)
    return add_separately(x, weight, residual) if fused is None else fused


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`rms_norm(x) @ weight.T`; norm_weight [in_features].

    out_dtype: x's, the default, or torch.float32; other dtypes raise ValueError.
    """
    _check(x, weight)
    check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {out_dtype}; {x.dtype} or torch.float32 is needed")
    out_dtype = out_dtype or x.dtype
    kind = "norm" if out_dtype == x.dtype else "logits"
    fused = _fused(kind, x, weight, norm_weight, eps)
    return norm_separately(x, norm_weight, eps, weight, out_dtype) if fused is None else fused


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`silu_and_mul(rms_norm(x) @ weight.T)`, [num_rows, intermediate_size].

    weight: [2 * intermediate_size, in_features], the gate's rows, then up's.
    """
    _check(x, weight)
    check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype)
    if weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; an even number is needed")
    fused = _fused("swiglu", x, weight, norm_weight, eps)
    return swiglu_separately(x, norm_weight, eps, weight) if fused is None else fused


def add_separately(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """As `linear_add`, without our own product; on a GPU in place: a copy would show."""
    if x.is_cuda:
        return residual.addmm_(x, weight.t())
    return residual + _product(x, weight)


def norm_separately(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """As `norm_linear`, in separate kernels."""
    normed = rms_norm(x, norm_weight, eps)
    if x.is_cuda and out_dtype != x.dtype:
        return torch.mm(normed, weight.t(), out_dtype=out_dtype)
    return _product(normed, weight).to(out_dtype)


def swiglu_separately(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """As `norm_swiglu`, in separate kernels."""
    return silu_and_mul(_product(rms_norm(x, norm_weight, eps), weight))


def _check(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, (-1, -1))
    check_tensor("weight", weight, (-1, x.shape[1]), x.dtype)


def _fused(
    kind: str,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor | None:
    """By one kernel of ours, where that is faster; else None."""
    if not x.is_cuda:
        return None
    from penstock.kernels.gpu.skinny import multiply

    check_contiguous("x", x)
    check_contiguous("weight", weight)
    if norm_weight is not None:
        check_contiguous("norm_weight", norm_weight)
    if residual is not None:
        check_contiguous("residual", residual)
    return multiply(kind, x, weight, norm_weight, eps, residual)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight) if x.is_cuda else _linear_reference(x, weight)


def _linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    num_rows, inner = x.shape
    if num_rows < MIN_ROWS:
        x = functional.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    out = functional.linear(x[:, :INNER_PIECE], weight[:, :INNER_PIECE])
    for begin in range(INNER_PIECE, inner, INNER_PIECE):
        piece = slice(begin, begin + INNER_PIECE)
        out.addmm_(x[:, piece], weight[:, piece].t())
    return out[:num_rows]
