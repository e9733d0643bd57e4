"""Prefill attention, compared with flash-attn if that is installed.

Prints TFLOP/s of causal attention of 16,384 tokens in whole prompts, with the heads of Qwen3-8B.
Then µs of short chunks at the end of a context, by one program for each tile, and by programs that
share the keys of a tile.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.triton_prefill import PartialResults, prefill_attention
from penstock.kernels.bench.timing import graph_us
from penstock.kernels.layouts.forward_batch import SMALL_TILE, tile_size
from penstock.kernels.layouts.kv_cache import KVCache

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BATCHES = [(32, 512), (8, 2048), (2, 8192), (1, 16384)]
"""(sequences, tokens of each)"""
CHUNKS = [(16, 2000), (16, 100_000), (64, 4000), (64, 100_000), (256, 4000), (448, 8000)]
"""(tokens of the chunk, context with them)"""
BLOCK_SIZE = 256


class PrefillBatch(NamedTuple):
    """Whole prompts of one length, with keys and values in randomly ordered blocks."""

    length: int
    q: Tensor
    kv_cache: KVCache
    cu_seqlens: Tensor
    context_lens: Tensor
    block_tables: Tensor


def random_batch(num_seqs: int, length: int, block_size: int) -> PrefillBatch:
    """Return a batch on the GPU, in bfloat16."""
    blocks_per_seq = -(-length // block_size)
    num_blocks = num_seqs * blocks_per_seq
    cache_shape = (2, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM)
    return PrefillBatch(
        length,
        torch.randn(num_seqs * length, NUM_HEADS, HEAD_DIM).bfloat16().cuda(),
        KVCache(*torch.randn(cache_shape).bfloat16().cuda()),
        (torch.arange(num_seqs + 1) * length).int().cuda(),
        torch.full((num_seqs,), length).int().cuda(),
        torch.randperm(num_blocks).view(num_seqs, blocks_per_seq).int().cuda(),
    )


def ours(batch: PrefillBatch) -> Callable[[], object]:
    """Return a call of the Triton kernel with its default tuning."""
    size = tile_size(batch.length)
    firsts = range(-(-batch.length // size) * size - size, -1, -size)
    pairs = [(seq, first) for seq in range(len(batch.context_lens)) for first in firsts]
    return partial(
        prefill_attention,
        batch.q,
        batch.kv_cache,
        tiles=torch.tensor(pairs).int().cuda(),
        tile_size=size,
        cu_seqlens_q=batch.cu_seqlens,
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        scale=HEAD_DIM**-0.5,
        out=torch.empty_like(batch.q),
    )


def flash(batch: PrefillBatch) -> Callable[[], object]:
    """Return a call of flash-attn."""
    return partial(
        flash_attn_varlen_func,
        batch.q,
        batch.kv_cache.k,
        batch.kv_cache.v,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_k=batch.cu_seqlens,
        max_seqlen_q=batch.length,
        max_seqlen_k=batch.length,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
        block_table=batch.block_tables,
    )


def tflops(batch: PrefillBatch, call: Callable[[], object]) -> float:
    """Return the rate of the products of queries with visible keys, and of weights with values."""
    num_pairs = len(batch.context_lens) * batch.length * (batch.length + 1) / 2
    return 4 * HEAD_DIM * NUM_HEADS * num_pairs / graph_us([call], min_us=20_000) / 1e6


def measure(num_seqs: int, length: int, block_size: int) -> None:
    """Print a line for each kernel."""
    batch = random_batch(num_seqs, length, block_size)
    name = f"{num_seqs:2} x {length:5}, blocks of {block_size:3}:"
    print(f"{name} ours {tflops(batch, ours(batch)):6.1f} TFLOP/s")
    if flash_attn_varlen_func is not None and block_size % 256 == 0:
        print(f"{name} flash-attn {tflops(batch, flash(batch)):6.1f} TFLOP/s")


def measure_chunk(length: int, context: int, block_size: int) -> None:
    """Print a line for a chunk at the end of a context."""
    batch = random_batch(1, context, block_size)
    q = batch.q[:length]
    call = partial(
        prefill_attention,
        q,
        batch.kv_cache,
        tiles=torch.tensor([(0, first) for first in range(0, length, SMALL_TILE)]).int().cuda(),
        tile_size=SMALL_TILE,
        cu_seqlens_q=torch.tensor([0, length]).int().cuda(),
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        scale=HEAD_DIM**-0.5,
        out=torch.empty_like(q),
    )
    shared = partial(call, partial_results=PartialResults.allocate(HEAD_DIM, "cuda"))
    alone, together = graph_us([call]), graph_us([shared])
    print(f"{length:3} of {context}: alone {alone:.0f}, shared {together:.0f} µs")


def main() -> None:
    """Measure all batches and chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="tokens per KV block")
    options = parser.parse_args()
    for num_seqs, length in BATCHES:
        measure(num_seqs, length, options.block_size)
    for length, context in CHUNKS:
        measure_chunk(length, context, options.block_size)


if __name__ == "__main__":
    main()
