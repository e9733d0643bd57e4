"""A mixture of experts in Triton: route, sort, two grouped products, and the sum.

The host never waits, and no shape depends on the router's choice, so that a CUDA graph can hold all
kernels. With few tokens, reading the weights of the chosen experts takes nearly all of the time:
they are read once, in tiles narrow enough to keep all SMs busy. Many tokens are multiplied in large
tiles on the tensor cores.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from penstock.kernels.determinism import is_deterministic
from penstock.kernels.device import Device, this_device
from penstock.kernels.linear import deterministic
from penstock.kernels.linear.gemm_config import MAX_ROWS, GemmConfig
from penstock.kernels.linear.small_m_gemm import Product, choose, launch
from penstock.kernels.moe.triton_moe_kernels import TILE, combine, multiply, route, sort
from penstock.kernels.moe.triton_packed_experts import packed_grouped, pairs_of_tile
from penstock.kernels.quantize.packed import Packed
from penstock.kernels.quantize.triton_e4m3 import as_operand
from penstock.kernels.quantize.types import Matrix, Quantized, parts
from penstock.kernels.triton_pdl import LAUNCH

# tile sizes for few rows, unless `choose` knows better
ROUTER = GemmConfig("mma", 16, 128, 4, 4, 3, 512)
COUNTS = 32
BLOCK = 512  # columns of a program of `combine`


class GemmTile(NamedTuple):
    """Tile sizes of a grouped product."""

    bn: int  # columns of a tile, in gate and up each
    bk: int  # elements of the inner dimension per iteration
    num_warps: int
    num_stages: int


class MoeTuning(NamedTuple):
    """Tile sizes of both products."""

    bm: int  # pairs of a token and an expert in a tile
    gate_up: GemmTile
    down: GemmTile


# for weights in 16 bits if wider tiles leave SMs idle
NARROW = MoeTuning(16, GemmTile(16, 128, 2, 4), GemmTile(32, 128, 4, 4))
# (maximum pairs of an expert on average, tile sizes)
TUNINGS = (
    (8, MoeTuning(16, GemmTile(32, 128, 4, 3), GemmTile(32, 256, 4, 3))),
    (24, MoeTuning(32, GemmTile(64, 64, 4, 4), GemmTile(64, 128, 4, 3))),
    (96, MoeTuning(64, GemmTile(64, 64, 4, 4), GemmTile(128, 64, 4, 4))),
    (1 << 30, MoeTuning(128, GemmTile(128, 64, 8, 4), GemmTile(256, 64, 8, 4))),
)
# for weights in 8 bits
FP8_TUNINGS = (
    (8, MoeTuning(16, GemmTile(32, 128, 4, 3), GemmTile(64, 128, 4, 3))),
    (24, MoeTuning(32, GemmTile(64, 128, 4, 3), GemmTile(128, 64, 4, 3))),
    (1 << 30, MoeTuning(64, GemmTile(64, 64, 4, 3), GemmTile(128, 64, 4, 3))),
)


def gemm_shared_bytes(tile: GemmTile, bm: int, num_weights: int, is_fp8: bool) -> int:
    """Return a grouped product's shared memory: tiles of x and of num_weights weights in flight."""
    columns = 2 * bm + num_weights * tile.bn * (1 if is_fp8 else 2)
    dequantization = 1024 if is_fp8 else 0
    return (tile.num_stages - 1) * columns * tile.bk + dequantization


def choose_tuning(
    num_pairs: int,
    num_experts: int,
    size: int,
    is_fp8: bool = False,
    device: Device | None = None,
) -> MoeTuning:
    """Return the tile sizes for pairs over `num_experts` experts of `size` inner features.

    device: default `this_device`. Tiles measured on an H200 have fewer stages where they would not
    fit.
    """
    device = device or this_device()
    per_expert = num_pairs / num_experts
    tunings = FP8_TUNINGS if is_fp8 else TUNINGS
    tuning = next(tuning for most, tuning in tunings if per_expert <= most)
    few = num_pairs * triton.cdiv(size, tuning.gate_up.bn) < 2 * device.num_sms
    if few and not is_fp8 and tuning.bm == NARROW.bm:
        tuning = NARROW

    def fitting(tile: GemmTile, num_weights: int) -> GemmTile:
        tiles = (tile._replace(num_stages=number) for number in range(tile.num_stages, 1, -1))
        return device.fitting(
            tiles, lambda tile: gemm_shared_bytes(tile, tuning.bm, num_weights, is_fp8)
        )

    return MoeTuning(tuning.bm, fitting(tuning.gate_up, 2), fitting(tuning.down, 1))


class Routing(NamedTuple):
    """Pairs of a token and one of its local experts, sorted by expert."""

    weights: Tensor  # float32 [num_tokens, top_k]
    sources: Tensor  # int32 [pairs]: the token of each pair
    # int32 [num_tokens, top_k]: indices of a token's pairs; -1: the expert is not local
    places: Tensor
    tiles: Tensor  # int32 [1 + maximum tiles, TILE]: the number of tiles, then the tiles


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` in float32."""
    if is_deterministic():
        return deterministic.multiply("logits", x, weight)
    num_rows, inner = x.shape
    if num_rows > MAX_ROWS or inner % 16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    logits = x.new_empty(num_rows, len(weight), dtype=torch.float32)
    if num_rows:
        launch(Product(x, weight, logits), choose("logits", num_rows, *weight.shape) or ROUTER)
    return logits


def sort_by_expert(
    logits: Tensor, top_k: int, normalize: bool, first: int, num_here: int, bm: int
) -> Routing:
    """Route float32 logits [num_tokens, num_experts] to local experts, `first` and after."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * top_k
    used = min(num_pairs, num_here)  # each expert has one tile that may not be full
    most_tiles = used + (num_pairs - used) // bm
    # threads share the sum of a token's probabilities by the size of the chunk
    chunk = 16 if num_tokens <= 16 and not is_deterministic() else 64
    num_chunks = triton.cdiv(num_tokens, chunk)
    here = triton.next_power_of_2(num_here)
    empty = partial(logits.new_empty, dtype=torch.int32)
    routing = Routing(
        logits.new_empty(num_tokens, top_k),
        empty(num_pairs),
        empty(num_tokens, top_k),
        empty(1 + most_tiles, TILE.value),
    )
    weights, *sorted_pairs = routing
    ids, counts = empty(num_tokens, top_k), empty(num_chunks, here)
    sizes = {"CHUNK": chunk, "K": top_k, "KB": triton.next_power_of_2(top_k), "LB": here}
    sizes |= {"num_warps": 4 if chunk == 16 else 8} | LAUNCH
    route[(num_chunks,)](
        logits, ids, weights, counts, *sorted_pairs, num_tokens, num_experts, first, num_here, bm,
        NORMALIZE=normalize, ALL=num_chunks == 1, EB=triton.next_power_of_2(num_experts),
        **sizes,
    )  # fmt: skip
    if num_chunks > 1:
        sort[(num_chunks,)](
            ids, counts, *sorted_pairs, num_tokens, first, num_here, bm,
            COUNTS=COUNTS, **sizes,
        )  # fmt: skip
    return routing


def grouped(
    x: Tensor, routing: Routing, weight: Matrix, swiglu: bool, bm: int, cut: GemmTile
) -> Tensor:
    """Return each pair's product with its expert's weight: [pairs, columns].

    swiglu: x has a row for each token, weight has the gate's rows and up's; otherwise x has a row
    for each pair.
    """
    if isinstance(weight, Packed):
        return packed_grouped(x, routing.sources, routing.tiles, weight, swiglu, bm)
    inner = x.shape[1]
    columns = weight.shape[1] // (2 if swiglu else 1)
    out = x.new_empty(len(routing.sources), columns)
    grid = ((len(routing.tiles) - 1) * triton.cdiv(columns, cut.bn),)
    values, scale = parts(weight)
    multiply[grid](
        x, routing.sources, routing.tiles, as_operand(values), scale, out, columns, inner,
        SWIGLU=swiglu, BM=bm, BN=cut.bn, BK=cut.bk, EVEN=inner % cut.bk == 0,
        BLOCKS=isinstance(weight, Quantized) and weight.in_blocks,
        num_warps=cut.num_warps, num_stages=cut.num_stages, **LAUNCH,
    )  # fmt: skip
    return out


def experts(
    x: Tensor,
    logits: Tensor,
    gate_up: Matrix,
    down: Matrix,
    top_k: int,
    normalize: bool,
    first: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tuning: MoeTuning | None = None,
) -> Tensor:
    """Compute `norm_moe` after the router; x is the norm, and the residual is added."""
    num_tokens, hidden_size = x.shape
    out = torch.empty_like(x) if out is None else out
    if not num_tokens:
        return out
    if isinstance(gate_up, Packed) and isinstance(down, Packed) and tuning is None:
        bm = pairs_of_tile(num_tokens * top_k, logits.shape[1])
        tuning = NARROW._replace(bm=bm)  # of which only bm is used
    if tuning is None:
        is_fp8 = isinstance(down, Quantized)
        tuning = choose_tuning(num_tokens * top_k, logits.shape[1], down.shape[2], is_fp8)
    routing = sort_by_expert(logits, top_k, normalize, first, len(down), tuning.bm)
    activated = grouped(x, routing, gate_up, True, tuning.bm, tuning.gate_up)
    outputs = grouped(activated, routing, down, False, tuning.bm, tuning.down)
    combine[(num_tokens, triton.cdiv(hidden_size, BLOCK))](
        outputs, routing.weights, routing.places, residual, out, hidden_size,
        ADD=residual is not None, K=top_k, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip
    return out
