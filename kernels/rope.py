"""Qwen3's preparation of queries and keys: RMSNorm per head, then rotary position embedding.

RoPE is from Su et al. 2021 (https://arxiv.org/abs/2104.09864); as in GPT-NeoX, feature i is
rotated together with feature i + head_dim / 2.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import check_tensor
from penstock.kernels.norm import rms_norm


def rope_table(head_dim: int, num_positions: int, base: float) -> Tensor:
    """Cosines, then sines, of every position: float32 [num_positions, head_dim]."""
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / base**exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries and keys as attention takes them.

    q [num_tokens, num_heads, head_dim], k [num_tokens, num_kv_heads, head_dim]; q_weight and
    k_weight [head_dim]; rope as `rope_table` makes it; positions int64 [num_tokens].
    """
    num_tokens, _, head_dim = q.shape
    check_tensor("k", k, (num_tokens, -1, head_dim), q.dtype)
    check_tensor("rope", rope, (-1, head_dim), torch.float32)
    check_tensor("positions", positions, (num_tokens,), torch.int64)
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    q = _rotate(rms_norm(q, q_weight, eps), cos, sin)
    k = _rotate(rms_norm(k, k_weight, eps), cos, sin)
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
