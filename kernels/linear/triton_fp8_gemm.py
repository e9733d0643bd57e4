"""Products of many rows with weights of 8 bits.

The scales may belong to blocks of 128 by 128 (Qwen3-*-FP8, DeepSeek-V3). Tensor cores multiply 8
bits, and the sum over a block is multiplied by its scale in float32 (`block_product`).

For GPUs whose tensor cores don't multiply 8 bits, weights are widened to x's type in registers
(`weight_only_product`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import Device, this_device
from penstock.kernels.linear.triton_small_m_gemm import operand, weight_tile
from penstock.kernels.matrices import BLOCK, Quantized
from penstock.kernels.triton_elementwise import as_operand
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

_BLOCK = tl.constexpr(BLOCK)
# rows and columns of a tile of the result, up to 128 columns; warps; stages
Tile = tuple[int, int, int, int]
GROUP = 8  # number of row tiles that read the same weights in turn, from the L2


def tile_shared_bytes(tile: Tile) -> int:
    """Return the bytes of shared memory: the 8-bit tiles in flight."""
    rows, columns, _, num_stages = tile
    return (num_stages - 1) * (rows + columns) * BLOCK


def tile_of(num_rows: int, device: Device | None = None) -> Tile:
    """Return the tile for a product of `num_rows` rows that fits the device.

    device: default `this_device`. The first tile was measured on an H200.
    """
    tile = min(64, max(16, triton.next_power_of_2(num_rows))), 64, 4, 6
    if num_rows > 256:
        tile = 128, 128, 8, 4
    tiles = [(*tile[:3], num_stages) for num_stages in range(tile[3], 1, -1)]
    return (device or this_device()).fitting(tiles, tile_shared_bytes)


def block_product(
    x: Quantized, weight: Quantized, out: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Compute `x @ weight.T` in `x.dtype`.

    x: [num_rows, K] with row scales. weight: [N, K] with block scales. out: memory of the result.
    tile: default `tile_of` the number of rows. All tensors must be contiguous.
    """
    (num_rows, inner), num_columns = x.shape, len(weight)
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    bm, bn, num_warps, num_stages = tile or tile_of(num_rows)
    tiles = triton.cdiv(num_rows, bm) * triton.cdiv(num_columns, bn)
    if tiles:
        _block_product[(tiles,)](
            x.values, x.scale, weight.values, weight.scale, out, num_rows, num_columns, inner,
            BM=bm, BN=bn, GROUP=GROUP, EVEN=inner % BLOCK == 0,
            num_warps=num_warps, num_stages=num_stages, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit
def place_of_tile(num_rows, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of this program's tile."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    in_group = tl.minimum(row_tiles - group, GROUP)
    place = tl.program_id(0) % (GROUP * column_tiles)
    return (group + place % in_group) * BM, place // in_group * BN


@triton.jit(do_not_specialize=["num_rows"])
def _block_product(
    x, x_scale, weight, scale, out, num_rows, N, K,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out, whose columns are in one row of blocks, in each program."""
    launch_dependents()
    first_row, first = place_of_tile(num_rows, N, BM, BN, GROUP)
    row = first_row + tl.arange(0, BM)
    column = first + tl.arange(0, BN)
    k = tl.arange(0, _BLOCK)
    x_at = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    scale_at = scale + first // _BLOCK * tl.cdiv(K, _BLOCK)
    acc = tl.zeros((BM, BN), tl.float32)
    wait()
    for block in tl.range(0, tl.cdiv(K, _BLOCK)):
        begin = block * _BLOCK
        if EVEN:
            x_tile, weight_tile = tl.load(x_at + begin), tl.load(weight_at + begin)
        else:
            inside = begin + k[None, :] < K
            x_tile = tl.load(x_at + begin, inside, 0.0)
            weight_tile = tl.load(weight_at + begin, inside, 0.0)
        acc += tl.dot(x_tile, weight_tile.T) * tl.load(scale_at + block)
    acc *= tl.load(x_scale + row, row < num_rows, 0.0)[:, None]
    exists = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)


FEW_ROWS = 32
# tile sizes of experts in 8 bits, measured on an H200; they take 32 KB of shared memory
BN, BK, NUM_WARPS, NUM_STAGES = 128, 64, 4, 3


def weight_only_product(
    x: Tensor, weight: Quantized, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `x @ weight.T`; x: [num_rows, K]; weight: [N, K]; out_dtype: default x's dtype.

    out: memory of the result. All tensors must be contiguous.
    """
    (num_rows, inner), num_columns = x.shape, len(weight)
    if out is None:
        out = x.new_empty(num_rows, num_columns, dtype=out_dtype)
    bm = 16 if num_rows <= FEW_ROWS else 64
    tiles = triton.cdiv(num_rows, bm) * triton.cdiv(num_columns, BN)
    if tiles:
        _weight_only_kernel[(tiles,)](
            x, as_operand(weight.values), weight.scale, out, num_rows, num_columns, inner,
            BM=bm, BN=BN, BK=BK, GROUP=GROUP, EVEN=inner % BK == 0, BLOCKS=weight.in_blocks,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _weight_only_kernel(
    x, weight, scale, out, num_rows, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile [BM, BN] of out in each program; scale: scales of rows, or of blocks."""
    launch_dependents()
    first_row, first = place_of_tile(num_rows, N, BM, BN, GROUP)
    row, column = first_row + tl.arange(0, BM), first + tl.arange(0, BN)
    weight_row = tl.minimum(column, N - 1).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight + weight_row[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    wait()
    for begin in tl.range(0, K, BK):
        inside = begin + k[None, :] < K
        exists = row[:, None] < num_rows
        x_tile = tl.load(x_at + begin, exists if EVEN else exists & inside, 0.0)
        tile = weight_tile(
            weight_at + begin, inside, scale, weight_row, begin, K, EVEN, BLOCKS, BK, 1
        )
        acc = tl.dot(x_tile, operand(tile, x_tile.dtype).T, acc, input_precision="ieee")
    if not BLOCKS:
        acc *= tl.load(scale + weight_row)[None, :]
    exists = (row < num_rows)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)
