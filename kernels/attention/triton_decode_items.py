"""Work list of decode attention: the keys of each program."""

from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl

from penstock.kernels.device import Device, this_device
from penstock.kernels.triton_pdl import launch_dependents, wait

# int32 per item, 32 bytes so that one sector holds an item: row (-1: no item), first key, end of
# keys, the row's first item, number of the row's items, and with fixed splits the place of the
# row's first split and the row's length
ITEM_INTS = tl.constexpr(8)

FEW_ROWS = 32  # maximum rows for which splits, rather than rows, fill a GPU


class DecodeTuning(NamedTuple):
    """Parameters chosen by measurement."""

    block_n: int = 64  # keys per tile, a power of two of at least 16
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3  # target for all KV heads together; exceeded with many rows
    min_split: int = 64  # minimum keys of a split, rounded up to tiles


# for GPUs on which the measured tuning does not fit
SMALLER = (DecodeTuning(64, 4, 3, 1, min_split=64), DecodeTuning(32, 4, 2, 2, min_split=32))


def decode_shared_bytes(tuning: DecodeTuning, head_dim: int, *, is_fp8: bool = False) -> int:
    """Return the kernel's shared memory: keys and values in flight, queries and weights."""
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
    """Return the shortest split, in tiles, whose number of items is within the limit.

    tiles: int32 [ROWS]. If the rows alone exceed the target, half of them may be split once, so
    that no program works much longer than the others.
    """
    num_rows = tl.sum((tiles > 0).to(tl.int32))
    limit = tl.maximum(target_items, num_rows + num_rows // 2)
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

    CAPACITY: of splits, of BLOCK_N keys, whose results are stored; a row without room has one item.
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
