"""Attention of one new token per sequence over a paged KV cache, split over the keys.

Flash-decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): several programs share
the keys of a long sequence, and the last program to finish merges their results. The work list is
made on the device once a step, because lengths differ between replays of a CUDA graph.

A row's sums are taken in one order, whichever program finishes last. The split of a row, and with
it the last bits of its result, depends on the lengths of the other rows.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.attention.triton_decode_items import (
    ITEM_INTS,
    DecodeTuning,
    default_tuning,
    plan_kernel,
)
from penstock.kernels.attention.triton_decode_keys import attend_keys, slots_from
from penstock.kernels.device import this_device
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.quantize.triton_e4m3 import as_operand
from penstock.kernels.triton_pdl import LAUNCH, wait

MAX_ROWS = 4096
MAX_GROUP = 16  # query heads per KV head: the rows of one tensor core instruction
MERGED_FLOATS = 4096  # elements of partial results that are merged in one iteration


class DecodeAttention:
    """Decode attention with its work list and workspace, shared by all layers and CUDA graphs.

    Calls must not overlap: `plan` once a step, then the layers of this step in turn.
    """

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
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Allocate the workspace; is_fp8: of the KV cache. Raises ValueError for invalid sizes."""
        self._fixed_tuning, self._group = tuning, num_heads // num_kv_heads
        self._is_fp8, self._head_dim, self._block_size = is_fp8, head_dim, block_size
        _check_sizes(max_rows, num_heads, num_kv_heads, head_dim, block_size, self._tuning(1))
        self._max_rows, self._num_heads, self._num_kv_heads = max_rows, num_heads, num_kv_heads
        # the interpreter has one SM
        self._num_sms = 1 if torch.device(device).type == "cpu" else this_device().num_sms
        max_items = max(self.max_items(rows) for rows in range(1, max_rows + 1))
        self.items = torch.full((max_items, ITEM_INTS.value), -1, dtype=torch.int32, device=device)
        self._allocate(max_items, device)
        # The program that merges a row's splits resets the row's counters to 0.
        self._arrived = torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device)

    def _allocate(self, max_items: int, device: torch.device | str) -> None:
        """Allocate memory for the results of rows with several items."""
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        self._partials = empty(max_items, self._num_heads, self._head_dim)
        self._lses = empty(max_items, self._num_heads)

    def max_items(self, num_rows: int) -> int:
        """Return the maximum number of items of `num_rows` rows of any lengths."""
        return max(self._target_items(num_rows), num_rows + num_rows // 2)

    def _tuning(self, num_rows: int) -> DecodeTuning:
        return self._fixed_tuning or default_tuning(
            num_rows, self._group, self._head_dim, is_fp8=self._is_fp8
        )

    def _target_items(self, num_rows: int) -> int:
        """Return the number of items that fills the GPU."""
        programs = self._num_sms * self._tuning(num_rows).programs_per_sm
        return max(1, programs // self._num_kv_heads)

    def plan(self, context_lens: Tensor) -> None:
        """Make the work list of a step from context_lens, int32 [num_rows], 0 for a padded row.

        A kernel without programmatic dependent launch, such as the embedding, must follow before
        the first layer: the layers read the list before they wait.
        """
        num_rows = context_lens.shape[0]
        check_tensor("context_lens", context_lens, (-1,), torch.int32)
        check_contiguous("context_lens", context_lens)
        self._check_rows(num_rows)
        rows = max(16, triton.next_power_of_2(num_rows))
        tuning, max_items = self._tuning(num_rows), self.max_items(num_rows)
        plan_kernel[(1,)](
            context_lens, self.items, num_rows, max_items, self._target_items(num_rows),
            triton.cdiv(tuning.min_split, tuning.block_n), tuning.block_n, rows,
            num_warps=8 if rows > 256 else 4, **LAUNCH
        )  # fmt: skip

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
        """Write the attention of every row to `out`; nothing for a padded row.

        q: [num_rows, num_heads, head_dim], with any row stride. kv_cache: includes this step's
        tokens. context_lens: as in `plan`. block_tables: int32 [num_rows, max_blocks]. scale:
        factor of the scores. out: like q, contiguous.
        """
        num_rows = q.shape[0]
        self._check_rows(num_rows)
        self._check_tensors(q, kv_cache, out)
        check_tensor("context_lens", context_lens, (num_rows,), torch.int32)
        check_tensor("block_tables", block_tables, (num_rows, -1), torch.int32)
        if block_tables.stride(1) != 1:
            raise ValueError(
                f"block_tables: got stride {block_tables.stride(1)} in a row, expected 1"
            )
        self._attend(q, kv_cache, block_tables, scale, out)

    def _attend(
        self, q: Tensor, kv_cache: KVCache, block_tables: Tensor, scale: float, out: Tensor
    ) -> None:
        num_rows = q.shape[0]
        tuning = self._tuning(num_rows)
        _decode_kernel[(self._num_kv_heads, self.max_items(num_rows))](
            q, as_operand(kv_cache.k), as_operand(kv_cache.v), *(kv_cache.scales or (None, None)),
            block_tables, self.items, out,
            self._partials, self._lses, self._arrived,
            scale * math.log2(math.e), q.stride(0), block_tables.stride(0),
            self._num_kv_heads, self._group, self._head_dim, self._block_size,
            tuning.block_n, merged_splits(self._group, self._head_dim),
            num_warps=tuning.num_warps, num_stages=tuning.num_stages, **LAUNCH
        )  # fmt: skip

    def _check_rows(self, num_rows: int) -> None:
        if not 1 <= num_rows <= self._max_rows:
            raise ValueError(f"q: got {num_rows} rows, expected 1 to {self._max_rows}")

    def _check_tensors(self, q: Tensor, kv_cache: KVCache, out: Tensor) -> None:
        check_tensor("q", q, (-1, self._num_heads, self._head_dim))
        if q.stride()[1:] != (self._head_dim, 1):
            raise ValueError(f"q: got strides {list(q.stride())}, expected contiguous rows")
        kv_cache.check(q.dtype, self._block_size, self._num_kv_heads, self._head_dim)
        check_tensor("out", out, tuple(q.shape), q.dtype)
        check_contiguous("out", out)


def merged_splits(group: int, head_dim: int) -> int:
    """Return the number of splits merged in one iteration, a power of two."""
    return max(1, MERGED_FLOATS // (int(triton.next_power_of_2(group)) * head_dim))


def _check_sizes(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tuning: DecodeTuning,
) -> None:
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows: got {max_rows}, expected 1 to {MAX_ROWS}")
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        raise ValueError(
            f"num_heads: got {num_heads} for {num_kv_heads} KV heads, "
            f"expected 1 to {MAX_GROUP} for each"
        )
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim: got {head_dim}, expected a power of 2 from 16 to 256")
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, expected 1 or more")
    if tuning.block_n < 16 or tuning.block_n & (tuning.block_n - 1):
        raise ValueError(f"block_n: got {tuning.block_n}, expected a power of 2, 16 or more")


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, block_tables_ptr, items_ptr, out_ptr,
    partials_ptr, lses_ptr, arrived_ptr, scale_log2, q_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MERGED_SPLITS: tl.constexpr
):  # fmt: skip
    """Attend one item with one KV head in each program; the heads of an item are adjacent.

    The next kernel is not launched early: its reads of the output projection's weights would
    precede the reads of keys and values (8B, batch 16: 132 instead of 120 µs a layer).
    """
    head, item = tl.program_id(0), tl.program_id(1)
    item_ptr = items_ptr + item * ITEM_INTS
    row = tl.load(item_ptr).to(tl.int64)
    if row < 0:
        wait()
        return
    begin, end = tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    first, num_splits = tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    table_ptr = block_tables_ptr + row * table_stride
    slots = slots_from(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    wait()
    query = tl.arange(0, 16)
    tile = query[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    real = (query < GROUP)[:, None]
    q = tl.load(q_ptr + row * q_stride + head * (GROUP * HEAD_DIM) + tile, real, 0.0)
    acc, lse = attend_keys(
        q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, slots, head, begin, end, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N
    )  # fmt: skip
    out_ptr += (row * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
    if num_splits == 1:
        tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty), real)
    else:
        part = (item.to(tl.int64) * NUM_KV_HEADS + head) * GROUP
        tl.store(partials_ptr + part * HEAD_DIM + tile, acc, real)
        tl.store(lses_ptr + part + query, lse, query < GROUP)
        # Every thread's stores come before the counter's addition, which releases them.
        tl.debug_barrier()
        counter_ptr = arrived_ptr + row * NUM_KV_HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1:
            tl.store(counter_ptr, 0)
            part = (first.to(tl.int64) * NUM_KV_HEADS + head) * GROUP
            _merge(
                partials_ptr + part * HEAD_DIM, lses_ptr + part, num_splits, out_ptr,
                NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, MERGED_SPLITS
            )  # fmt: skip


@triton.jit
def _merge(
    partials_ptr, lses_ptr, num_splits, out_ptr, SPLIT_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, MERGED_SPLITS: tl.constexpr
):  # fmt: skip
    """Write the mean of a row's partial results, weighted by 2 ** lse, in the splits' order.

    The first GROUP heads of partials [num_splits, SPLIT_HEADS, HEAD_DIM] and of lses
    [num_splits, SPLIT_HEADS] are used.
    """
    FILLED: tl.constexpr = triton.next_power_of_2(GROUP)
    heads = tl.minimum(tl.arange(0, FILLED), GROUP - 1)  # padded with the last head
    dims = tl.arange(0, HEAD_DIM)
    top = tl.full([FILLED], float("-inf"), tl.float32)
    total = tl.zeros([FILLED], tl.float32)
    acc = tl.zeros([FILLED, HEAD_DIM], tl.float32)
    # Heads come first: the warps share them, and no sum over splits crosses warps.
    for turn in range(0, num_splits, MERGED_SPLITS):
        splits = turn + tl.arange(0, MERGED_SPLITS)[None, :]
        there = splits < num_splits
        rows = splits * SPLIT_HEADS + heads[:, None]
        cells = rows[:, :, None] * HEAD_DIM + dims[None, None, :]
        # Before the lses, or some of these loads wait for them.
        partials = tl.load(partials_ptr + cells, there[:, :, None], 0.0)
        lses = tl.load(lses_ptr + rows, there, float("-inf"))
        new_top = tl.maximum(top, tl.max(lses, 1))
        weights = tl.exp2(lses - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.sum(partials * weights[:, :, None], 1)
        top = new_top
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], result)
