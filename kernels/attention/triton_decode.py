"""Attention of one new token per sequence over a paged KV cache, split over the keys.

Flash-decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): several programs share
the keys of a long sequence, and the last program to finish merges their results. The device makes
the work list once a step, because lengths differ between replays of a CUDA graph.

A row's sums are taken in one order, whichever program finishes last. The split of a row, and with
it the last bits of its result, depends on the lengths of the other rows.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.attention.triton_rope import halves, scale_places
from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.triton_elementwise import as_operand, widen
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

# int32 values per item; 32 bytes, so that one sector holds an item: row (-1: no item), first key,
# end of the keys, the row's first item, number of items of the row, and with fixed splits the index
# of the row's first split and the row's length
ITEM_INTS = tl.constexpr(8)

FEW_ROWS = 32  # up to this number of rows, splits fill the GPU; with more, the rows themselves do


class DecodeTuning(NamedTuple):
    """Launch parameters chosen by measurement."""

    block_n: int = 64  # keys per tile, a power of two of at least 16
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3  # target for all KV heads together; exceeded with many rows
    min_split: int = 64  # minimum keys of a split, rounded up to tiles


# for GPUs without enough shared memory for the measured tuning
SMALLER = (DecodeTuning(64, 4, 3, 1, min_split=64), DecodeTuning(32, 4, 2, 2, min_split=32))


def decode_shared_bytes(tuning: DecodeTuning, head_dim: int, *, is_fp8: bool = False) -> int:
    """Return the bytes of shared memory: keys and values in flight, queries and weights."""
    key_bytes = head_dim + 4 if is_fp8 else 2 * head_dim
    in_flight = (tuning.num_stages - 1) * 2 * tuning.block_n * key_bytes
    return in_flight + 16 * 2 * (head_dim + tuning.block_n)


def default_tuning(
    num_rows: int,
    group: int,
    head_dim: int = 128,
    *,
    is_fp8: bool = False,
    device: Device | None = None,
) -> DecodeTuning:
    """Return the tuning for `group` query heads per KV head that fits the device.

    device: default `this_device`. Raises ValueError if nothing fits.
    """
    tunings = _measured_tuning(num_rows, group, is_fp8), *SMALLER
    size = partial(decode_shared_bytes, head_dim=head_dim, is_fp8=is_fp8)
    return (device or this_device()).fitting(tunings, size)


def _measured_tuning(num_rows: int, group: int, is_fp8: bool) -> DecodeTuning:
    """Return the tuning that measured fastest on an H200."""
    if num_rows <= FEW_ROWS:
        return DecodeTuning(128, 4, 3, 1, min_split=128)
    if is_fp8:
        return (
            DecodeTuning(128, 4, 3, 2, 128)
            if num_rows <= 64
            else DecodeTuning(64, 2, 2, 2, min_split=64)
        )
    return (
        DecodeTuning(64, 4, 2, 2, min_split=64)
        if group <= 2
        else DecodeTuning(32, 4, 4, 2, min_split=32)
    )


@triton.jit
def _split_tiles(tiles, target_items, min_tiles):
    """Return the length in tiles of the shortest split that keeps the items within the limit.

    tiles: int32 [ROWS]. If the rows alone exceed the target, half of them may be split once, so
    that no program works much longer than the others.
    """
    num_rows = tl.sum((tiles > 0).to(tl.int32))
    limit = tl.maximum(target_items, num_rows + num_rows // 2)
    return shortest_split(tiles, limit, min_tiles)


@triton.jit
def shortest_split(tiles, limit, min_tiles):
    """Return the length of the shortest split, `min_tiles` or more, with up to `limit` items.

    tiles: int32 [ROWS]: lengths of the rows, up to `limit` of them above 0.
    """
    low = tl.maximum(tl.cdiv(tl.sum(tiles), limit), min_tiles)
    high = tl.maximum(tl.max(tiles), low)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, middle)) <= limit
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    return low


@triton.jit(do_not_specialize=["num_rows", "max_items", "target_items", "min_tiles"])
def plan_kernel(
    context_lens_ptr, items_ptr, num_rows, max_items, target_items, min_tiles,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr = 0
):  # fmt: skip
    """Cut every row into items of equal length, the longest items first, in one program.

    CAPACITY: number of splits of BLOCK_N keys whose results can be stored. A row without room for
    its splits has one item.
    """
    launch_dependents()
    wait()
    index = tl.arange(0, ROWS)
    tiles = tl.cdiv(tl.load(context_lens_ptr + index, index < num_rows, 0), BLOCK_N)
    most = _split_tiles(tiles, target_items, min_tiles)
    size = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1))
    # Programs start in the order of the items: the longest item must not start last.
    order = tl.sort(size * ROWS + index, descending=True)
    row, size = order % ROWS, tl.maximum(order // ROWS, 1) * BLOCK_N
    context_len = tl.load(context_lens_ptr + row, row < num_rows, 0)
    num_splits = tl.cdiv(context_len, size)
    place = index * 0
    if CAPACITY:
        stored = tl.where(num_splits > 1, tl.cdiv(context_len, BLOCK_N), 0)
        place = tl.cumsum(stored, 0) - stored
        has_room = place + stored <= CAPACITY
        size = tl.where(has_room, size, tl.maximum(context_len, 1))
        num_splits = tl.cdiv(context_len, size)
    first = tl.cumsum(num_splits, 0) - num_splits
    for split in range(tl.max(num_splits)):
        item_ptr = items_ptr + (first + split) * ITEM_INTS
        used = split < num_splits
        tl.store(item_ptr, row, used)
        tl.store(item_ptr + 1, split * size, used)
        tl.store(item_ptr + 2, tl.minimum((split + 1) * size, context_len), used)
        tl.store(item_ptr + 3, first, used)
        tl.store(item_ptr + 4, num_splits, used)
        if CAPACITY:
            tl.store(item_ptr + 5, place, used)
            tl.store(item_ptr + 6, context_len, used)
    for unused in range(tl.sum(num_splits), max_items, ROWS):
        tl.store(items_ptr + (unused + index) * ITEM_INTS, -1, unused + index < max_items)


# factor of the product of a weight and its value's scale, which would underflow float16; the values
# may still reach 28,000
WEIGHT_FACTOR = tl.constexpr(1024.0)


@triton.jit
def attend_keys(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, block_table_ptr, slots, head, begin, end, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """Compute the attention of q [16, HEAD_DIM] over keys `begin` to `end` of a sequence.

    slots: slots of the first tile. head: index of the KV head. Returns float32 [16, HEAD_DIM] and
    the base 2 logarithm of the sum of the weights, [16].
    """
    FP8: tl.constexpr = k_scale_ptr is not None
    stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    k_ptr += head * HEAD_DIM
    v_ptr += head * HEAD_DIM
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    if FP8:
        # float16 can hold 8-bit keys and a normed query, and one instruction converts them
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)
        k_scale_ptr += head * BLOCK_SIZE
        v_scale_ptr += head * BLOCK_SIZE
        pairs_ptr = v_ptr.to(tl.pointer_type(tl.int16))
        pairs = tl.arange(0, HEAD_DIM // 2)
        acc = tl.zeros([16, HEAD_DIM // 2], tl.float32)
        upper_acc = tl.zeros([16, HEAD_DIM // 2], tl.float32)
    else:
        acc = tl.zeros([16, HEAD_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        there = start + tl.arange(0, BLOCK_N) < end
        offsets = slots[:, None] * stride + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, there[:, None], 0.0)
        if FP8:
            places = scale_places(slots, NUM_KV_HEADS, BLOCK_SIZE)
            pair_offsets = slots[:, None] * (stride // 2) + pairs[None, :]
            v = tl.load(pairs_ptr + pair_offsets, there[:, None], 0)
            k_scale = tl.load(k_scale_ptr + places, there, 0.0)
            v_scale = tl.load(v_scale_ptr + places, there, 0.0)
        else:
            v = tl.load(v_ptr + offsets, there[:, None], 0.0)
        # Slots are loaded one tile ahead; otherwise the compiler spends a pipeline stage on them.
        slots = slots_from(block_table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        scores = tl.dot(q, tl.trans(widen(k).to(q.dtype)), input_precision="ieee")
        scores *= (k_scale * scale_log2)[None, :] if FP8 else scale_log2
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        if FP8:
            lower, upper = halves(v, k.dtype == tl.uint8)
            lower, upper = lower.to(q.dtype), upper.to(q.dtype)
            weights = (weights * (v_scale * WEIGHT_FACTOR)[None, :]).to(q.dtype)
            acc = tl.dot(weights, lower, acc * fade[:, None], input_precision="ieee")
            upper_acc = tl.dot(weights, upper, upper_acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    if FP8:
        acc = tl.interleave(acc, upper_acc) * (1 / WEIGHT_FACTOR)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def slots_from(block_table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots of the keys from `start`, int64 [BLOCK_N]: block * BLOCK_SIZE + offset."""
    tokens = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
        block = tl.load(block_table_ptr + start // BLOCK_SIZE, start < end, 0).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    blocks = tl.load(block_table_ptr + tokens // BLOCK_SIZE, tokens < end, 0).to(tl.int64)
    return blocks * BLOCK_SIZE + tokens % BLOCK_SIZE


MAX_ROWS = 4096
MAX_GROUP = 16  # maximum query heads per KV head: the rows of one tensor core instruction
MERGED_FLOATS = 4096  # elements of partial results merged in one iteration


class PagedDecode:
    """Decode attention with its work list and workspace, shared by all layers and CUDA graphs.

    Subclasses allocate memory for partial results, cut rows into items, and compute the attention.

    Calls must not overlap: `plan` runs once a step, then the layers of this step in turn.
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
        """Allocate the workspace. Raises ValueError for invalid sizes.

        is_fp8: True for a KV cache in FP8.
        """
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
        """Allocate memory for the partial results of rows with several items."""
        raise NotImplementedError

    def _splits(self, num_rows: int) -> tuple[int, int, int]:
        """Return the minimum splits per item, the keys per split and the stored splits."""
        raise NotImplementedError

    def max_items(self, num_rows: int) -> int:
        """Return the maximum number of items of `num_rows` rows of arbitrary lengths."""
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

        A kernel without programmatic dependent launch, such as the embedding, must run before the
        first layer: the layers read the list before they wait.
        """
        num_rows = context_lens.shape[0]
        check_tensor("context_lens", context_lens, (-1,), torch.int32)
        check_contiguous("context_lens", context_lens)
        self._check_rows(num_rows)
        rows = max(16, triton.next_power_of_2(num_rows))
        least, keys, capacity = self._splits(num_rows)
        plan_kernel[(1,)](
            context_lens, self.items, num_rows, self.max_items(num_rows),
            self._target_items(num_rows), least, keys, rows, capacity,
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
        """Write the attention of every row to `out`, except for padded rows.

        q: [num_rows, num_heads, head_dim], with any row stride. kv_cache: includes this step's
        tokens. context_lens: as in `plan`. block_tables: int32 [num_rows, max_blocks]. scale:
        factor of the scores. out: contiguous, of q's shape.
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
        raise NotImplementedError

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


class DecodeAttention(PagedDecode):
    """Decode attention whose splits depend on the lengths of all rows."""

    def _allocate(self, max_items: int, device: torch.device | str) -> None:
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        self._partials = empty(max_items, self._num_heads, self._head_dim)
        self._lses = empty(max_items, self._num_heads)

    def _splits(self, num_rows: int) -> tuple[int, int, int]:
        tuning = self._tuning(num_rows)
        return triton.cdiv(tuning.min_split, tuning.block_n), tuning.block_n, 0

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
    """Compute one item with one KV head in each program; the heads of an item are adjacent.

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
        # Every thread stores its results before the counter's addition, which releases them.
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

    Only the first GROUP heads of partials [num_splits, SPLIT_HEADS, HEAD_DIM] and of lses
    [num_splits, SPLIT_HEADS] are used.
    """
    FILLED: tl.constexpr = triton.next_power_of_2(GROUP)
    heads = tl.minimum(tl.arange(0, FILLED), GROUP - 1)  # padded with the last head
    dims = tl.arange(0, HEAD_DIM)
    top = tl.full([FILLED], float("-inf"), tl.float32)
    total = tl.zeros([FILLED], tl.float32)
    acc = tl.zeros([FILLED, HEAD_DIM], tl.float32)
    # Heads are the first dimension: the warps share them, and no sum over splits crosses warps.
    for turn in range(0, num_splits, MERGED_SPLITS):
        splits = turn + tl.arange(0, MERGED_SPLITS)[None, :]
        there = splits < num_splits
        rows = splits * SPLIT_HEADS + heads[:, None]
        cells = rows[:, :, None] * HEAD_DIM + dims[None, None, :]
        # These loads come before the loads of lses; otherwise some of them would wait.
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
