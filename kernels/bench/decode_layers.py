"""Decode attention's inputs for as many layers as get past the L2 cache, and who computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from penstock.kernels.attention.kv_cache import KVCache
from penstock.kernels.attention.triton_decode import DecodeAttention
from penstock.kernels.attention.triton_decode_items import Tuning
from penstock.kernels.bench.timing import L2_BYTES
from penstock.kernels.quantize.quantize import quantize

HEAD_DIM = 128
FLASH_BLOCK_SIZE = 256


@dataclass(frozen=True)
class Point:
    """One row of the table."""

    num_heads: int
    num_kv_heads: int
    batch: int
    context: int
    block_size: int = FLASH_BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a layer reads."""
        return 2 * self.batch * self.context * self.num_kv_heads * HEAD_DIM * 2


class Layers:
    """Random inputs of as many layers as are needed to get past the L2 cache, also in 8 bits."""

    def __init__(self, point: Point) -> None:
        self.point = point
        num_layers = max(1, -(-4 * L2_BYTES // point.kv_bytes))
        max_blocks = -(-point.context // point.block_size)
        num_blocks = point.batch * max_blocks
        cache_shape = (num_blocks, point.block_size, point.num_kv_heads, HEAD_DIM)
        self.caches = [KVCache(*_random(2, *cache_shape)) for _ in range(num_layers)]
        self.q = _random(point.batch, point.num_heads, HEAD_DIM)
        self.out = torch.empty_like(self.q)
        order = torch.randperm(num_blocks, device="cuda").int()
        self.block_tables = order.view(point.batch, max_blocks)
        self.context_lens = torch.full((point.batch,), point.context, device="cuda").int()

    def flash(self) -> list[Callable[[], Tensor]]:
        """flash-attn's calls, one a layer; it takes blocks of a multiple of 256 tokens only."""
        return [partial(self._flash, k, v, self.block_tables) for k, v, _ in self.caches]

    def expected(self) -> Tensor:
        """flash-attn's result of the first layer, whose blocks are put in order for it."""
        k_cache, v_cache = (self._in_order(cache) for cache in self.caches[0][:2])
        table = torch.arange(len(k_cache), device="cuda").int().view(self.point.batch, -1)
        return self._flash(k_cache, v_cache, table)

    def quantize(self) -> None:
        """From here on keys and values have 8 bits."""
        self.caches = [_in_8_bits(kv_cache) for kv_cache in self.caches]

    def _in_order(self, cache: Tensor) -> Tensor:
        blocks = cache[self.block_tables.flatten()]
        return blocks.view(-1, FLASH_BLOCK_SIZE, *cache.shape[2:])

    def planned(self, tuning: Tuning | None = None) -> DecodeAttention:
        """What our calls share, with the plan made."""
        point, is_fp8 = self.point, self.caches[0].scales is not None
        sizes = (point.batch, point.num_heads, point.num_kv_heads, HEAD_DIM, point.block_size)
        attention = DecodeAttention(*sizes, "cuda", is_fp8=is_fp8, tuning=tuning)
        attention.plan(self.context_lens)
        torch.cuda.synchronize()
        return attention

    def ours(self, attention: DecodeAttention) -> list[Callable[[], Tensor]]:
        """Our calls, one a layer."""
        return [partial(self._ours, attention, kv_cache) for kv_cache in self.caches]

    def _flash(self, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            self.q.unsqueeze(1), k_cache, v_cache, cache_seqlens=self.context_lens,
            block_table=block_table, causal=True, softmax_scale=HEAD_DIM**-0.5
        )  # fmt: skip
        return out.squeeze(1)

    def _ours(self, attention: DecodeAttention, kv_cache: KVCache) -> Tensor:
        attention(
            self.q, kv_cache, context_lens=self.context_lens,
            block_tables=self.block_tables, scale=HEAD_DIM**-0.5, out=self.out
        )  # fmt: skip
        return self.out


def _in_8_bits(kv_cache: KVCache) -> KVCache:
    k, v = (quantize(numbers.view(-1, HEAD_DIM)) for numbers in kv_cache[:2])
    shape = kv_cache.k.shape
    scales = (part.scale.view(shape[:3]).transpose(1, 2).contiguous() for part in (k, v))
    return KVCache(k.values.view(shape), v.values.view(shape), (next(scales), next(scales)))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the norms, in float32."""
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm())
