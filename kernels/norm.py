"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import torch
from torch import Tensor

from penstock.kernels.checks import check_tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`, over the last dimension; weight [x.shape[-1]]."""
    check_tensor("weight", weight, (x.shape[-1],), x.dtype)
    return _rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMSNorm of `x + residual`, and `x + residual`; x, residual [num_tokens, hidden_size]."""
    check_tensor("residual", residual, tuple(x.shape), x.dtype)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
