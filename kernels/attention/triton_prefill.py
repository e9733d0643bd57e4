"""Causal attention of prefill chunks over the paged KV cache, in Triton.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): a program holds one tile of queries
of one head and reads the keys once, with a running maximum and sum of the softmax.

Few tiles do not fill a GPU: several programs share the keys of such a tile, and the last program to
finish merges their results, as in Flash-decoding (triton_decode.py). The device chooses the number
of programs, because the number of tiles differs between replays of a CUDA graph.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.triton_rope import scale_places
from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.forward_batch import SMALL_TILE
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.triton_elementwise import as_operand, widen
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

MIN_HEAD_DIM = 16
BARRIER_BYTES = 2048  # at most
MAX_SPLIT_TILES = tl.constexpr(128)  # tiles of a step with more are not split
PROGRAMS_PER_SM = 2  # that run at the same time; more were slower (H200)
LEAST_KEYS = tl.constexpr(512)  # that a program of a split tile attends to


class PrefillTuning(NamedTuple):
    """Tile sizes of the kernel; they change only its speed."""

    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int  # iterations whose keys and values are loaded at the same time


class PartialResults(NamedTuple):
    """Memory for the results of programs that share a tile's keys; a tile has SMALL_TILE tokens."""

    sums: Tensor  # float32 [num_programs, SMALL_TILE, head_dim]
    lses: Tensor  # float32 [num_programs, SMALL_TILE]: base 2 logarithms of the weights' sums
    arrived: Tensor  # int32 [num_programs]; 0 between launches

    @classmethod
    def allocate(
        cls, head_dim: int, device: torch.device | str, num_programs: int = 0
    ) -> "PartialResults":
        """Allocate memory for programs that fill the device, or for `num_programs`."""
        number = num_programs or PROGRAMS_PER_SM * this_device().num_sms
        return cls(
            torch.empty(number, SMALL_TILE, head_dim, dtype=torch.float32, device=device),
            torch.empty(number, SMALL_TILE, dtype=torch.float32, device=device),
            torch.zeros(number, dtype=torch.int32, device=device),
        )


def prefill_shared_bytes(
    tuning: PrefillTuning, tile_size: int, head_dim: int, device: Device, *, is_fp8: bool = False
) -> int:
    """Return the bytes of shared memory: keys and values in flight, queries and weights."""
    key_bytes = head_dim + 4 if is_fp8 else 2 * head_dim
    in_flight = (tuning.num_stages - 1) * 2 * tuning.block_n * key_bytes
    if device.is_asynchronous:  # the operands of products in progress, and barriers
        return in_flight + (2 * tuning.block_n + tile_size) * 2 * head_dim + BARRIER_BYTES
    # in registers with large tiles, unless wide heads need those
    weights = tuning.block_n if tile_size <= SMALL_TILE or head_dim > 128 else 0
    return in_flight + tile_size * 2 * (head_dim + weights)


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
    partial_results: PartialResults | None = None,
) -> None:
    """Write the attention of the tiles' tokens into `out`; other rows of `out` keep their values.

    tiles: int32 [num_tiles, 2]: sequence, and index of the first of `tile_size` tokens (a power of
    two) in the sequence's chunk; -1 for padding. Other arguments are as in
    penstock.kernels.attention.reference.attend. q, out: contiguous [num_tokens, num_heads,
    head_dim]. Each row of block_tables is contiguous, and scale > 0. partial_results: lets programs
    share the keys of small tiles; calls with the same must not overlap. Raises ValueError if
    head_dim is not a power of two, or below MIN_HEAD_DIM.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_cache.k.shape[1:3]
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim: got {head_dim}, expected a power of 2, {MIN_HEAD_DIM} or more")
    block_n, num_warps, num_stages = tuning or default_tuning(
        tile_size, block_size, head_dim, is_fp8=kv_cache.scales is not None
    )
    if not (num_tiles := tiles.shape[0]):
        return
    num_programs = num_tiles
    most = 0  # programs of a head that share keys
    if partial_results and tile_size == SMALL_TILE:
        most = len(partial_results.arrived) // num_heads
        most *= num_tokens // tile_size < most  # others are faster without these results
        num_programs = max(num_tiles, most)
    _prefill_attention_kernel[(num_heads, num_programs)](
        q, as_operand(kv_cache.k), as_operand(kv_cache.v), *(kv_cache.scales or (None, None)), out,
        *((partial_results if most else None) or (None, None, None)), most,
        tiles, num_tiles, cu_seqlens_q, context_lens, block_tables, block_tables.stride(0),
        scale * math.log2(math.e), num_heads, num_kv_heads, head_dim, block_size, tile_size,
        block_n, num_warps=num_warps, num_stages=num_stages, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_blocks", "num_tiles", "most_splits"])
def _prefill_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    sums_ptr, lses_ptr, arrived_ptr, most_splits,
    tiles_ptr, num_tiles, cu_seqlens_q_ptr, context_lens_ptr, block_tables_ptr, max_blocks,
    scale,  # factor of the scores, for powers of 2
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head in each program; heads of a group are neighbors."""
    launch_dependents()
    wait()
    head, program = tl.program_id(0), tl.program_id(1)
    tile = program
    if sums_ptr is not None:
        num_splits = _splits_of_tiles(tiles_ptr, num_tiles, most_splits)
        tile, split = program // num_splits, program % num_splits
        if tile >= num_tiles:
            return
    seq, first = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if seq < 0:
        return
    begin = tl.load(cu_seqlens_q_ptr + seq)
    num_queries = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    context_len = tl.load(context_lens_ptr + seq)
    table = block_tables_ptr + seq.to(tl.int64) * max_blocks
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    keys, values = k_cache_ptr + kv_head * HEAD_DIM, v_cache_ptr + kv_head * HEAD_DIM

    rows = tl.arange(0, BLOCK_M)
    q_offset = (begin + first).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    q_offsets = rows[:, None] * (NUM_HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]
    q_mask = (first + rows < num_queries)[:, None]
    q = tl.load(q_ptr + q_offset + q_offsets, q_mask, 0)
    if k_scale_ptr is not None:
        k_scale_ptr += kv_head * BLOCK_SIZE
        v_scale_ptr += kv_head * BLOCK_SIZE
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)  # as in decode attention
    position = context_len - num_queries + first  # position of the first query
    positions = position + rows
    end = tl.minimum(context_len, position + BLOCK_M)
    full_end = (position + 1) // BLOCK_N * BLOCK_N  # every query sees every key before
    first_key, full_stop = 0, full_end
    if sums_ptr is not None:
        size, num_splits = _keys_of_split(full_end, num_splits, BLOCK_N)
        if split >= num_splits:
            return
        first_key, full_stop = split * size, tl.minimum((split + 1) * size, full_end)
        end = tl.where(split == num_splits - 1, end, full_end)
    result, lse = _attend_tile(
        q, keys, values, k_scale_ptr, v_scale_ptr, table, first_key, full_stop, full_end, end,
        positions, scale, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if sums_ptr is not None:  # noqa: SIM102  the compiler decides this
        if num_splits > 1:
            counter_ptr, part = arrived_ptr + tile * NUM_HEADS + head, program * NUM_HEADS + head
            result, is_last = _merge(
                result, lse, sums_ptr, lses_ptr, counter_ptr, part, split, num_splits, NUM_HEADS
            )  # fmt: skip
            q_mask &= is_last
    tl.store(out_ptr + q_offset + q_offsets, result.to(out_ptr.dtype.element_ty), q_mask)


@triton.jit
def _splits_of_tiles(tiles_ptr, num_tiles, most_splits):
    """Return the number of programs that may share a tile's keys; all tiles have up to most_splits.

    Padding follows the tiles.
    """
    index = tl.arange(0, MAX_SPLIT_TILES)
    is_tile = tl.load(tiles_ptr + 2 * index, index < num_tiles, -1) >= 0
    return tl.maximum(most_splits // tl.maximum(tl.max(is_tile * (index + 1)), 1), 1)


@triton.jit
def _keys_of_split(full_end, most_splits, BLOCK_N: tl.constexpr):
    """Return the keys of a program of a tile, and the number of programs.

    Each has a key that every query sees, so that no sum of weights is 0. The last one has all that
    follow full_end, too.
    """
    num_splits = tl.minimum(most_splits, tl.maximum(full_end // LEAST_KEYS, 1))
    size = tl.cdiv(full_end, num_splits * BLOCK_N) * BLOCK_N
    return size, tl.maximum(tl.cdiv(full_end, tl.maximum(size, 1)), 1)


@triton.jit
def _merge(
    result, lse, sums_ptr, lses_ptr, counter_ptr, part, split, num_splits, NUM_HEADS: tl.constexpr
):  # fmt: skip
    """Store a program's result as number `part`. Return the tile's result, and True if it is whole.

    The last program finds it: the mean of the partial results, weighted by 2 ** lse, in the splits'
    order.
    """
    BLOCK_M: tl.constexpr = result.shape[0]
    HEAD_DIM: tl.constexpr = result.shape[1]
    rows = tl.arange(0, BLOCK_M)
    cells = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    place = part.to(tl.int64) * BLOCK_M
    tl.store(sums_ptr + place * HEAD_DIM + cells, result)
    tl.store(lses_ptr + place + rows, lse)
    # every thread stores its results before the counter's addition, which releases them
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
        place -= split * (NUM_HEADS * BLOCK_M)
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
