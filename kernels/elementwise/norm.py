"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, over the last dimension; weight [x.shape[-1]].

    On a GPU x is contiguous [num_rows, size], of at most 16384 columns.
    """
    check_tensor("weight", weight, (x.shape[-1],), x.dtype)
    if x.is_cuda:
        from penstock.kernels.elementwise import triton_norm as norm

        check_tensor("x", x, (-1, -1))
        check_contiguous("x", x)
        check_contiguous("weight", weight)
        return norm.rms_norm(x, weight, eps)
    return _rms_norm_reference(x, weight, eps)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
