"""Qwen3's preparation of queries, keys and values for attention over a paged cache.

RMSNorm per query and key head, then rotary position embedding; keys and values go into the cache's
blocks (Kwon et al. 2023, https://arxiv.org/abs/2309.06180). RoPE is from Su et al. 2021
(https://arxiv.org/abs/2104.09864); as in GPT-NeoX, feature i is rotated together with feature
i + head_dim / 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.kv_cache import KVCache
from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.elementwise.norm import rms_norm


class Yarn(NamedTuple):
    """YaRN's parameters (Peng et al. 2023, https://arxiv.org/abs/2309.00071)."""

    factor: float
    """by which slow frequencies are divided"""
    original_positions: int
    """that the model was trained with"""
    beta_fast: float
    """turns in these positions from which on a frequency is kept"""
    beta_slow: float
    """turns in these positions up to which a frequency is divided by `factor`"""
    truncate: bool
    """the ramp between begins and ends at whole features"""
    attention_factor: float
    """of cosines and sines"""


def rope_table(head_dim: int, num_positions: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """Cosines, then sines, of every position: float32 [num_positions, head_dim]."""
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; RoPE rotates pairs")
    wavelengths = base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if yarn is not None:
        kept = _kept_share(head_dim, base, yarn)
        frequencies = frequencies * kept + 1.0 / (yarn.factor * wavelengths) * (1 - kept)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return table if yarn is None else table * yarn.attention_factor


def _kept_share(head_dim: int, base: float, yarn: Yarn) -> Tensor:
    """Share of each frequency that YaRN keeps: 1 for fast ones, then a ramp to 0."""

    def feature(turns: float) -> float:
        """Returns the feature that turns so often in the original positions."""
        wavelength = yarn.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(base))

    first, last = feature(yarn.beta_fast), feature(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


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
        from penstock.kernels.elementwise import triton_rope as gpu

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
