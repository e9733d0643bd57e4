"""Qwen3's preparation of queries, keys and values for attention over a paged cache.

RMSNorm per query and key head, then rotary position embedding; keys and values go into the cache's
blocks (Kwon et al. 2023, https://arxiv.org/abs/2309.06180). RoPE is from Su et al. 2021
(https://arxiv.org/abs/2104.09864); as in GPT-NeoX, feature i is rotated together with feature
i + head_dim / 2.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.kv_cache import KVCache
from penstock.kernels.norm import rms_norm


def rope_table(head_dim: int, num_positions: int, base: float) -> Tensor:
    """Cosines, then sines, of every position: float32 [num_positions, head_dim]."""
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / base**exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def qk_norm_rope_store(
    qkv: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: KVCache,
    eps: float,
) -> Tensor:
    """Queries as attention takes them, [num_tokens, num_heads, head_dim]; stores keys and values.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: query heads, then key heads, then
    value heads; q_weight, k_weight [head_dim]; rope as `rope_table` makes it; positions int64
    [num_tokens], rows of rope; slot_mapping int64 [num_tokens]: block id * block_size + offset of
    each token's key and value, or -1, which stores nothing (the token is padding; its query has no
    meaning).
    """
    check_tensor("q_weight", q_weight, (-1,), qkv.dtype)
    head_dim = q_weight.shape[0]
    check_tensor("qkv", qkv, (-1, (num_heads + 2 * num_kv_heads) * head_dim))
    check_tensor("k_weight", k_weight, (head_dim,), qkv.dtype)
    check_tensor("rope", rope, (-1, head_dim), torch.float32)
    check_tensor("positions", positions, (qkv.shape[0],), torch.int64)
    check_tensor("slot_mapping", slot_mapping, (qkv.shape[0],), torch.int64)
    check_contiguous("qkv", qkv)
    kv_cache.check(qkv.dtype, -1, num_kv_heads, head_dim)
    weights = q_weight, k_weight
    if qkv.is_cuda:
        from penstock.kernels.gpu import rope as gpu

        for name, tensor in (("rope", rope), ("q_weight", q_weight), ("k_weight", k_weight)):
            check_contiguous(name, tensor)
        return gpu.qk_norm_rope_store(qkv, weights, rope, positions, slot_mapping, kv_cache, eps)
    return _qk_norm_rope_store_reference(qkv, weights, rope, positions, slot_mapping, kv_cache, eps)


def _qk_norm_rope_store_reference(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    rope: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: KVCache,
    eps: float,
) -> Tensor:
    num_kv_heads, head_dim = kv_cache.k.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    q = _rotate(rms_norm(q, weights[0], eps), cos, sin)
    k = _rotate(rms_norm(k, weights[1], eps), cos, sin)
    stored = slot_mapping >= 0
    kv_cache.store(slot_mapping[stored], k[stored], v[stored])
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim]; cos, sin [num_tokens, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
