"""RMSNorm, SwiGLU's activation and embedding lookup."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.elementwise import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `x / rms(x) * weight` over the last dimension; weight [x.shape[-1]].

    On a GPU x is contiguous [num_rows, size], of up to 16384 columns.
    """
    check_tensor("weight", weight, (x.shape[-1],), x.dtype)
    if not x.is_cuda:
        return reference.rms_norm(x, weight, eps)
    from penstock.kernels.elementwise import triton_elementwise

    check_tensor("x", x, (-1, -1))
    check_contiguous("x", x)
    check_contiguous("weight", weight)
    return triton_elementwise.rms_norm(x, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute `silu(gate) * up`; x [num_tokens, 2 * intermediate_size] holds gate, then up."""
    if x.shape[-1] % 2:
        raise ValueError(f"x: got {x.shape[-1]} columns, expected an even number")
    if not x.is_cuda:
        return reference.silu_and_mul(x)
    from penstock.kernels.elementwise import triton_elementwise

    check_tensor("x", x, (-1, -1))
    check_contiguous("x", x)
    return triton_elementwise.silu_and_mul(x)


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[input_ids], [num_tokens, size].

    input_ids: int64 [num_tokens], each a row of weight [num_rows, size].
    """
    check_tensor("input_ids", input_ids, (-1,), torch.int64)
    check_tensor("weight", weight, (-1, -1))
    if not weight.is_cuda:
        return functional.embedding(input_ids, weight)
    from penstock.kernels.elementwise import triton_elementwise

    check_contiguous("weight", weight)
    return triton_elementwise.embedding(input_ids, weight)
