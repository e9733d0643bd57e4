"""Products on a GPU whose rows have the same bits for every number of rows.

A row's sums depend only on the order of the additions. This order depends only on the weight's
shape: tensor cores add each range of the inner dimension in steps of 16, from the front, and the
ranges are added in order. The tile sizes depend on the number of rows, but change no sum.
Activations stay in 16 bits.

A weight of few elements has four ranges (`has_four_ranges`). The kernel depends on the number of
rows:

| rows | small weight in 16 bits | other weights |
| --- | --- | --- |
| 1 to 16 | one program, a warp for each range | a program for each range |
| 17 to 64 | with a norm, as with more rows; otherwise as other weights | a program for each range |
| more | one program, the ranges in turn | one program, the ranges in turn |

In the kernel of up to 64 rows (`triton_small_m_gemm`), each range of the inner dimension has a warp
or a program, and the last one adds the ranges. With more rows, one program computes all ranges of a
tile in turn, and adds each range to the total.

With a small weight, `rms_norm(x) @ w.T = (x * norm_weight) @ w.T / rms(x)`: up to 16 rows, the same
kernel computes the norm; with more rows, `scaled_rows` computes its two factors. Otherwise, and in
float16, where squares may overflow, the norm has a separate kernel.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import Device, this_device
from penstock.kernels.linear.small_m_gemm import Product, empty_product, launch
from penstock.kernels.linear.tile_sizes import MAX_ROWS, GemmConfig, GemmShape, row_block
from penstock.kernels.linear.triton_fp8_gemm import GROUP, place_of_tile
from penstock.kernels.linear.triton_small_m_gemm import (
    in_turn,
    load_residual,
    load_scales,
    norm_factor,
    operand,
    scaled,
    store_result,
    weight_tile,
)
from penstock.kernels.matrices import Quantized, Rows, parts
from penstock.kernels.triton_elementwise import as_operand, rms_norm
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

RANGES = tl.constexpr(4)  # ranges of a small weight
ROWS = tl.constexpr(16)  # rows of a tensor core tile


@triton.jit
def _range(
    x_at, weight_at, scale, weight_row, begin, end, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the sums over [begin, end) of gate (or of the only product) and of up."""
    k = tl.arange(0, BK)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for first in tl.range(begin, end, BK):
        inside = first + k < end
        x_tile = tl.load(x_at + first) if EVEN else tl.load(x_at + first, inside, 0.0)
        tile = weight_tile(
            weight_at + first, inside, scale, weight_row, first, K, EVEN, BLOCKS, BK, 1
        )
        acc = tl.dot(x_tile, operand(tile, x_tile.dtype).T, acc, input_precision="ieee")
        if SWIGLU:
            up_at, up_row = weight_at + N * K + first, weight_row + N
            up = weight_tile(up_at, inside, scale, up_row, first, K, EVEN, BLOCKS, BK, 1)
            acc_up = tl.dot(x_tile, operand(up, x_tile.dtype).T, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def _ranges_in_one_loop(
    x_at, weight_at, range_size, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the totals of all ranges as `_range` does, without a new pipeline for each range."""
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up, total, total_up = acc, acc, acc
    for first in tl.range(0, K, BK):
        x_tile = tl.load(x_at + first)
        acc = tl.dot(x_tile, tl.load(weight_at + first).T, acc, input_precision="ieee")
        is_end = (first + BK) % range_size == 0
        total = tl.where(is_end, total + acc, total)
        if SWIGLU:
            up = tl.load(weight_at + N * K + first)
            acc_up = tl.dot(x_tile, up.T, acc_up, input_precision="ieee")
            total_up = tl.where(is_end, total_up + acc_up, total_up)
            acc_up = tl.where(is_end, 0.0, acc_up)
        acc = tl.where(is_end, 0.0, acc)
    return total, total_up


@triton.jit(do_not_specialize=["num_rows"])
def ranged_gemm_kernel(
    x, factors, weight, scale, residual, out, num_rows, N, K, range_size,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, HAS_RANGES: tl.constexpr, ONE_LOOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out in each program; HAS_RANGES: several ranges.

    factors: [num_rows], factors of the norm, optional. ONE_LOOP: one loop computes all ranges, for
    small tiles of weights in 16 bits. The other arguments are those of `small_m_gemm_kernel`.
    """
    launch_dependents()
    first_row, first_column = place_of_tile(num_rows, N, BM, BN, GROUP)
    row, column = first_row + tl.arange(0, BM), first_column + tl.arange(0, BN)
    weight_row = tl.minimum(column, N - 1).to(tl.int64)
    k = tl.arange(0, BK)[None, :]
    x_at = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * K + k
    weight_at = weight + weight_row[:, None] * K + k
    gate_scale, up_scale = load_scales(scale, column[None, :], N, SWIGLU, BLOCKS)
    wait()
    total = tl.zeros((BM, BN), tl.float32)
    total_up = total
    if ONE_LOOP:
        total, total_up = _ranges_in_one_loop(x_at, weight_at, range_size, N, K, SWIGLU, BM, BN, BK)
    elif HAS_RANGES:
        for begin in tl.range(0, K, range_size):
            acc, acc_up = _range(
                x_at, weight_at, scale, weight_row, begin, begin + range_size, N, K,
                SWIGLU, BM, BN, BK, EVEN, BLOCKS,
            )  # fmt: skip
            total += acc
            if SWIGLU:
                total_up += acc_up
    else:
        total, total_up = _range(
            x_at, weight_at, scale, weight_row, 0, K, N, K, SWIGLU, BM, BN, BK, EVEN, BLOCKS
        )
    exists = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    more = load_residual(residual, at, exists, ADD)
    norm = 1.0
    if factors is not None:
        norm = tl.load(factors + row, row < num_rows, 0.0)[:, None]
    store_result(total, total_up, norm, gate_scale, up_scale, more, out, at, exists, SWIGLU)


@triton.jit
def _offsets(range_size, BK: tl.constexpr):
    """Return the first BK indices of each range of the inner dimension, [RANGES, 1, BK]."""
    ranges = tl.arange(0, RANGES)[:, None, None] * range_size
    return ranges + tl.arange(0, BK)[None, None, :]


@triton.jit
def _scaled_rows(x, norm_weight, k, row, num_rows, squares, K):
    """Return a tile of x times the norm's weight, and the sums of its squares."""
    tile = tl.load(x + row.to(tl.int64) * K + k, row < num_rows, 0.0)
    return scaled(tile, tl.load(norm_weight + k), squares, True, k.shape[2], RANGES)


@triton.jit(do_not_specialize=["num_rows"])
def scaled_rows_kernel(
    x, norm_weight, out, factors, num_rows, K, range_size, eps,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write x times the norm's weight, and the norm's factor of each row; BM rows per program."""
    launch_dependents()
    wait()
    place = tl.arange(0, ROWS)
    row = tl.where(place < BM, tl.program_id(0) * BM + place, num_rows)
    rows = row[None, :, None]
    squares = tl.zeros((RANGES, ROWS, 8), tl.float32)
    for begin in tl.range(0, range_size, BK):
        k = begin + _offsets(range_size, BK)
        tile, squares = _scaled_rows(x, norm_weight, k, rows, num_rows, squares, K)
        tl.store(out + rows.to(tl.int64) * K + k, tile, rows < num_rows)
    norm = norm_factor(tl.max(in_turn(squares), 1), K, eps, True)
    tl.store(factors + row, norm, row < num_rows)


FEW_ROWS: int = ROWS.value
NUM_RANGES: int = RANGES.value
SMALL_WEIGHT = 8 << 20  # maximum elements of a weight with four ranges
# with fewer programs in a product of few rows, the inner dimension has more ranges
MIN_PROGRAMS = 96
BN = 32  # columns per program with few rows
# from this number of columns, as in the output layer, a program has more than BN
MANY_COLUMNS = 1 << 16


class RangedTile(NamedTuple):
    """Tile sizes of a product of many rows."""

    bm: int
    bn: int  # columns; with two weights, the columns of both
    num_warps: int
    num_stages: int
    bk: int = 64
    one_loop: bool = False  # the loop over the inner dimension continues at the end of a range


# ordered from the largest
TILES = (
    RangedTile(128, 256, 8, 3),
    RangedTile(128, 128, 8, 3),
    RangedTile(64, 128, 4, 4),
    RangedTile(64, 64, 4, 4),
    RangedTile(64, 64, 4, 3),
    RangedTile(64, 64, 4, 2),
)
BK = 64


def has_four_ranges(shape: GemmShape) -> bool:
    """Return whether the weight has few elements and an inner dimension divisible by 512."""
    is_divisible = shape.inner % (2 * BK * NUM_RANGES) == 0
    return is_divisible and shape.num_weights * shape.inner <= SMALL_WEIGHT


def num_ranges(shape: GemmShape) -> int:
    """Return the number of ranges of the inner dimension, given the weight's shape alone."""
    if has_four_ranges(shape):
        return NUM_RANGES
    tiles = triton.cdiv(shape.num_columns, BN)
    possible = [number for number in (1, 2, NUM_RANGES) if shape.inner % (2 * BK * number) == 0]
    enough = (number for number in possible if tiles * number >= MIN_PROGRAMS)
    return next(enough, max(possible, default=1))


@cache
def config_of(
    shape: GemmShape, num_rows: int, weight_bytes: int = 2, device: Device | None = None
) -> GemmConfig:
    """Return the tile sizes for up to 64 rows and `num_ranges` ranges that fit the device."""
    device, rows, split_k = device or this_device(), row_block(num_rows), num_ranges(shape)
    ways = [
        GemmConfig("mma", bn, bk, split_k, num_warps, num_stages, prefetch=0)
        for bn, bk, num_warps, num_stages in _tiles(shape, rows, weight_bytes, device)
        if shape.inner % (bk * split_k) == 0 or bk < 64
    ]
    if has_warps(shape, weight_bytes) and rows <= FEW_ROWS:
        ways = _few_rows_configs(shape, num_rows)

    def shared_bytes(config: GemmConfig) -> int:
        weights = config.bn * shape.weights_per_column * weight_bytes
        return config.num_stages * config.bk * (2 * rows + weights)

    return device.fitting(ways, shared_bytes)


def _tiles(
    shape: GemmShape, rows: int, weight_bytes: int, device: Device
) -> list[tuple[int, int, int, int]]:
    """Return bn, bk, num_warps and num_stages of tiles for up to 64 rows, the fastest first.

    The fastest tile was measured on an H200 with weights in 16 bits; the other tiles take less
    memory.
    """
    is_few, is_wide = rows <= FEW_ROWS, shape.num_columns >= MANY_COLUMNS
    bks = (256, 5), (256, 3), (128, 5), (128, 3), (64, 3), (64, 2), (32, 2)
    tiles = [(4 * BN if is_wide else BN, bk, 4, num_stages) for bk, num_stages in bks]
    tiles = tiles[3 if is_wide else 0 if is_few else 2 :]
    if weight_bytes == 1:
        return tiles
    if is_wide:
        return [(64, 128, 2, 4) if is_few else (64, 128, 4, 3), *tiles]
    if is_few:
        return [(32, 128, 2, 3) if shape.weights_per_column == 2 else (16, 256, 1, 4), *tiles]
    if shape.num_columns <= BN * device.num_sms:
        return tiles
    return [(64, 64 if shape.weights_per_column == 2 else 128, 4, 4), *tiles]


def has_warps(shape: GemmShape, weight_bytes: int) -> bool:
    """Return whether each range has a warp in a product of up to 16 rows."""
    return has_four_ranges(shape) and weight_bytes == 2


def _few_rows_configs(shape: GemmShape, num_rows: int) -> list[GemmConfig]:
    """Return tile sizes with a warp for each range, ordered from the fastest on a Hopper GPU."""
    weights = shape.weights_per_column
    bn = 32 if weights == 1 and shape.num_columns >= 32 * MIN_PROGRAMS else 8
    # gate_up; qkv and o; down of 0.6B
    most = 3 if weights == 2 else 4 if shape.inner <= 32 * BK else 5
    prefetch = 512 if bn == 32 or most == 5 else 0  # qkv and down
    ways = [
        GemmConfig("ranges", bn, NUM_RANGES * BK, 1, NUM_RANGES, stages, prefetch, norm_inside=True)
        for stages in range(most, 1, -1)
    ]
    if num_rows == 1 and weights == 1 and shape.inner <= 1024:  # read early; more needs registers
        return [ways[0]._replace(bk=shape.inner, num_stages=1, prefetch=0), *ways]
    return ways


def tile_of(
    num_rows: int, num_columns: int, has_ranges: bool, weights: int, device: Device
) -> RangedTile:
    """Return the largest tile that fits and keeps nearly all SMs busy, otherwise a small one.

    weights: number of weights per column, two with SwiGLU. The totals of ranges need the registers
    of the widest tile. So do weights for synchronous tensor cores.
    """
    tiles = TILES if device.is_asynchronous and not has_ranges else TILES[1:]

    def is_filled(tile: RangedTile) -> bool:
        columns = triton.cdiv(num_columns * weights, tile.bn)
        return bool(triton.cdiv(num_rows, tile.bm) * columns >= 0.9 * device.num_sms)

    first = next((at for at, tile in enumerate(tiles) if is_filled(tile)), len(tiles) - 3)
    return device.fitting(tiles[first:], _shared_bytes)


def one_loop_tile(num_rows: int, weights: int, device: Device) -> RangedTile | None:
    """Return the tile for 17 to 64 rows of a weight in 16 bits with four ranges.

    Returns None for compute capability 10.0, where Triton 3.9 fails to compile sums that end in a
    loop.
    """
    if device.capability[0] == 10:
        return None
    sizes = row_block(num_rows), 32 * weights, 8 // weights
    tiles = [RangedTile(*sizes, stages, 128, one_loop=True) for stages in (5, 4, 3, 2)]
    return device.fitting(tiles, _shared_bytes)


def _shared_bytes(tile: RangedTile) -> int:
    stages = tile.num_stages - (not tile.one_loop)
    return stages * (tile.bm + tile.bn) * tile.bk * 2


def multiply(
    kind: str,
    x: Tensor,
    weight: Rows,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `small_m_gemm.multiply` for any number of rows."""
    shape, num_rows = GemmShape(kind, *weight.shape), len(x)
    weight_bytes, factors, tile = parts(weight)[0].itemsize, None, None
    if norm_weight is not None:
        if not has_warps(shape, weight_bytes) or x.dtype == torch.float16:
            x, norm_weight = rms_norm(x, norm_weight, eps), None  # squares may exceed float16
        elif num_rows > FEW_ROWS:
            (x, factors), norm_weight = scaled_rows(x, norm_weight, eps), None
            if num_rows <= MAX_ROWS:
                tile = one_loop_tile(num_rows, shape.weights_per_column, this_device())
    operands = empty_product(kind, x, weight, norm_weight, eps, residual, out)
    if 1 <= num_rows <= MAX_ROWS and factors is None:
        launch(operands, config_of(shape, num_rows, weight_bytes))
    elif num_rows:
        launch_ranged(operands, num_ranges(shape), tile, factors)
    return operands.out


def scaled_rows(x: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x * norm_weight`, and each row's factor that completes the norm, float32.

    x: [num_rows, inner]; the inner dimension has four ranges.
    """
    num_rows, inner = x.shape
    out, factors = torch.empty_like(x), x.new_empty(num_rows, dtype=torch.float32)
    # rows used of a tile of 16; few rows are spread over more programs
    rows = 2 if num_rows <= MAX_ROWS else FEW_ROWS
    size = inner // NUM_RANGES
    if num_rows:
        scaled_rows_kernel[(triton.cdiv(num_rows, rows),)](
            x, norm_weight, out, factors, num_rows, inner, size, eps,
            BM=rows, BK=min(256, size & -size), num_warps=NUM_RANGES, num_stages=1, **LAUNCH,
        )  # fmt: skip
    return out, factors


def launch_ranged(
    operands: Product,
    ranges: int,
    tile: RangedTile | None = None,
    factors: Tensor | None = None,
) -> None:
    """Compute `operands.out` without a norm, for any number of rows.

    tile: default `tile_of`. factors: [num_rows] float32, by which the product is multiplied. Raises
    ValueError for a tile with one loop if the weight has 8 bits, or a range has a partial tile.
    """
    x, weight, out, _, _, residual, swiglu, _ = operands
    values, scale = parts(weight)
    (num_rows, inner), num_columns = x.shape, out.shape[1]
    weights = 2 if swiglu else 1
    tile = tile or tile_of(num_rows, num_columns, ranges > 1, weights, this_device())
    if tile.one_loop and (scale is not None or inner % (ranges * tile.bk)):
        raise ValueError(f"tile: got {tile} for a weight {list(values.shape)}, expected two loops")
    bn = tile.bn // weights
    grid = (triton.cdiv(num_rows, tile.bm) * triton.cdiv(num_columns, bn),)
    ranged_gemm_kernel[grid](
        x, factors, as_operand(values), scale, residual, out, num_rows, num_columns, inner,
        inner // ranges, SWIGLU=swiglu, ADD=residual is not None, HAS_RANGES=ranges > 1,
        ONE_LOOP=tile.one_loop, BM=tile.bm, BN=bn, BK=tile.bk, GROUP=GROUP,
        EVEN=inner % tile.bk == 0,
        BLOCKS=isinstance(weight, Quantized) and weight.in_blocks,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH,
    )  # fmt: skip
