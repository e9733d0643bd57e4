"""Prefill attention, compared with flash-attn if that is installed.

Prints TFLOP/s of causal attention of 16,384 tokens in whole prompts, with the heads of Qwen3-8B.
Then µs of steps of short chunks, with tiles of 64 and 128 tokens: by one program for each tile, and
by the items of `PrefillAttention`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.triton_prefill import PrefillAttention, prefill_attention
from penstock.kernels.bench.timing import graph_us
from penstock.kernels.layouts.forward_batch import (
    LARGE_TILE,
    SMALL_TILE,
    BatchShape,
    ForwardBatch,
    tile_size,
)
from penstock.kernels.layouts.kv_cache import KVCache

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BATCHES = [(32, 512), (8, 2048), (2, 8192), (1, 16384)]
"""(sequences, tokens of each)"""
STEPS = [
    [(512, 512)],
    [(960, 960)],
    [(448, 8000)],
    [(448, 50_000)],
    [(128, 70_000)],
    [(64, 70_000)],
    [(16, 100_000)],
    [(64, 2000)] * 6,
    [(64, 8000), *[(64, 1000)] * 5],
    [(128, 8192), (192, 900), (64, 1200)],
    [(150, 6000), (200, 1000), (60, 700), (45, 1400), (1, 1300)],
]
"""(tokens of a chunk, context with them) of each row"""
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
    size = tile_size(batch.length, 0, 1)
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


def measure_step(parts: list[tuple[int, int]], block_size: int) -> None:
    """Print a line for a step of chunks at the end of their contexts."""
    counts, contexts = zip(*parts, strict=True)
    batch = random_batch(len(parts), max(contexts), block_size)
    ints = partial(torch.tensor, dtype=torch.int32, device="cuda")
    q, line = batch.q[: sum(counts)], f"{parts}:"
    for size in (SMALL_TILE, LARGE_TILE):
        places = [(row, at) for row, count in enumerate(counts) for at in range(0, count, size)]
        shape = BatchShape(len(parts), len(q), 0, len(places), size, max(counts), max(contexts))
        used = {
            "tiles": ints(places),
            "cu_seqlens_q": ints([0, *counts]).cumsum(0, dtype=torch.int32),
            "context_lens": ints(contexts),
            "block_tables": batch.block_tables,
        }
        step = ForwardBatch(shape, **(dict.fromkeys(ForwardBatch._fields[1:-1], q) | used))
        scale, out = HEAD_DIM**-0.5, torch.empty_like(q)
        whole = partial(
            prefill_attention, q, batch.kv_cache, tile_size=size, scale=scale, out=out, **used
        )
        attention = PrefillAttention(NUM_HEADS, HEAD_DIM, block_size, "cuda")
        attention.plan(step)
        cut = partial(attention, q, batch.kv_cache, step, scale, out)
        alone, items = graph_us([whole]), graph_us([cut])
        line += f" tiles of {size}: whole {alone:.0f}, in items {items:.0f} µs;"
    print(line)


def main() -> None:
    """Measure all batches and steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="tokens per KV block")
    options = parser.parse_args()
    for num_seqs, length in BATCHES:
        measure(num_seqs, length, options.block_size)
    for parts in STEPS:
        measure_step(parts, options.block_size)


if __name__ == "__main__":
    main()
