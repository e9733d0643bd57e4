"""Keys and values of one layer, in the model's type or in 8 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.elementwise import quantize
from penstock.kernels.matrices import FP8


class KVCache(NamedTuple):
    """Keys and values, each [num_blocks, block_size, num_kv_heads, head_dim].

    In FP8 each key and value head of a token has a scale. The scales of a head lie side by side, so
    that a tile of keys needs only one more read.
    """

    k: Tensor
    v: Tensor
    # scales of keys and of values in FP8: float32 [num_blocks, num_kv_heads, block_size]
    scales: tuple[Tensor, Tensor] | None = None

    def check(self, dtype: torch.dtype, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError unless the cache has these sizes (-1: any), in `dtype` or in FP8."""
        shape = (-1, block_size, num_kv_heads, head_dim)
        check_tensor("k_cache", self.k, shape, FP8 if self.scales else dtype)
        check_tensor("v_cache", self.v, tuple(self.k.shape), self.k.dtype)
        check_contiguous("k_cache", self.k)
        check_contiguous("v_cache", self.v)
        for name, scale in zip(("k_scale", "v_scale"), self.scales or (), strict=False):
            num_blocks, block_size, num_kv_heads, _ = self.k.shape
            check_tensor(name, scale, (num_blocks, num_kv_heads, block_size), torch.float32)
            check_contiguous(name, scale)

    def store(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] in `slots` (reference)."""
        block_size = self.k.shape[1]
        for n, (new, cache) in enumerate(((k, self.k), (v, self.v))):
            stored = new
            if self.scales is not None:
                quantized = quantize(new.flatten(0, 1))
                stored = quantized.values.view(new.shape)
                by_token = self.scales[n].transpose(1, 2)
                scale = quantized.scale.view(new.shape[:2])
                by_token[slots // block_size, slots % block_size] = scale
            cache.view(-1, *new.shape[1:])[slots] = stored
