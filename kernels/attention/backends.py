"""Attention back ends behind one interface: what measured best, or what is asked for.

- `torch`: the reference, on any device.
- `triton`: our own kernels, for any block size; `auto` on a GPU, for they measured faster than
  flash-attn 2 everywhere (README, "Measured").
- `flash-attn`: flash-attn 2.8 (Dao 2023, https://arxiv.org/abs/2307.08691), for blocks of 256
  tokens or a multiple.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention.kv_cache import KVCache
from penstock.kernels.attention.reference import attend
from penstock.kernels.step.forward_batch import Step

FLASH_BLOCK = 256
"""tokens; flash-attn's paged KV takes this or a multiple"""
DEFAULT_BLOCK = 16
TRITON_BLOCK = 128
"""tokens; the largest tile of keys, so that a tile lies in one block"""


class Attention:
    """The reference; other back ends have the same two methods."""

    name = "torch"
    can_be_captured = False
    """when it decodes, in a CUDA graph: it never asks the device for anything"""
    can_capture_prefill = False
    """in a CUDA graph whose rows prefill or decode as the device says"""

    def __init__(self, block_size: int, scale: float) -> None:
        self.block_size = block_size
        self.scale = scale

    def begin(self, step: Step) -> None:
        """Called once a step, before the layers."""

    def __call__(self, q: Tensor, kv_cache: KVCache, step: Step) -> Tensor:
        """Attention of the step's tokens, whose KV is stored: as `attend`."""
        return attend(
            q,
            kv_cache,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.shape.max_seqlen_q,
            context_lens=step.context_lens,
            block_tables=step.block_tables,
            scale=self.scale,
        )


class GpuAttention(Attention):
    """One kernel for the rows that decode, one for those that prefill."""

    can_be_captured = True

    def __init__(self, name: str, block_size: int, scale: float, decode: Any, prefill: Any) -> None:
        super().__init__(block_size, scale)
        self.name = name
        self.can_capture_prefill = prefill is triton_prefill
        self._decode = decode
        self._prefill = prefill

    def begin(self, step: Step) -> None:
        """Plans how the KV of the rows that decode is split."""
        if step.shape.num_decode:
            self._decode.plan(step.decode_lens)

    def __call__(self, q: Tensor, kv_cache: KVCache, step: Step) -> Tensor:
        """As `attend`."""
        num_decode = step.shape.num_decode
        out = torch.empty_like(q)
        if step.shape.num_tiles:
            self._prefill(q, kv_cache, step, self.scale, out)
        if num_decode:
            self._decode(
                q[:num_decode],
                kv_cache,
                context_lens=step.decode_lens,
                block_tables=step.block_tables[:num_decode],
                scale=self.scale,
                out=out[:num_decode],
            )
        return out


class FlashDecode:
    """flash-attn's decode; how it is split is fixed by the shapes."""

    def plan(self, context_lens: Tensor) -> None:
        """Nothing to plan."""

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
        """As `penstock.kernels.attention.triton_decode.DecodeAttention`."""
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


def flash_prefill(q: Tensor, kv_cache: KVCache, step: Step, scale: float, out: Tensor) -> None:
    """flash-attn for the rows that prefill, into their part of `out`."""
    from flash_attn import flash_attn_varlen_func

    shape, first = step.shape, step.shape.num_decode
    num_blocks = -(-shape.max_seqlen_k // kv_cache.k.shape[1])
    attended = flash_attn_varlen_func(
        q[first:],
        kv_cache.k,
        kv_cache.v,
        cu_seqlens_q=step.cu_seqlens_q[first:] - first,
        cu_seqlens_k=step.cu_seqlens_k[first:] - step.cu_seqlens_k[first],
        max_seqlen_q=shape.max_seqlen_q,
        max_seqlen_k=shape.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        block_table=step.block_tables[first:, :num_blocks],
    )
    out[first:].copy_(attended)


def triton_prefill(q: Tensor, kv_cache: KVCache, step: Step, scale: float, out: Tensor) -> None:
    """Our kernel for the rows that prefill, into their part of `out`."""
    from penstock.kernels.attention.triton_prefill import prefill_attention

    prefill_attention(
        q,
        kv_cache,
        tiles=step.tiles,
        tile_size=step.shape.tile_size,
        cu_seqlens_q=step.cu_seqlens_q,
        context_lens=step.context_lens,
        block_tables=step.block_tables,
        scale=scale,
        out=out,
    )


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
) -> Attention:
    """The back end `name` (auto, triton, flash-attn or torch), with blocks of `block_size` tokens.

    0: of as many as the back end likes. kv_cache_dtype: auto or fp8. Raises ValueError where it
    can't be had.
    """
    scale = head_dim**-0.5
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return Attention(block_size or DEFAULT_BLOCK, scale)
    if device.type != "cuda":
        raise ValueError(f"attention {name!r} needs a GPU; on a CPU there is 'torch'")
    if name == "triton":
        from penstock.kernels.attention.triton_decode import DecodeAttention

        block_size = block_size or TRITON_BLOCK
        layout = num_heads, num_kv_heads, head_dim, block_size
        decode = DecodeAttention(max_rows, *layout, device, is_fp8=kv_cache_dtype == "fp8")
        return GpuAttention(name, block_size, scale, decode, triton_prefill)
    if kv_cache_dtype == "fp8":
        raise ValueError(f"attention {name!r} reads no KV cache in fp8; 'triton' does")
    if find_spec("flash_attn") is None:
        raise ValueError(f"attention {name!r}: flash-attn 2.8 is not installed; 'triton' is")
    if block_size % FLASH_BLOCK:
        raise ValueError(f"block_size {block_size}; flash-attn takes multiples of {FLASH_BLOCK}")
    block_size = block_size or FLASH_BLOCK
    return GpuAttention(name, block_size, scale, FlashDecode(), flash_prefill)
