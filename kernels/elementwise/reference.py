"""RMSNorm and SwiGLU's activation in torch.

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; Shazeer 2020,
https://arxiv.org/abs/2002.05202.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` on any device."""
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute `silu_and_mul` on any device."""
    gate, up = x.float().chunk(2, dim=-1)
    # torch's silu on a CPU rounds elements outside a whole vector differently, and which elements
    # these are depends on the number of rows. torch.exp gives the same bits everywhere.
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
