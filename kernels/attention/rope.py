"""Preparation of Qwen3's queries, keys and values for attention over a paged KV cache.

Query and key heads get RMSNorm, then the rotary position embedding. As in GPT-NeoX, feature i is
rotated together with feature i + head_dim / 2. With a narrower table only the first features are
rotated, as if they were the head.
"""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.elementwise import rms_norm
from penstock.kernels.layouts.kv_cache import KVCache


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
    gated: bool = False,
) -> Tensor:
    """Store keys and values, and return the queries [num_tokens, num_heads, head_dim].

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query heads, key heads, value
    heads. gated: head_dim other features, which are not read, follow each query head. q_weight,
    k_weight: [head_dim], in qkv's dtype or float32 (see `rms_norm`). rope: float32 [num_positions,
    features that are rotated], cosines, then sines; head_dim features, or up to half of them.
    positions: int64 [num_tokens], rows of rope. slot_mapping: int64 [num_tokens], block id *
    block_size + offset of each token's key and value, or -1 for padding, which stores nothing.
    """
    check_tensor("q_weight", q_weight, (-1,), qkv.dtype, torch.float32)
    head_dim = q_weight.shape[0]
    num_query_parts = 2 * num_heads if gated else num_heads
    check_tensor("qkv", qkv, (-1, (num_query_parts + 2 * num_kv_heads) * head_dim))
    check_tensor("k_weight", k_weight, (head_dim,), q_weight.dtype)
    check_tensor("rope", rope, (-1, -1), torch.float32)
    rotated = rope.shape[1]
    if rotated % 2 or not (rotated == head_dim or 0 < rotated <= head_dim // 2):
        raise ValueError(
            f"rope: got {rotated} features, expected {head_dim}, or an even number up to "
            f"{head_dim // 2}"
        )
    check_tensor("positions", positions, (qkv.shape[0],), torch.int64)
    check_tensor("slot_mapping", slot_mapping, (qkv.shape[0],), torch.int64)
    check_contiguous("qkv", qkv)
    kv_cache.check(qkv.dtype, -1, num_kv_heads, head_dim)
    if qkv.is_cuda:
        from penstock.kernels.attention import triton_rope

        for name, tensor in (("rope", rope), ("q_weight", q_weight), ("k_weight", k_weight)):
            check_contiguous(name, tensor)
        weights = q_weight, k_weight
        return triton_rope.qk_norm_rope_store(
            qkv, weights, rope, positions, slot_mapping, kv_cache, eps, gated
        )
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads, [num_query_parts, num_kv_heads, num_kv_heads], dim=1)
    q = q[:, ::2] if gated else q
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    q = _rotate(rms_norm(q, q_weight, eps), cos, sin)
    k = _rotate(rms_norm(k, k_weight, eps), cos, sin)
    stored = slot_mapping >= 0
    kv_cache.store(slot_mapping[stored], k[stored], v[stored])
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of x [num_tokens, num_heads, head_dim].

    cos, sin: [num_tokens, 1, half of the number of features].
    """
    half, wide = cos.shape[-1], x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return rotated.to(x.dtype)
