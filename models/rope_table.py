"""Table of the rotary position embedding, plain or with YaRN.

RoPE: Su et al. 2021, https://arxiv.org/abs/2104.09864. YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071.
"""

import math

import torch
from torch import Tensor

from penstock.protocol.checkpoint import Yarn


def rope_table(head_dim: int, num_positions: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """Return cosines, then sines, of every position: float32 [num_positions, head_dim]."""
    if head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, expected an even number; RoPE rotates pairs")
    wavelengths = base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if yarn is not None:
        kept = _kept_share(head_dim, base, yarn)
        frequencies = frequencies * kept + 1.0 / (yarn.factor * wavelengths) * (1 - kept)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return table if yarn is None else table * yarn.attention_factor


def _kept_share(head_dim: int, base: float, yarn: Yarn) -> Tensor:
    """Return the share of each frequency that YaRN keeps: 1 if high, then a ramp to 0."""

    def feature(turns: float) -> float:
        """Return the feature that turns this often in the original positions."""
        wavelength = yarn.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(base))

    first, last = feature(yarn.beta_fast), feature(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
