"""SwiGLU's activation (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up`; x [num_tokens, 2 * intermediate_size] holds gate, then up."""
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns; an even number is needed")
    if x.is_cuda:
        from penstock.kernels.elementwise import triton_activation as activation

        check_tensor("x", x, (-1, -1))
        check_contiguous("x", x)
        return activation.silu_and_mul(x)
    return _silu_and_mul_reference(x)


def _silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    # torch's silu on a CPU rounds elements that fill no whole vector differently, and which ones
    # these are depends on the number of rows. torch.exp is the same everywhere.
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
