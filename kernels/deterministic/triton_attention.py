"""Attention whose rows have the same bits in every batch and chunk, in decode and prefill.

The keys of a sequence are cut into splits of SPLIT keys, from its beginning. Each split is read in
tiles of BLOCK_N keys, from its first key, and the splits' sums are added in order. A token's sums
thus depend only on its position. Prefill adds the splits in registers. Decode does the same if one
program computes a whole row. If several programs share a row, they store the sums of each split,
and the last program to finish adds these sums. The assignment of splits to programs depends on the
batch, but changes no bit.

Tensor cores compute the sums over keys, including the sum of the weights: the order of other sums
in a tile depends on how the threads share it. The kernels are compiled without fusing
multiplications and additions, because the compiler may fuse differently in another kernel.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.triton_decode import (
    ITEM_INTS,
    DecodeTuning,
    PagedDecode,
)
from penstock.kernels.attention.triton_prefill import (
    PrefillTuning,
    fitting,
    offsets_of,
    slots_of,
)
from penstock.kernels.attention.triton_rope import scale_places
from penstock.kernels.device import this_device
from penstock.kernels.layouts.forward_batch import SMALL_TILE, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.triton_elementwise import as_operand, widen
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

MASSES = tl.constexpr(8)  # columns with the same sum of weights; a tensor core computes at least 8
UNROLLED = tl.constexpr(4)  # number of splits whose results are read at once


@triton.jit
def _empty(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the result for no keys: weighted sum of values, sum of weights and largest score."""
    return (
        tl.zeros([ROWS, HEAD_DIM], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )


@triton.jit
def _start(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the initial state of `_attend`: sums of one split, and of all earlier splits."""
    acc, total, top = _empty(ROWS, HEAD_DIM)
    return acc, tl.zeros([ROWS, MASSES], tl.float32), top, acc, total, top


@triton.jit
def _finish(state):
    """Return the attention over all keys, after adding the last split, which may be partial."""
    acc, masses, top, result, total, highest = state
    result, total, highest = _add_split(result, total, highest, acc, tl.max(masses, 1), top)
    return result / total[:, None]


@triton.jit
def _finite(top):
    """Return the largest scores, with 0 for rows that have seen no key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _numbers(tile, scale_ptr, places, stored, dtype: tl.constexpr):
    """Return keys or values in the queries' type; scale_ptr: scales of 8-bit numbers."""
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + places, stored, 0.0 if stored is not None else None)
        tile = (widen(tile).to(tl.float32) * scale).to(dtype)
    return tile


@triton.jit
def _add_keys(acc, masses, top, scores, v, scale):
    """Add a tile of keys to the sums of a split; scores: [ROWS, BLOCK_N]; v: the values."""
    before = top
    top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = _finite(top)
    fade = tl.exp2(before - base)[:, None]
    shift = tl.broadcast_to(-base[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, shift)).to(v.dtype)
    ones = tl.full([v.shape[0], MASSES], 1.0, v.dtype)
    masses = tl.dot(weights, ones, masses * fade, input_precision="ieee")
    acc = tl.dot(weights, v, acc * fade, input_precision="ieee")
    return acc, masses, top


@triton.jit
def _add_split(result, total, highest, acc, mass, top):
    """Add the sums of a split to those of earlier splits; a split without keys changes nothing."""
    before = highest
    highest = tl.maximum(highest, top)
    base = _finite(highest)
    fade, factor = tl.exp2(before - base), tl.exp2(top - base)
    wide_fade = tl.broadcast_to(fade[:, None], result.shape)
    result = tl.fma(result, wide_fade, acc * factor[:, None])
    total = tl.fma(total, fade, mass * factor)
    return result, total, highest


@triton.jit
def _store_split(partials, index, acc, mass, top, GROUP: tl.constexpr):
    """Store the sums of a split for the first GROUP rows; partials: see `decode_kernel`."""
    values_ptr, masses_ptr, tops_ptr, head_stride = partials
    rows = tl.arange(0, acc.shape[0])
    at = index.to(tl.int64) * head_stride + rows
    columns = tl.arange(0, acc.shape[1])[None, :]
    real = rows < GROUP
    tl.store(values_ptr + at[:, None] * acc.shape[1] + columns, acc, real[:, None])
    tl.store(masses_ptr + at, mass, real)
    tl.store(tops_ptr + at, top, real)


@triton.jit
def _attend(
    q, cache, table, begin, end, positions, scale, partials, first, state,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Process the keys from `begin`, a multiple of BLOCK_N, to `end`.

    cache: pointers to a head's keys, values and their scales. MASKED: True if a query precedes a
    key, or if `end` lies within a tile. STORES: store each split's sums instead of adding them to
    the result.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = cache
    acc, masses, top, result, total, highest = state
    row_size: tl.constexpr = NUM_KV_HEADS * q.shape[1]
    slots = slots_of(table, begin, end, BLOCK_SIZE, BLOCK_N)
    for key in range(begin, end, BLOCK_N):
        offsets = offsets_of(slots, row_size, q.shape[1], BLOCK_N)
        places = offsets
        if k_scale_ptr is not None:
            places = offsets_of(scale_places(slots, NUM_KV_HEADS, BLOCK_SIZE), 1, 1, BLOCK_N)
        slots = slots_of(table, key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key_positions = key + tl.arange(0, BLOCK_N)
        # memory after the last key may hold NaN; a weight of 0 would not remove it
        stored = (key_positions < end)[:, None] if MASKED else None
        k = tl.load(k_ptr + offsets, stored, 0.0 if MASKED else None)
        v = tl.load(v_ptr + offsets, stored, 0.0 if MASKED else None)
        k = _numbers(k, k_scale_ptr, places, stored, q.dtype)
        v = _numbers(v, v_scale_ptr, places, stored, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = key_positions[None, :] <= positions[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        acc, masses, top = _add_keys(acc, masses, top, scores, v, scale)
        if (key + BLOCK_N) % SPLIT == 0:
            mass = tl.max(masses, 1)
            if STORES:
                _store_split(partials, first + key // SPLIT, acc, mass, top, GROUP)
            else:
                result, total, highest = _add_split(result, total, highest, acc, mass, top)
            acc, masses = tl.zeros_like(acc), tl.zeros_like(masses)
            top = tl.full(top.shape, float("-inf"), tl.float32)
    return acc, masses, top, result, total, highest


@triton.jit(do_not_specialize=["max_blocks"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, block_tables_ptr, max_blocks, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head in each program; heads of a group are neighbors.

    scale: factor of the scores, for powers of 2.
    """
    launch_dependents()
    wait()
    head, tile = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if seq < 0:
        return
    begin = tl.load(cu_seqlens_q_ptr + seq)
    num_queries = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    context_len = tl.load(context_lens_ptr + seq)
    table = block_tables_ptr + seq.to(tl.int64) * max_blocks
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    rows = tl.arange(0, BLOCK_M)
    q_ptr += (begin + first).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    out_ptr += (begin + first).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    offsets = rows[:, None] * (NUM_HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    exists = (first + rows < num_queries)[:, None]
    q = tl.load(q_ptr + offsets, exists, 0)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * BLOCK_SIZE
        v_scale_ptr += kv_head * BLOCK_SIZE
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)  # as in decode attention
    position = context_len - num_queries + first  # position of the first query
    positions = position + rows
    end = tl.minimum(context_len, position + BLOCK_M)
    full_end = (position + 1) // BLOCK_N * BLOCK_N  # every query sees every key before
    cache = k_ptr, v_ptr, k_scale_ptr, v_scale_ptr
    state = _attend(
        q, cache, table, 0, full_end, positions, scale, None, 0, _start(BLOCK_M, HEAD_DIM),
        1, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, SPLIT, False, False,
    )  # fmt: skip
    state = _attend(
        q, cache, table, full_end, end, positions, scale, None, 0, state,
        1, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, SPLIT, True, False,
    )  # fmt: skip
    tl.store(out_ptr + offsets, _finish(state).to(out_ptr.dtype.element_ty), exists)


@triton.jit
def _merge(partials, first, num_splits, out_ptr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """Write the attention of the first GROUP rows from the sums of all splits."""
    values_ptr, masses_ptr, tops_ptr, head_stride = partials
    FILLED: tl.constexpr = triton.next_power_of_2(GROUP)
    heads = tl.minimum(tl.arange(0, FILLED), GROUP - 1)  # padded with the last head
    columns = tl.arange(0, HEAD_DIM)[None, :]
    result, total, highest = _empty(FILLED, HEAD_DIM)
    for turn in range(0, num_splits, UNROLLED):
        for number in tl.static_range(UNROLLED):
            split = turn + number
            there = split + heads * 0 < num_splits
            at = (first + split).to(tl.int64) * head_stride + heads
            acc = tl.load(
                values_ptr + at[:, None] * HEAD_DIM + columns, there[:, None], 0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            mass = tl.load(masses_ptr + at, there, 0.0, cache_modifier=".cg")
            top = tl.load(tops_ptr + at, there, float("-inf"), cache_modifier=".cg")
            result, total, highest = _add_split(result, total, highest, acc, mass, top)
    merged = (result / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads[:, None] * HEAD_DIM + columns, merged)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, block_tables_ptr, items_ptr, out_ptr,
    values_ptr, masses_ptr, tops_ptr, arrived_ptr, scale, q_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute one item, whole splits of one row, with one KV head in each program.

    Sums of the splits of rows with several items: values [splits, NUM_KV_HEADS, GROUP, HEAD_DIM];
    masses and tops have no last dimension. scale: factor of the scores, for powers of 2.
    """
    head, item = tl.program_id(0), tl.program_id(1)
    items_ptr += item * ITEM_INTS
    row = tl.load(items_ptr).to(tl.int64)
    if row < 0:
        wait()
        return
    begin, end = tl.load(items_ptr + 1), tl.load(items_ptr + 2)
    num_items, first, context_len = (
        tl.load(items_ptr + 4), tl.load(items_ptr + 5), tl.load(items_ptr + 6)
    )  # fmt: skip
    table = block_tables_ptr + row * table_stride
    wait()
    query = tl.arange(0, 16)
    tile = query[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q_ptr += row * q_stride + head * (GROUP * HEAD_DIM)
    q = tl.load(q_ptr + tile, (query < GROUP)[:, None], 0.0)
    k_ptr += head * HEAD_DIM
    v_ptr += head * HEAD_DIM
    if k_scale_ptr is not None:
        k_scale_ptr += head * BLOCK_SIZE
        v_scale_ptr += head * BLOCK_SIZE
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)
    cache = k_ptr, v_ptr, k_scale_ptr, v_scale_ptr
    at_head = head * GROUP
    partials = (
        values_ptr + at_head * HEAD_DIM, masses_ptr + at_head, tops_ptr + at_head,
        NUM_KV_HEADS * GROUP,
    )  # fmt: skip
    positions = query * 0 + (context_len - 1)
    out_ptr += (row * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
    if num_items == 1:
        state = _attend(
            q, cache, table, begin, end, positions, scale, partials, first, _start(16, HEAD_DIM),
            GROUP, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, SPLIT, True, False,
        )  # fmt: skip
        attended = _finish(state).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tile, attended, (query < GROUP)[:, None])
    else:
        acc, masses, top, _, _, _ = _attend(
            q, cache, table, begin, end, positions, scale, partials, first, _start(16, HEAD_DIM),
            GROUP, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, SPLIT, True, True,
        )  # fmt: skip
        if tl.cdiv(end, BLOCK_N) * BLOCK_N % SPLIT != 0:  # the last tile does not end a split
            _store_split(partials, first + end // SPLIT, acc, tl.max(masses, 1), top, GROUP)
        tl.debug_barrier()  # every thread stores its sums before the counter's addition
        counter_ptr = arrived_ptr + row * NUM_KV_HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_items - 1:
            tl.store(counter_ptr, 0)
            _merge(partials, first, tl.cdiv(context_len, SPLIT), out_ptr, HEAD_DIM, GROUP)


BLOCK_N, SPLIT = 64, 128  # keys of a tile and keys of a split
STORED_FLOATS = 8 << 20  # elements of the stored sums of splits (32 MB)


def keys_of_tile(is_fp8: bool, head_dim: int) -> int:
    """Return the number of keys of a tile on this device, for both decode and prefill.

    More of them would spill registers.
    """
    if is_fp8 and not this_device().is_asynchronous:
        return BLOCK_N // 4
    return BLOCK_N if head_dim <= 128 else BLOCK_N // 2


def prefill_tuning(tile_size: int, head_dim: int, is_fp8: bool) -> PrefillTuning:
    """Return the tuning that fits this device; every tuning gives the same bits."""
    num_warps = 4 if tile_size <= SMALL_TILE and head_dim <= 128 else 8
    block_n = keys_of_tile(is_fp8, head_dim)
    tunings = [PrefillTuning(block_n, num_warps, num_stages) for num_stages in (3, 2, 1)]
    return fitting(tunings, tile_size, head_dim, this_device(), is_fp8)


class FixedSplitDecode(PagedDecode):
    """Decode attention with splits that do not depend on the other rows."""

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
        """Allocate the workspace; capacity: stored splits, by default from STORED_FLOATS."""
        sizes = num_heads, num_kv_heads, head_dim, block_size, device
        block_n = keys_of_tile(is_fp8, head_dim)
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

    def _splits(self, num_rows: int) -> tuple[int, int, int]:
        del num_rows
        return 1, SPLIT, self._capacity

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
    """Compute the attention of prefilling rows with fixed splits.

    The arguments are those of `penstock.kernels.attention.triton_prefill.PrefillAttention`.
    """
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
