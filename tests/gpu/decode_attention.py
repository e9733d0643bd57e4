"""Decode attention against flash-attn 2: `python -m tests.gpu.decode_attention`.

Prints microseconds per layer, and the share of a device copy's rate at which keys and values are
read, for head layouts, batches and context lengths. With --fp8, also measures a cache in 8 bits.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from penstock.kernels.attention.triton_decode import DecodeAttention
from penstock.kernels.bench.timing import graph_us, l2_bytes
from penstock.kernels.elementwise import quantize
from penstock.kernels.layouts.kv_cache import KVCache
from tests.gpu.copy_rate import copy_rate

HEAD_DIM = 128
FLASH_BLOCK_SIZE = 256
HEADS = ((16, 8), (32, 8), (40, 8), (64, 8), (16, 2))
BATCHES = (1, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 32768)
BLOCK_SIZES = (FLASH_BLOCK_SIZE, 64, 16)
ALL_BLOCK_SIZES_OF = (32, 8)
"""head layout measured with all block sizes; the others are measured with the first"""
MAX_KV_BYTES = 60 << 30
REPEATS, MIN_US = 3, 1000.0
TOLERANCE, FP8_TOLERANCE = 1e-2, 6e-2


@dataclass(frozen=True)
class DecodePoint:
    """Sizes of one row of the table."""

    num_heads: int
    num_kv_heads: int
    batch: int
    context: int
    block_size: int = FLASH_BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * self.num_kv_heads * HEAD_DIM * 2


class DecodeLayers:
    """Random inputs of enough layers to exceed the L2 cache, also in 8 bits."""

    def __init__(self, point: DecodePoint) -> None:
        self.point = point
        num_layers = max(1, -(-4 * l2_bytes() // point.kv_bytes))
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
        """Return flash-attn's calls, one a layer; its blocks are multiples of 256 tokens."""
        return [partial(self._flash, k, v, self.block_tables) for k, v, _ in self.caches]

    def expected(self) -> Tensor:
        """Return flash-attn's result of the first layer, with ordered blocks."""
        k_cache, v_cache = (self._in_order(cache) for cache in self.caches[0][:2])
        table = torch.arange(len(k_cache), device="cuda").int().view(self.point.batch, -1)
        return self._flash(k_cache, v_cache, table)

    def quantize(self) -> None:
        self.caches = [_in_8_bits(kv_cache) for kv_cache in self.caches]

    def _in_order(self, cache: Tensor) -> Tensor:
        blocks = cache[self.block_tables.flatten()]
        return blocks.view(-1, FLASH_BLOCK_SIZE, *cache.shape[2:])

    def planned(self) -> DecodeAttention:
        point, is_fp8 = self.point, self.caches[0].scales is not None
        sizes = (point.batch, point.num_heads, point.num_kv_heads, HEAD_DIM, point.block_size)
        attention = DecodeAttention(*sizes, "cuda", is_fp8=is_fp8)
        attention.plan(self.context_lens)
        torch.cuda.synchronize()
        return attention

    def ours(self, attention: DecodeAttention) -> list[Callable[[], Tensor]]:
        """Return the Triton kernel's calls, one a layer."""
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
    """Return the norm of the difference over the norm of `expected`, in float32."""
    difference = (actual.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def points() -> Iterator[DecodePoint]:
    """Yield every point of the table whose keys and values fit."""
    for heads, batch, context in product(HEADS, BATCHES, CONTEXTS):
        block_sizes = BLOCK_SIZES if heads == ALL_BLOCK_SIZES_OF else BLOCK_SIZES[:1]
        for block_size in block_sizes:
            point = DecodePoint(*heads, batch, context, block_size)
            if point.kv_bytes <= MAX_KV_BYTES:
                yield point


def measure(point: DecodePoint, rate: float, fp8: bool) -> dict[str, float | None]:
    """Return a row of the table; flash-attn's time is missing for other block sizes."""
    layers = DecodeLayers(point)
    ours, expected = layers.ours(layers.planned()), layers.expected()
    error = relative_error(ours[0](), expected)
    flash_us = None
    if point.block_size == FLASH_BLOCK_SIZE:
        flash_us = graph_us(layers.flash(), REPEATS, MIN_US)
    ours_us = graph_us(ours, REPEATS, MIN_US)
    row = {
        **asdict(point),
        "flash_us": flash_us,
        "flash_share": point.kv_bytes / flash_us / rate if flash_us else None,
        "ours_us": ours_us,
        "ours_share": point.kv_bytes / ours_us / rate,
        "speedup": flash_us / ours_us if flash_us else None,
        "error": error,
    }
    return {**row, **measure_fp8(layers, expected, ours_us)} if fp8 else row


def measure_fp8(layers: DecodeLayers, expected: Tensor, bf16_us: float) -> dict[str, float]:
    """Return the columns of the same keys and values in 8 bits."""
    layers.quantize()
    ours = layers.ours(layers.planned())
    error = relative_error(ours[0](), expected)
    us = graph_us(ours, REPEATS, MIN_US)
    return {"fp8_us": us, "fp8_speedup": bf16_us / us, "fp8_error": error}


def markdown(cells: Iterable[object]) -> str:
    """Return a line of a table; floats have three significant digits."""
    texts = (f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells)
    return f"| {' | '.join('' if text is None else str(text) for text in texts)} |"


def report(rows: Iterable[Mapping[str, float | None]]) -> list[Mapping[str, float | None]]:
    """Print each row when it is measured; return all."""
    printed: list[Mapping[str, float | None]] = []
    for row in rows:
        if not printed:
            print(markdown(row), markdown("-" for _ in row), sep="\n", flush=True)
        print(markdown(row.values()), flush=True)
        printed.append(row)
    return printed


def main() -> int:
    """Measure all points; return 1 if a result differs from flash-attn's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--fp8", action="store_true", help="also measure a cache in 8 bits")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"a copy reads and writes {rate / 1e6:.2f} TB/s\n", flush=True)
    rows = report(measure(point, rate, arguments.fp8) for point in points())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    wrong = [
        row
        for row in rows
        if not ((row["error"] or 0) <= TOLERANCE and (row.get("fp8_error") or 0) <= FP8_TOLERANCE)
    ]
    for row in wrong:
        print(f"differs from flash-attn: {row}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
