"""Products on a GPU whose rows have the same bits for every number of rows.

A row's sums depend on the order of the additions only, and this on the weight's shape only: each
range of the inner dimension is added up in steps of 16 by tensor cores, from the front, and the
ranges in turn. The tile sizes, which follow from the number of rows, change no sum. Up to 64 rows a
range has a program (`triton_small_m_gemm`), beyond that a program computes all ranges
(`triton_ranged_gemm`). The norm is a kernel of its own, and activations stay in 16 bits.
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from penstock.kernels.device import Device, this_device
from penstock.kernels.elementwise.triton_elementwise import rms_norm
from penstock.kernels.linear.gemm_candidates import GemmShape
from penstock.kernels.linear.gemm_config import MAX_ROWS, GemmConfig, row_block
from penstock.kernels.linear.small_m_gemm import Product, empty_product, launch
from penstock.kernels.linear.triton_block_scales import GROUP
from penstock.kernels.linear.triton_ranged_gemm import ranged_gemm_kernel
from penstock.kernels.quantize.triton_e4m3 import as_operand
from penstock.kernels.quantize.types import Quantized, Rows, parts
from penstock.kernels.triton_pdl import LAUNCH

RANGES = (1, 2, 4)
MIN_PROGRAMS = 96
"""programs of a product of few rows, for which the inner dimension has several ranges"""
BN = 32
"""columns of a program of few rows"""
MANY_COLUMNS = 1 << 16
"""columns from which a program has more, such as those of the output layer"""


class RangedTile(NamedTuple):
    """Tile sizes of a product of many rows."""

    bm: int
    bn: int
    """columns; with two weights, of both together"""
    num_warps: int
    num_stages: int


TILES = (
    RangedTile(128, 256, 8, 3),
    RangedTile(128, 128, 8, 3),
    RangedTile(64, 128, 4, 4),
    RangedTile(64, 64, 4, 4),
    RangedTile(64, 64, 4, 3),
    RangedTile(64, 64, 4, 2),
)
"""the largest first"""
BK = 64


def num_ranges(shape: GemmShape) -> int:
    """Return the ranges of the inner dimension, by the weight's shape alone."""
    tiles = triton.cdiv(shape.num_columns, BN)
    possible = [one for one in RANGES if shape.inner % (2 * BK * one) == 0]
    enough = (one for one in possible if tiles * one >= MIN_PROGRAMS)
    return next(enough, max(possible, default=1))


@cache
def config_of(
    shape: GemmShape, num_rows: int, weight_bytes: int = 2, device: Device | None = None
) -> GemmConfig:
    """Return the tile sizes for up to 64 rows that fit the device; split_k is `num_ranges`."""
    device, rows, split_k = device or this_device(), row_block(num_rows), num_ranges(shape)
    is_wide = shape.num_columns >= MANY_COLUMNS
    bn = (4 if is_wide else 1) * BN
    tiles = [(256, 5), (256, 3)] if rows <= 16 and not is_wide else []
    tiles += [(128, 5)] if not is_wide else []
    ways = [
        GemmConfig("mma", bn, bk, split_k, 4, num_stages, 512)
        for bk, num_stages in [*tiles, (128, 3), (64, 3), (64, 2), (32, 2)]
        if shape.inner % (bk * split_k) == 0 or bk < 64
    ]

    def shared_bytes(config: GemmConfig) -> int:
        weights = config.bn * shape.weights_per_column * weight_bytes
        return config.num_stages * config.bk * (2 * rows + weights)

    return device.fitting(ways, shared_bytes)


def tile_of(
    num_rows: int, num_columns: int, has_ranges: bool, weights: int, device: Device
) -> RangedTile:
    """Return the largest tile that fits and keeps nearly all SMs busy, otherwise a small one.

    weights: for a column, two with SwiGLU. The totals of ranges need the registers of the widest
    tile, and so do weights for synchronous tensor cores.
    """
    is_asynchronous = device.capability[0] in (9, 10)
    tiles = TILES if is_asynchronous and not has_ranges else TILES[1:]

    def is_filled(tile: RangedTile) -> bool:
        columns = triton.cdiv(num_columns * weights, tile.bn)
        return bool(triton.cdiv(num_rows, tile.bm) * columns >= 0.9 * device.num_sms)

    first = next((at for at, tile in enumerate(tiles) if is_filled(tile)), len(tiles) - 3)
    return device.fitting(tiles[first:], _shared_bytes)


def _shared_bytes(tile: RangedTile) -> int:
    return (tile.num_stages - 1) * (tile.bm + tile.bn) * BK * 2


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
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    operands = empty_product(kind, x, weight, residual=residual, out=out)
    num_rows = len(x)
    shape = GemmShape(kind, *weight.shape)
    if 1 <= num_rows <= MAX_ROWS:
        launch(operands, config_of(shape, num_rows, parts(weight)[0].itemsize))
    elif num_rows:
        launch_ranged(operands, num_ranges(shape))
    return operands.out


def launch_ranged(operands: Product, ranges: int, tile: RangedTile | None = None) -> None:
    """Compute `operands.out` without a norm, for any number of rows; tile: default `tile_of`."""
    x, weight, out, _, _, residual, swiglu = operands
    values, scale = parts(weight)
    (num_rows, inner), num_columns = x.shape, out.shape[1]
    weights = 2 if swiglu else 1
    tile = tile or tile_of(num_rows, num_columns, ranges > 1, weights, this_device())
    bn = tile.bn // weights
    grid = (triton.cdiv(num_rows, tile.bm) * triton.cdiv(num_columns, bn),)
    ranged_gemm_kernel[grid](
        x, as_operand(values), scale, residual, out, num_rows, num_columns, inner,
        inner // ranges, SWIGLU=swiglu, ADD=residual is not None, RANGES=ranges > 1,
        BM=tile.bm, BN=bn, BK=BK, GROUP=GROUP, EVEN=inner % BK == 0,
        BLOCKS=isinstance(weight, Quantized) and weight.in_blocks,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH,
    )  # fmt: skip
