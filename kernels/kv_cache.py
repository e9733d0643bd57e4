"""Writing keys and values into the paged cache (Kwon et al. 2023, arXiv:2309.06180)."""

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Puts the keys and values of a step where their sequences' block tables say.

    k, v [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache [num_blocks, block_size,
    num_kv_heads, head_dim]; slot_mapping int64 [num_tokens]: block id * block_size + offset.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    check_tensor("v", v, (num_tokens, num_kv_heads, head_dim), k.dtype)
    check_tensor("k_cache", k_cache, (-1, -1, num_kv_heads, head_dim), k.dtype)
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), k.dtype)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    for name, new, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
        check_contiguous(name, cache)
        cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, new)
