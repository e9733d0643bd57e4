"""Attention backends with one interface.

- `torch`: the reference, on any device.
- `triton`: own kernels, for any block size. The default on a GPU: they measured faster than
  flash-attn 2 in every case (docs, benchmarks).
- `flash-attn`: flash-attn 2.8 (Dao 2023, https://arxiv.org/abs/2307.08691), for blocks of 256
  tokens or a multiple.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.attention.reference import attend
from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache

FLASH_BLOCK = 256  # tokens; flash-attn's paged KV cache needs blocks of a multiple of this size
DEFAULT_BLOCK = 16
TRITON_BLOCK = 128  # tokens; the largest tile of keys, so that a tile lies in one block


class AttentionBackend(Protocol):
    """Attention of the tokens of a step."""

    name: str
    block_size: int
    scale: float
    # True if a CUDA graph can capture decode: the host reads nothing from the device
    can_be_captured: bool
    # True if a CUDA graph whose rows prefill or decode can capture prefill as well
    can_capture_prefill: bool

    def begin(self, batch: ForwardBatch) -> None:
        """Prepare a step before its first layer."""

    def __call__(self, q: Tensor, kv_cache: KVCache, batch: ForwardBatch) -> Tensor:
        """Compute attention for the tokens of the step, whose keys and values are stored."""


class TorchAttention:
    """Reference backend, for any device."""

    name = "torch"
    can_be_captured = can_capture_prefill = False

    def __init__(self, block_size: int, scale: float) -> None:
        self.block_size, self.scale = block_size, scale

    def begin(self, batch: ForwardBatch) -> None:
        """Do nothing: the reference needs no preparation."""

    def __call__(self, q: Tensor, kv_cache: KVCache, batch: ForwardBatch) -> Tensor:
        return attend(
            q,
            kv_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.shape.max_seqlen_q,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=self.scale,
        )


class GpuAttention:
    """Backend that runs one kernel for decoding rows and another for prefilling rows."""

    can_be_captured = True

    def __init__(
        self,
        name: str,
        block_size: int,
        scale: float,
        decode: Any,
        prefill: Any,
        plan_prefill: Callable[[ForwardBatch], None] | None = None,
    ) -> None:
        self.name, self.block_size, self.scale = name, block_size, scale
        self.can_capture_prefill = prefill is not flash_prefill
        self._decode = decode
        self._prefill = prefill
        self._plan_prefill = plan_prefill

    def begin(self, batch: ForwardBatch) -> None:
        """Plan the split of the KV cache."""
        if batch.shape.num_decode:
            self._decode.plan(batch.decode_lens)
        if batch.shape.num_tiles and self._plan_prefill:
            self._plan_prefill(batch)

    def __call__(self, q: Tensor, kv_cache: KVCache, batch: ForwardBatch) -> Tensor:
        num_decode = batch.shape.num_decode
        out = torch.empty_like(q)
        if batch.shape.num_tiles:
            self._prefill(q, kv_cache, batch, self.scale, out)
        if num_decode:
            self._decode(
                q[:num_decode],
                kv_cache,
                context_lens=batch.decode_lens,
                block_tables=batch.block_tables[:num_decode],
                scale=self.scale,
                out=out[:num_decode],
            )
        return out


class FlashDecode:
    """Decode attention of flash-attn, which chooses its split from the shapes."""

    def plan(self, context_lens: Tensor) -> None:
        """Do nothing: the split follows from the shapes."""

    def __call__(
        self,
        q: Tensor,
        kv_cache: KVCache,
        *,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """Compute the same as `penstock.kernels.attention.triton_decode.DecodeAttention`."""
        from flash_attn import flash_attn_with_kvcache

        attended = flash_attn_with_kvcache(
            q.unsqueeze(1),
            kv_cache.k,
            kv_cache.v,
            cache_seqlens=context_lens,
            block_table=block_tables,
            softmax_scale=scale,
            causal=True,
        )
        out.copy_(attended.squeeze(1))


def flash_prefill(
    q: Tensor, kv_cache: KVCache, batch: ForwardBatch, scale: float, out: Tensor
) -> None:
    """Write flash-attn's result for the prefilling rows into `out`."""
    from flash_attn import flash_attn_varlen_func

    shape, first = batch.shape, batch.shape.num_decode
    num_blocks = -(-shape.max_seqlen_k // kv_cache.k.shape[1])
    attended = flash_attn_varlen_func(
        q[first:],
        kv_cache.k,
        kv_cache.v,
        cu_seqlens_q=batch.cu_seqlens_q[first:] - first,
        cu_seqlens_k=batch.cu_seqlens_k[first:] - batch.cu_seqlens_k[first],
        max_seqlen_q=shape.max_seqlen_q,
        max_seqlen_k=shape.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        block_table=batch.block_tables[first:, :num_blocks],
    )
    out[first:].copy_(attended)


def _check_deterministic(name: str, kv_cache_dtype: str) -> None:
    if name != "triton":
        raise ValueError(f"attention: got {name!r} with --deterministic, expected 'triton'")
    if kv_cache_dtype == "fp8":
        raise ValueError("kv_cache_dtype: got 'fp8' with --deterministic on a GPU, expected 'auto'")


def choose_attention(
    name: str,
    block_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_rows: int,
    device: torch.device,
    kv_cache_dtype: str = "auto",
) -> AttentionBackend:
    """Return the backend `name` (auto, triton, flash-attn or torch).

    block_size: tokens of a KV block; 0 chooses the backend's default. kv_cache_dtype: auto or fp8.
    Raises ValueError if the backend is not available for these arguments.
    """
    scale = head_dim**-0.5
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if CHOSEN.deterministic:
        _check_deterministic(name, kv_cache_dtype)
    if name == "torch":
        return TorchAttention(block_size or DEFAULT_BLOCK, scale)
    if device.type != "cuda":
        raise ValueError(f"attention: got {name!r} without a GPU, expected 'torch'")
    if name == "triton":
        from penstock.kernels.attention.triton_decode import DecodeAttention
        from penstock.kernels.attention.triton_prefill import PrefillAttention

        block_size = block_size or TRITON_BLOCK
        layout = num_heads, num_kv_heads, head_dim, block_size
        is_fp8 = kv_cache_dtype == "fp8"
        if deterministic := CHOSEN.deterministic:
            fixed = deterministic.decode(max_rows, *layout, device, is_fp8=is_fp8)
            return GpuAttention(name, block_size, scale, fixed, deterministic.prefill)
        decode = DecodeAttention(max_rows, *layout, device, is_fp8=is_fp8)
        prefill = PrefillAttention(num_heads, head_dim, block_size, device, is_fp8=is_fp8)
        return GpuAttention(name, block_size, scale, decode, prefill, prefill.plan)
    if kv_cache_dtype == "fp8":
        raise ValueError(f"attention: got {name!r} with a KV cache in fp8, expected 'triton'")
    if find_spec("flash_attn") is None:
        raise ValueError(f"attention: got {name!r}; install flash-attn 2.8 or use 'triton'")
    if block_size % FLASH_BLOCK:
        raise ValueError(
            f"block_size: got {block_size}, expected a multiple of {FLASH_BLOCK} for flash-attn"
        )
    return GpuAttention(name, block_size or FLASH_BLOCK, scale, FlashDecode(), flash_prefill)
