"""Attention whose rows have the same bits in every batch and chunk, decoding or prefilling.

The keys of a sequence are cut into splits of SPLIT keys, from its beginning. A split is attended
from its front, in tiles of BLOCK_N keys, and the splits' sums are added in turn. A token's sums
thus depend on its position only. Prefill adds the splits in registers, and so does decode where one
program has a row. Where several have it, they store the sums of each split, and the last program to
finish adds these. The splits of a program follow from the batch, and change no bit.
"""

import math
from functools import partial

import torch
import triton
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.attention.triton_decode import DecodeAttention
from penstock.kernels.attention.triton_decode_items import DecodeTuning, plan_kernel
from penstock.kernels.attention.triton_fixed_splits import decode_kernel, prefill_kernel
from penstock.kernels.attention.triton_prefill import PrefillTuning, prefill_shared_bytes
from penstock.kernels.device import this_device
from penstock.kernels.layouts.forward_batch import SMALL_TILE, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.quantize.triton_e4m3 import as_operand
from penstock.kernels.triton_pdl import LAUNCH

BLOCK_N, SPLIT = 64, 128  # keys of a tile, and of a split
STORED_FLOATS = 8 << 20  # elements of the stored sums of splits (32 MB)


def keys_of_tile(is_fp8: bool) -> int:
    """Return the keys of a tile on this device, for decode and prefill alike."""
    is_synchronous = this_device().capability[0] not in (9, 10)
    return BLOCK_N // 4 if is_fp8 and is_synchronous else BLOCK_N  # more would spill registers


def prefill_tuning(tile_size: int, head_dim: int, is_fp8: bool) -> PrefillTuning:
    """Return the tuning that fits this device; every tuning gives the same bits."""
    num_warps = 4 if tile_size <= SMALL_TILE else 8
    block_n = keys_of_tile(is_fp8)
    tunings = [PrefillTuning(block_n, num_warps, num_stages) for num_stages in (3, 2, 1)]
    size = partial(prefill_shared_bytes, tile_size=tile_size, head_dim=head_dim, is_fp8=is_fp8)
    return this_device().fitting(tunings, size)


class FixedSplitDecode(DecodeAttention):
    """`DecodeAttention` with splits that do not depend on the other rows."""

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device | str,
        *,
        is_fp8: bool = False,
        capacity: int = 0,
    ) -> None:
        """Allocate the workspace; capacity: splits that are stored, default by STORED_FLOATS."""
        sizes = num_heads, num_kv_heads, head_dim, block_size, device
        block_n = keys_of_tile(is_fp8)
        key_bytes = (head_dim + 4 if is_fp8 else 2 * head_dim) * 2 * block_n
        num_stages = 3 if 2 * key_bytes + 32 * head_dim <= this_device().shared_bytes else 2
        tuning = DecodeTuning(block_n, 4, num_stages, 2, SPLIT)
        self._capacity = capacity or max(1, STORED_FLOATS // (num_heads * head_dim))
        super().__init__(max_rows, *sizes, is_fp8=is_fp8, tuning=tuning)

    def _allocate(self, max_items: int, device: torch.device | str) -> None:
        del max_items
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        self._partials = empty(self._capacity, self._num_heads, self._head_dim)
        self._masses = empty(self._capacity, self._num_heads)
        self._tops = empty(self._capacity, self._num_heads)

    def plan(self, context_lens: Tensor) -> None:
        """Compute `DecodeAttention.plan`; items consist of whole splits."""
        num_rows = context_lens.shape[0]
        check_tensor("context_lens", context_lens, (-1,), torch.int32)
        check_contiguous("context_lens", context_lens)
        self._check_rows(num_rows)
        rows = max(16, triton.next_power_of_2(num_rows))
        plan_kernel[(1,)](
            context_lens, self.items, num_rows, self.max_items(num_rows),
            self._target_items(num_rows), 1, SPLIT, rows, self._capacity,
            num_warps=8 if rows > 256 else 4, **LAUNCH
        )  # fmt: skip

    def _attend(
        self, q: Tensor, kv_cache: KVCache, tables: Tensor, scale: float, out: Tensor
    ) -> None:
        num_rows = q.shape[0]
        tuning = self._tuning(num_rows)
        decode_kernel[(self._num_kv_heads, self.max_items(num_rows))](
            q, as_operand(kv_cache.k), as_operand(kv_cache.v), *(kv_cache.scales or (None, None)),
            tables, self.items, out, self._partials, self._masses, self._tops, self._arrived,
            scale * math.log2(math.e), q.stride(0), tables.stride(0),
            self._num_kv_heads, self._group, self._head_dim, self._block_size, tuning.block_n,
            SPLIT, num_warps=tuning.num_warps, num_stages=tuning.num_stages, enable_fp_fusion=False,
            **LAUNCH
        )  # fmt: skip


def fixed_split_prefill(
    q: Tensor, kv_cache: KVCache, batch: ForwardBatch, scale: float, out: Tensor
) -> None:
    """Compute `penstock.kernels.attention.backends.triton_prefill` with fixed splits."""
    tiles, tile_size, tables = batch.tiles, batch.shape.tile_size, batch.block_tables
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.k.shape[1:3]
    tuning = prefill_tuning(tile_size, head_dim, kv_cache.scales is not None)
    if not len(tiles):
        return
    prefill_kernel[(num_heads, len(tiles))](
        q, as_operand(kv_cache.k), as_operand(kv_cache.v), *(kv_cache.scales or (None, None)), out,
        tiles, batch.cu_seqlens_q, batch.context_lens, tables, tables.stride(0),
        scale * math.log2(math.e), num_heads, num_kv_heads, head_dim, block_size, tile_size,
        tuning.block_n, SPLIT, num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip
