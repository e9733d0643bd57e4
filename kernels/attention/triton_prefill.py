"""Causal attention of prefill chunks over the paged KV cache, in Triton.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): a program holds one tile of queries
of one head and reads the keys once, with a running maximum and sum of the softmax.

Tiles of a step differ in their keys, and few tiles do not fill a GPU. So `PrefillAttention` cuts
the keys of long tiles into items, the longest first, as decode attention does (triton_decode.py).
The last program to finish a tile's items merges their results. The device makes the list of items,
because it differs between replays of a CUDA graph.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.triton_decode import shortest_split
from penstock.kernels.attention.triton_rope import scale_places
from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.forward_batch import LARGE_TILE, SMALL_TILE, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.triton_elementwise import as_operand, widen
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

MIN_HEAD_DIM = 16
BARRIER_BYTES = 2048  # at most
MAX_TILES = 128  # a power of two; tiles of a step with more are not cut
LEAST_KEYS = 512  # of an item, unless its tile has fewer
WAVES = 2  # of programs that run at the same time, beyond those that whole tiles need
# row, first token in the step, number of tokens, position of the first one, keys [first, last) that
# every token sees, place of the tile's first partial result, number of the tile's items, item
ITEM_INTS = tl.constexpr(9)
MOST_ITEMS = tl.constexpr(1 << 12)  # of a tile
# keys that take as long as the start of a program, and as the merge of a tile's results (H200)
OVERHEAD, MERGE = tl.constexpr(128), tl.constexpr(512)


class PrefillTuning(NamedTuple):
    """Tile sizes of the kernel; they change only its speed."""

    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int  # iterations whose keys and values are loaded at the same time


def prefill_shared_bytes(
    tuning: PrefillTuning, tile_size: int, head_dim: int, device: Device, *, is_fp8: bool = False
) -> int:
    """Return the bytes of shared memory: keys and values in flight, queries and weights.

    After them, the same memory holds the float32 result while its layout changes.
    """
    key_bytes = head_dim + 4 if is_fp8 else 2 * head_dim
    in_flight = (tuning.num_stages - 1) * 2 * tuning.block_n * key_bytes
    if device.is_asynchronous:  # the operands of products in progress, and barriers
        return in_flight + (2 * tuning.block_n + tile_size) * 2 * head_dim + BARRIER_BYTES
    # in registers with large tiles, unless wide heads need those
    weights = tuning.block_n if tile_size <= SMALL_TILE or head_dim > 128 else 0
    result = tile_size * 4 * min(head_dim, 128)  # wide ones in parts
    return max(in_flight + tile_size * 2 * (head_dim + weights), result)


def fitting(
    tunings: Iterable[PrefillTuning], tile_size: int, head_dim: int, device: Device, is_fp8: bool
) -> PrefillTuning:
    """Return the first tuning that fits the device's shared memory. Raises ValueError for none."""
    sizes = {"tile_size": tile_size, "head_dim": head_dim, "device": device, "is_fp8": is_fp8}
    return device.fitting(tunings, partial(prefill_shared_bytes, **sizes))  # type: ignore[arg-type]


def default_tuning(
    tile_size: int,
    block_size: int,
    head_dim: int = 128,
    *,
    is_fp8: bool = False,
    device: Device | None = None,
) -> PrefillTuning:
    """Return the tuning for KV blocks of block_size tokens that fits the device's shared memory.

    device: default `this_device`. Raises ValueError if no tuning fits.
    """
    device = device or this_device()
    tunings = [PrefillTuning(64, 8, 3), PrefillTuning(64, 8, 2), PrefillTuning(32, 8, 2)]
    if tile_size <= SMALL_TILE:
        tunings = [PrefillTuning(32, 4, 3), PrefillTuning(32, 4, 2)]
    elif block_size % 128 == 0 and device.is_measured:  # other tensor cores spill registers
        tunings.insert(0, PrefillTuning(128, 8, 3))
    elif is_fp8 and not device.has_fp8:
        tunings.insert(0, PrefillTuning(32, 8, 3))  # widening more keys spills registers
    elif block_size % 64 and is_fp8 and device.capability >= (12, 0):
        tunings.insert(0, PrefillTuning(32, 8, 3))  # the slots of more keys spill registers
    if tile_size > SMALL_TILE and head_dim > 128:
        tunings.append(PrefillTuning(16, 8, 2))
    return fitting(tunings, tile_size, head_dim, device, is_fp8)


def prefill_attention(
    q: Tensor,
    kv_cache: KVCache,
    *,
    tiles: Tensor,
    tile_size: int,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    out: Tensor,
    tuning: PrefillTuning | None = None,
    items: "Items | None" = None,
) -> None:
    """Write the attention of the tiles' tokens into `out`; other rows of `out` keep their values.

    tiles: int32 [num_tiles, 2]: sequence, and index of the first of `tile_size` tokens (a power of
    two) in the sequence's chunk; -1 for padding. Other arguments are as in
    penstock.kernels.attention.reference.attend. q, out: contiguous [num_tokens, num_heads,
    head_dim]. Each row of block_tables is contiguous, and scale > 0. items: the tiles, cut by
    `PrefillAttention`. Raises ValueError if head_dim is not a power of two, or below MIN_HEAD_DIM.
    """
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.k.shape[1:3]
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim: got {head_dim}, expected a power of 2, {MIN_HEAD_DIM} or more")
    block_n, num_warps, num_stages = tuning or default_tuning(
        tile_size, block_size, head_dim, is_fp8=kv_cache.scales is not None
    )
    if not tiles.shape[0]:
        return
    _prefill_attention_kernel[(num_heads, items.number if items else tiles.shape[0])](
        q, as_operand(kv_cache.k), as_operand(kv_cache.v), *(kv_cache.scales or (None, None)), out,
        *(items[1:] if items else (None, None, None, None)),
        tiles, cu_seqlens_q, context_lens, block_tables, block_tables.stride(0),
        scale * math.log2(math.e), num_heads, num_kv_heads, head_dim, block_size, tile_size,
        block_n, num_warps=num_warps, num_stages=num_stages, **LAUNCH,
    )  # fmt: skip


class Items(NamedTuple):
    """The items of a step, and memory for the results of tiles that have several."""

    number: int  # at most
    items: Tensor  # int32 [number, ITEM_INTS]; row -1: none
    sums: Tensor  # float32 [num_places, num_heads, tile_size, head_dim]
    lses: Tensor  # float32 [num_places, num_heads, tile_size]: base 2 logs of the weights' sums
    arrived: Tensor  # int32 [num_places, num_heads]; 0 between launches


class PrefillAttention:
    """Attention of prefill chunks with its list of items, shared by all layers and CUDA graphs.

    Calls must not overlap: `plan` runs once a step, then the layers of this step in turn.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device | str,
        *,
        is_fp8: bool = False,
        num_programs: int = 0,
    ) -> None:
        """Allocate memory. num_programs: that run at the same time; 0: as on this device."""
        self._num_heads, self._head_dim, self._block_size = num_heads, head_dim, block_size
        self._is_fp8 = is_fp8
        per_sm = partial(programs_per_sm, block_size=block_size, head_dim=head_dim, is_fp8=is_fp8)
        self._num_programs = {
            size: num_programs or this_device().num_sms * per_sm(size)
            for size in (SMALL_TILE, LARGE_TILE)
        }
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        # a tile with several items has at most twice as many as beyond one
        num_parts = max(
            2 * self._num_more(size) * num_heads * size for size in (SMALL_TILE, LARGE_TILE)
        )
        self._sums, self._lses = empty(num_parts * head_dim), empty(num_parts)
        # the program that merges a tile's results resets its counter to 0
        self._arrived = torch.zeros(num_parts // SMALL_TILE, dtype=torch.int32, device=device)
        number = MAX_TILES + max(map(self._num_more, (SMALL_TILE, LARGE_TILE)))
        self._items = torch.empty(number, ITEM_INTS.value, dtype=torch.int32, device=device)

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the tiles of a step into items."""
        num_tiles, tile_size = batch.shape.num_tiles, batch.shape.tile_size
        if not (items := self._items_of(num_tiles, tile_size)):
            return
        tuning = default_tuning(tile_size, self._block_size, self._head_dim, is_fp8=self._is_fp8)
        plan_prefill_kernel[(1,)](
            batch.tiles, batch.cu_seqlens_q, batch.context_lens, items.items, num_tiles,
            items.number, self._num_programs[tile_size], self._num_heads, tile_size,
            tuning.block_n, LEAST_KEYS, WAVES, MAX_TILES, **LAUNCH,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, kv_cache: KVCache, batch: ForwardBatch, scale: float, out: Tensor
    ) -> None:
        """Write the result for the prefilling rows into `out`, as `prefill_attention`."""
        prefill_attention(
            q,
            kv_cache,
            tiles=batch.tiles,
            tile_size=batch.shape.tile_size,
            cu_seqlens_q=batch.cu_seqlens_q,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=scale,
            out=out,
            items=self._items_of(batch.shape.num_tiles, batch.shape.tile_size),
        )

    def _num_more(self, tile_size: int) -> int:
        """Return the maximum number of items beyond one for each tile."""
        return WAVES * self._num_programs[tile_size] // self._num_heads

    def _items_of(self, num_tiles: int, tile_size: int) -> Items | None:
        """Return the memory of the items of a step's tiles; None if there are too many tiles."""
        if num_tiles > MAX_TILES:
            return None
        number = num_tiles + self._num_more(tile_size)
        return Items(number, self._items, self._sums, self._lses, self._arrived)


def programs_per_sm(tile_size: int, block_size: int, head_dim: int, *, is_fp8: bool) -> int:
    """Return how many programs run at the same time on an SM, as their memory and registers do."""
    device = this_device()
    tuning = default_tuning(tile_size, block_size, head_dim, is_fp8=is_fp8)
    shared = prefill_shared_bytes(tuning, tile_size, head_dim, device, is_fp8=is_fp8)
    most = 1 if tile_size > SMALL_TILE else 2 if is_fp8 or head_dim > 128 else 3  # by registers
    return max(1, min(most, device.shared_bytes // shared))


@triton.jit
def _tiles_at(
    index, is_tile, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the row, the first token, the number of tokens and the first one's position of tiles.

    And the number of tiles of BLOCK_N keys that every token sees.
    """
    row = tl.load(tiles_ptr + 2 * index, is_tile, -1)
    first = tl.load(tiles_ptr + 2 * index + 1, is_tile, 0)
    is_tile &= row >= 0
    begin = tl.load(cu_seqlens_q_ptr + row, is_tile, 0)
    num_queries = tl.load(cu_seqlens_q_ptr + row + 1, is_tile, 0) - begin
    position = tl.load(context_lens_ptr + row, is_tile, 0) - num_queries + first
    count = tl.minimum(num_queries - first, BLOCK_M)
    return row, begin + first, count, position, (position + 1) // BLOCK_N


@triton.jit
def _cut(lengths, full, most, num_heads, num_programs, BLOCK_N: tl.constexpr):
    """Cut tiles into items of up to `most` tiles of keys. Return the order, and the expected time.

    The order has for each tile, those with the longest items first: the items' length, their number
    and the tile's index; below TILES for no tile. The time is that of the longest item of each wave
    of programs.
    """
    TILES: tl.constexpr = lengths.shape[0]
    number = tl.where(lengths > 0, tl.maximum(tl.minimum(tl.cdiv(lengths, most), full), 1), 0)
    number = tl.minimum(number, MOST_ITEMS - 1).to(tl.int64)
    size = tl.cdiv(lengths, tl.maximum(number, 1))
    order = tl.sort((size * MOST_ITEMS + number) * TILES + tl.arange(0, TILES), descending=True)
    number, size = order // TILES % MOST_ITEMS, order // (TILES * MOST_ITEMS)
    end = tl.cumsum(number, 0) * num_heads
    begin = end - number * num_heads
    waves = tl.cdiv(end, num_programs) - tl.cdiv(begin, num_programs)  # that begin in the tile
    time = tl.sum(waves * (size + OVERHEAD // BLOCK_N))
    return order, time + (tl.max(number) > 1) * (MERGE // BLOCK_N)


@triton.jit(do_not_specialize=["num_tiles", "max_items", "num_programs"])
def plan_prefill_kernel(
    tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, items_ptr, num_tiles, max_items,
    num_programs, num_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, WAVES: tl.constexpr,
    TILES: tl.constexpr
):  # fmt: skip
    """Cut every tile into items of equal length, the longest items first, in one program.

    num_programs: that run at the same time.
    """
    launch_dependents()
    wait()
    index = tl.arange(0, TILES)
    row, token, count, position, full = _tiles_at(
        index, index < num_tiles, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_M, BLOCK_N
    )
    # in tiles of keys, with those that some queries do not see
    lengths = tl.where(row >= 0, full + (BLOCK_M // BLOCK_N + 1), 0)
    waves = tl.maximum(tl.cdiv(tl.sum((row >= 0).to(tl.int32)) * num_heads, num_programs), 1)
    order, least_time = _cut(lengths, full, tl.max(lengths), num_heads, num_programs, BLOCK_N)
    for more in range(WAVES):
        limit = tl.maximum((waves + more) * num_programs // num_heads, 1)
        most = shortest_split(lengths, limit, LEAST // BLOCK_N)
        other, time = _cut(lengths, full, most, num_heads, num_programs, BLOCK_N)
        order = tl.where(time < least_time, other, order)
        least_time = tl.minimum(time, least_time)
    # programs start in the order of the items: the longest item must not start last
    index = (order % TILES).to(tl.int32)
    row, token, count, position, full = _tiles_at(
        index, order >= TILES, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_M, BLOCK_N
    )
    splits = (order // TILES % MOST_ITEMS).to(tl.int32)
    stored = tl.where(splits > 1, splits, 0)
    place = tl.cumsum(stored, 0) - stored
    size = tl.cdiv(full, tl.maximum(splits, 1))
    splits = tl.where(splits > 1, tl.cdiv(full, tl.maximum(size, 1)), splits)
    size *= BLOCK_N
    first = tl.cumsum(splits, 0) - splits
    for split in range(tl.max(splits)):
        item_ptr, used = items_ptr + (first + split) * ITEM_INTS, split < splits
        tl.store(item_ptr, row, used)
        tl.store(item_ptr + 1, token, used)
        tl.store(item_ptr + 2, count, used)
        tl.store(item_ptr + 3, position, used)
        tl.store(item_ptr + 4, split * size, used)
        tl.store(item_ptr + 5, tl.minimum((split + 1) * size, full * BLOCK_N), used)
        tl.store(item_ptr + 6, place, used)
        tl.store(item_ptr + 7, splits, used)
        tl.store(item_ptr + 8, split, used)
    for unused in range(tl.sum(splits), max_items, TILES):
        tl.store(items_ptr + (unused + index) * ITEM_INTS, -1, unused + index < max_items)


@triton.jit(do_not_specialize=["max_blocks"])
def _prefill_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    items_ptr, sums_ptr, lses_ptr, arrived_ptr,
    tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, block_tables_ptr, max_blocks,
    scale,  # factor of the scores, for powers of 2
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head in each program; heads of a group are neighbors.

    With `items`, a program attends only to the keys of its item.
    """
    launch_dependents()
    wait()
    head, program = tl.program_id(0), tl.program_id(1)
    if items_ptr is None:
        row, token, count, position, full = _tiles_at(
            program, True, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_M, BLOCK_N
        )
        first_key, last_key = 0, full * BLOCK_N
    else:
        item_ptr = items_ptr + program * ITEM_INTS
        row, token, count = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
        position = tl.load(item_ptr + 3)
        first_key, last_key = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    if row < 0:
        return
    table = block_tables_ptr + row.to(tl.int64) * max_blocks
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    keys, values = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM

    rows = tl.arange(0, BLOCK_M)
    q_offset = token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    q_offsets = rows[:, None] * (NUM_HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    q_mask = (rows < count)[:, None]
    q = tl.load(q_ptr + q_offset + q_offsets, q_mask, 0)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * BLOCK_SIZE
        v_scale_ptr += kv_head * BLOCK_SIZE
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)  # as in decode attention
    full_end = (position + 1) // BLOCK_N * BLOCK_N  # every query sees every key before
    # the last item has the keys that some queries do not see
    end = tl.where(last_key == full_end, position + count, full_end)
    result, lse = _attend_tile(
        q, keys, values, k_scale_ptr, v_scale_ptr, table, first_key, last_key, full_end, end,
        position + rows, scale, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if items_ptr is not None:
        place, num_splits = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
        if num_splits > 1:
            first, split = place * NUM_HEADS + head, tl.load(item_ptr + 8)
            result, is_last = _merge(
                result, lse, sums_ptr, lses_ptr, arrived_ptr, first, split, num_splits, NUM_HEADS
            )
            q_mask &= is_last
    tl.store(out_ptr + q_offset + q_offsets, result.to(out_ptr.dtype.element_ty), q_mask)


@triton.jit
def _merge(
    result, lse, sums_ptr, lses_ptr, arrived_ptr, first, split, num_splits, NUM_HEADS: tl.constexpr
):  # fmt: skip
    """Store an item's result; that of the tile's first item has the number `first`.

    Return the tile's result, and True if it is whole. The last program finds it: the mean of the
    partial results, weighted by 2 ** lse, in the splits' order.
    """
    BLOCK_M: tl.constexpr = result.shape[0]
    HEAD_DIM: tl.constexpr = result.shape[1]
    rows = tl.arange(0, BLOCK_M)
    cells = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    place = (first + split * NUM_HEADS).to(tl.int64) * BLOCK_M
    tl.store(sums_ptr + place * HEAD_DIM + cells, result)
    tl.store(lses_ptr + place + rows, lse)
    # every thread stores its results before the counter's addition, which releases them
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(arrived_ptr + first, 0)
        place = first.to(tl.int64) * BLOCK_M
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        for _ in range(num_splits):
            lse = tl.load(lses_ptr + place + rows)
            higher = tl.maximum(highest, lse)
            weight, correction = tl.exp2(lse - higher), tl.exp2(highest - higher)
            other = tl.load(sums_ptr + place * HEAD_DIM + cells)
            total = total * correction + weight
            acc = acc * correction[:, None] + other * weight[:, None]
            highest = higher
            place += NUM_HEADS * BLOCK_M
        result = acc / total[:, None]
    return result, is_last


@triton.jit
def _attend_tile(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, first_key, full_stop, full_end, end,
    positions, scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the attention over [first_key, full_stop) and over [full_end, end), and its lse.

    Every query sees all keys of the first range. lse: base 2 logarithm of the sum of the weights.
    """
    highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    acc, highest, total = _attend_keys(
        q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, first_key, full_stop,
        acc, highest, total, positions, scale, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, False,
    )  # fmt: skip
    acc, highest, total = _attend_keys(
        q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, full_end, end,
        acc, highest, total, positions, scale, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, True,
    )  # fmt: skip
    return acc / total[:, None], highest + tl.log2(total)


@triton.jit
def _attend_keys(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, begin, end,
    acc, highest, total, positions, scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin`, a multiple of BLOCK_N, to `end` to the running softmax.

    MASKED: True if a query precedes a key, or if `end` lies within a tile. positions: positions of
    the queries.
    """
    row_size: tl.constexpr = NUM_KV_HEADS * q.shape[1]
    slots = slots_of(table, begin, end, BLOCK_SIZE, BLOCK_N)
    for key in range(begin, end, BLOCK_N):
        offsets = offsets_of(slots, row_size, q.shape[1], BLOCK_N)
        if k_scale_ptr is not None:
            places = scale_places(slots, NUM_KV_HEADS, BLOCK_SIZE)
            places = offsets_of(places, 1, 1, BLOCK_N)
        slots = slots_of(table, key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key_positions = key + tl.arange(0, BLOCK_N)
        # memory after the last key may hold NaN; a weight of 0 would not remove it
        stored = (key_positions < end)[:, None] if MASKED else None
        k = tl.load(k_ptr + offsets, stored)
        v = tl.load(v_ptr + offsets, stored, 0.0 if MASKED else None)
        if k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr + places, stored)
            v_scale = tl.load(v_scale_ptr + places, stored, 0.0 if MASKED else None)
            k = (widen(k).to(tl.float32) * k_scale).to(q.dtype)
            v = (widen(v).to(tl.float32) * v_scale).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = key_positions[None, :] <= positions[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        acc, highest, total = _add_tile(acc, highest, total, scores, v, scale)
    return acc, highest, total


@triton.jit
def slots_of(table, key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots of the keys from `key`: int64 [BLOCK_N], or only the first if adjacent.

    Slots are read one iteration ahead, so that no key waits for its slot.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + key // BLOCK_SIZE, key < end, 0).to(tl.int64)
        return block * BLOCK_SIZE + key % BLOCK_SIZE
    else:
        positions = key + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + positions // BLOCK_SIZE, positions < end, 0).to(tl.int64)
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def offsets_of(slots, ROW_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the offsets of the keys in `slots` within a head's cache: [BLOCK_N, HEAD_DIM]."""
    columns = tl.arange(0, HEAD_DIM)[None, :]
    if len(slots.shape) == 0:
        return slots * ROW_SIZE + (tl.arange(0, BLOCK_N)[:, None] * ROW_SIZE + columns)
    else:
        return slots[:, None] * ROW_SIZE + columns


@triton.jit
def _add_tile(acc, highest, total, scores, v, scale):
    """Add a tile to the running softmax; scores: float32 [BLOCK_M, BLOCK_N]; v: its values."""
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    correction = tl.exp2(highest - higher)
    total = total * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, higher, total
