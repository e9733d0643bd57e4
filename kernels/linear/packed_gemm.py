"""Products with packed integers: one kernel for few rows, otherwise dequantization and cuBLAS.

Reading the weights takes nearly all of the time of few rows. The inner dimension is split so that
all SMs have several programs.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from penstock.kernels.determinism import is_deterministic
from penstock.kernels.device import Device, this_device
from penstock.kernels.elementwise.triton_elementwise import rms_norm
from penstock.kernels.linear.gemm_config import MAX_PARTIALS
from penstock.kernels.linear.small_m_gemm import EARLY, MAX_TILES, workspace
from penstock.kernels.linear.triton_epilogue import MAX_SPLIT_K
from penstock.kernels.linear.triton_packed import dequantize_kernel, packed_gemm_kernel
from penstock.kernels.quantize.packed import BLOCK, Packed
from penstock.kernels.triton_pdl import LAUNCH

# rows up to which reading the weights once for 64 rows is faster than dequantizing them
MAX_ROWS = 128
BN = 64  # rows of a tile of the weight: those of an asynchronous product of compute capability 9.0
# rows of a tile → programs of products with one and with two weights, measured on an H200
PROGRAMS_PER_SM = {8: (4, 3), 16: (3, 3), 32: (2, 2), 64: (2, 2)}
MAX_STAGES = {8: (5, 3), 16: (4, 3), 32: (3, 3), 64: (3, 3)}  # rows of a tile → stages, likewise
MIN_STEPS = 4  # steps of a program, at least, where the inner dimension is split


class PackedTile(NamedTuple):
    """Tile sizes of a product."""

    bm: int  # rows of x
    bk: int  # columns of a step, all of one group
    split_k: int
    num_stages: int
    num_warps: int
    steps: int = 2  # steps of an iteration, 1 or 2


def is_synchronous(device: Device) -> bool:
    """Return whether Triton uses synchronous tensor cores."""
    return device.capability[0] not in (9, 10)


def min_tile_rows(device: Device) -> int:
    """Return the fewest rows of x in a tile: Triton computes 8 with synchronous tensor cores."""
    return 8 if is_synchronous(device) else 16


def max_tile_rows(device: Device) -> int:
    """Return the most rows of x in a tile whose sums fit into registers.

    Synchronous tensor cores need more registers for the weights.
    """
    return 32 if is_synchronous(device) else 64


def step_columns(weight: Packed) -> tuple[int, int]:
    """Return the columns of a step, and of a group in kernels: a multiple of them."""
    if weight.group_size >= weight.num_columns:
        return BLOCK, -(-weight.num_columns // BLOCK) * BLOCK
    return math.gcd(weight.group_size, BLOCK), weight.group_size


def packed_shared_bytes(bits: int, num_weights: int, tile: PackedTile) -> int:
    """Return the shared memory of a product with num_weights weights: tiles in flight.

    Asynchronous tensor cores hold one more stage of x.
    """
    words_of_groups = num_weights * BN
    codes = num_weights * BN * tile.bk * bits // 8
    of_step = 2 * tile.bm * tile.bk + codes + 4 * words_of_groups
    return (tile.num_stages - 1) * tile.steps * of_step


def fitting(
    device: Device, weight: Packed, num_weights: int, bm: int, split_k: int = 1, per_sm: int = 1
) -> PackedTile:
    """Return the tile of bm rows with the most stages of which per_sm programs fit an SM.

    Fewer programs if not even two stages fit.
    """
    bk, _ = step_columns(weight)
    # Larger tiles would spill registers.
    num_warps = 8 if num_weights * bm > 64 and device.capability[0] != 9 else 4
    steps = 1 if num_weights * bm > max_tile_rows(device) else 2
    most = MAX_STAGES[bm][num_weights - 1]
    tiles = [PackedTile(bm, bk, split_k, n, num_warps, steps) for n in range(most, 1, -1)]
    more = 0 if is_synchronous(device) else steps * 2 * bm * bk

    def shared_bytes(tile: PackedTile) -> int:
        return packed_shared_bytes(weight.bits, num_weights, tile) + more

    resident = [tile for tile in tiles if per_sm * shared_bytes(tile) <= device.shared_bytes]
    return device.fitting([*resident, tiles[-1]], shared_bytes)


def choose(
    kind: str, num_rows: int, weight: Packed, device: Device | None = None
) -> PackedTile | None:
    """Return tile sizes that fit the device, or None if cuBLAS is faster.

    With deterministic kernels, split_k is the same for every number of rows. kind: of a product.
    device: default `this_device`.
    """
    always = is_deterministic()
    if not 1 <= num_rows <= MAX_ROWS and not always:
        return None
    device = device or this_device()
    num_weights = 2 if kind == "swiglu" else 1
    num_columns = len(weight) // num_weights
    bm = max(min_tile_rows(device), triton.next_power_of_2(num_rows))
    bm = min(max_tile_rows(device), bm)
    bk, _ = step_columns(weight)
    tiles = triton.cdiv(num_columns, BN)
    split_k = 1
    per_sm = PROGRAMS_PER_SM[16 if always else bm][num_weights - 1]
    if (num_rows <= bm or always) and tiles <= MAX_TILES:
        rows = max_tile_rows(device) if always else num_rows
        steps = triton.cdiv(weight.num_columns, bk)
        wanted = per_sm * device.num_sms // tiles
        sums = rows * num_columns * num_weights + rows
        most = min(MAX_SPLIT_K.value, steps // MIN_STEPS, MAX_PARTIALS // sums)
        split_k = max(1, min(wanted, most))
    resident = min(per_sm, triton.cdiv(tiles * split_k, device.num_sms))
    return fitting(device, weight, num_weights, bm, split_k, resident)


def multiply(
    kind: str,
    x: Tensor,
    weight: Packed,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: PackedTile | None = None,
) -> Tensor | None:
    """Return the result; None if cuBLAS is faster. Parameters: see `small_m_gemm.multiply`.

    x is in bfloat16 or float16. tile: default `choose`.
    """
    is_logits = kind == "logits"
    if (is_logits and not is_deterministic()) or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    tile = tile or choose(kind, len(x), weight)
    if tile is None:
        return None
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    num_rows, inner = x.shape
    swiglu = kind == "swiglu"
    num_columns = len(weight) // (2 if swiglu else 1)
    if out is None:
        dtype = torch.float32 if is_logits else x.dtype
        out = x.new_empty(num_rows, num_columns, dtype=dtype)
    ranges = tile.split_k if num_rows > tile.bm else 1
    is_split = tile.split_k > ranges
    partials, counters = workspace(x.device) if is_split else (None, None)
    _, group = step_columns(weight)
    grid = triton.cdiv(num_columns, BN), tile.split_k // ranges, triton.cdiv(num_rows, tile.bm)
    packed_gemm_kernel[grid](
        x, weight.words, weight.groups, weight.order, residual, out,
        partials, counters, num_rows, num_columns, inner,
        SWIGLU=swiglu, ADD=residual is not None, SPLIT=is_split, RANGES=ranges, GROUP=group,
        BITS=weight.bits, BM=tile.bm, BN=BN, BK=tile.bk, EVEN=inner % (tile.steps * tile.bk) == 0,
        EARLY=weight.words.nbytes <= EARLY, SYNC=is_synchronous(this_device()), STEPS=tile.steps,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **LAUNCH,
    )  # fmt: skip
    return out


def dequantized(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix on a GPU, rounded once: [num_rows, num_columns]."""
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.device)
    bk, group = step_columns(weight)
    grid = triton.cdiv(num_rows, BN), triton.cdiv(num_columns, bk)
    dequantize_kernel[grid](
        weight.words, weight.groups, weight.order, out, num_rows, num_columns,
        GROUP=group, BITS=weight.bits, BN=BN, BK=bk, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out
