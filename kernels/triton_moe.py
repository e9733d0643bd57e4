"""A mixture of experts in Triton: route, sort, two grouped products, and the sum.

The host never waits, and no shape depends on the router's choice, so that a CUDA graph can hold all
kernels. With few tokens, reading the weights of the chosen experts takes nearly all of the time.
These weights are read once, in tiles narrow enough to keep all SMs busy. Many tokens are multiplied
in large tiles on the tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.back_ends import CHOSEN, is_deterministic
from penstock.kernels.device import Device, this_device
from penstock.kernels.linear.small_m_gemm import Product, choose, launch
from penstock.kernels.linear.tile_sizes import MAX_ROWS, GemmConfig
from penstock.kernels.linear.triton_small_m_gemm import load_residual, operand, weight_tile
from penstock.kernels.matrices import BLOCK, Matrix, Quantized, parts
from penstock.kernels.triton_elementwise import as_operand, rms_norm
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait
from penstock.kernels.triton_route import TILE, Routing, sort_by_expert

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _add_product(acc, x, weight):
    """Return acc + x @ weight.T; tensor cores, which take 16 rows, are slower for a single one."""
    if x.shape[0] == 1:
        acc += tl.sum(x.to(tl.float32) * weight.to(tl.float32), 1)[None, :]
    else:
        acc = tl.dot(x, operand(weight, x.dtype).T, acc, input_precision="ieee")
    return acc


@triton.jit
def _multiply_tile(
    x, sources, expert, begin, end, weight, scale, out, column, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    pair = begin + tl.arange(0, BM)
    exists = pair < end
    row = pair
    if SWIGLU:
        row = tl.zeros_like(pair) if BM == 1 else tl.load(sources + pair, exists, 0)
    k = tl.arange(0, BK)
    NUM: tl.constexpr = 2 if SWIGLU else 1
    first_row = expert.to(tl.int64) * (NUM * N)
    weight += first_row * K
    x_at = x + row[:, None].to(tl.int64) * K + k[None, :]
    weight_row = tl.minimum(column, N - 1)
    weight_at = weight + weight_row[:, None] * K + k[None, :]
    if BLOCKS:
        scale += first_row // (NUM * N) * (tl.cdiv(NUM * N, _BLOCK) * tl.cdiv(K, _BLOCK))
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for first in tl.range(0, K, BK):
        inside = first + k[None, :] < K
        gate = weight_tile(
            weight_at + first, inside, scale, weight_row, first, K, EVEN, BLOCKS, BK, 1
        )
        up = gate
        if SWIGLU:
            up_at, up_row = weight_at + N * K + first, weight_row + N
            up = weight_tile(up_at, inside, scale, up_row, first, K, EVEN, BLOCKS, BK, 1)
        # x after the weights, whose addresses do not wait for `sources`
        x_tile = tl.load(x_at + first, exists[:, None] if EVEN else exists[:, None] & inside, 0.0)
        acc = _add_product(acc, x_tile, gate)
        if SWIGLU:
            acc_up = _add_product(acc_up, x_tile, up)
    if scale is not None and not BLOCKS:
        scale_at = scale + first_row + tl.minimum(column, N - 1)
        acc *= tl.load(scale_at)[None, :]
        if SWIGLU:
            acc_up *= tl.load(scale_at + N)[None, :]
    if SWIGLU:
        acc = acc / (1 + tl.exp(-acc)) * acc_up
    at = pair[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), exists[:, None] & (column < N)[None, :])


@triton.jit
def multiply(
    x, sources, tiles, weight, scale, out, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of one tile's pairs, out [num_pairs, N], in each program.

    SWIGLU: compute gate and up from the rows of x of the pairs' tokens; otherwise x has a row for
    each pair. BM: 1 for a single token. The grid suffices for any choice of the router. EVEN: BK
    divides K. scale: scale of each row of 8-bit weights, which are converted to x's type in
    registers. BLOCKS: scales belong to blocks.
    """
    wait()
    if BM == 1:
        launch_dependents()  # only now: `add_experts` reads what `route` wrote before it waits
    columns = tl.cdiv(N, BN)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    at = tiles + (tile + 1) * TILE
    # in flight with the number of tiles, and unused if this is none of them
    expert, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if tile < tl.load(tiles):
        _multiply_tile(
            x, sources, expert, begin, end, weight, scale, out, column, N, K,
            SWIGLU, BM, BN, BK, EVEN, BLOCKS,
        )  # fmt: skip


@triton.jit
def combine(
    outputs, weights, places, residual, out, N,
    ADD: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the outputs of a token's pairs and the residual, BLOCK columns in each program."""
    launch_dependents()
    wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < N
    acc = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        acc += tl.load(residual + token * N + column, exists, 0.0).to(tl.float32)
    for k in tl.static_range(K):
        at = tl.load(places + token * K + k).to(tl.int64) * N + column
        output = tl.load(outputs + at, exists & (at >= 0), 0.0)
        acc += tl.load(weights + token * K + k) * output.to(tl.float32)
    tl.store(out + token * N + column, acc.to(out.dtype.element_ty), exists)


@triton.jit
def add_experts(
    x, tiles, weights, weight, residual, out, N,
    ADD: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of a single token's output in each program: its pairs and their sum.

    All weights, [TOP, BN, K] and [BN, K], are in flight before `multiply` ends, but not before
    `route` has ended. All experts are local.
    """
    launch_dependents()
    row, k, pair = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, K), tl.arange(0, TOP)
    # not from the L1, which may hold those of the previous layer
    expert = tl.load(tiles + (1 + pair) * TILE, cache_modifier=".cg").to(tl.int64)
    share = tl.load(weights + pair, cache_modifier=".cg")
    weight += row[:, None] * K + k[None, :]
    tile = tl.load(weight[None, :, :] + (expert * N * K)[:, None, None])
    if SHARED:
        expert = tl.load(tiles + (1 + TOP) * TILE, cache_modifier=".cg").to(tl.int64)
        last = tl.load(weight + expert * N * K)
        last_share = tl.load(weights + TOP, cache_modifier=".cg")
    wait()
    acc = load_residual(residual, row, row < N, ADD)
    x_tile = tl.load(x + pair[:, None] * K + k[None, :]).to(tl.float32) * share[:, None]
    acc += tl.sum(tl.sum(tile.to(tl.float32) * x_tile[:, None, :], 2), 0)
    if SHARED:
        x_row = tl.load(x + TOP * K + k).to(tl.float32) * last_share
        acc += tl.sum(last.to(tl.float32) * x_row[None, :], 1)
    tl.store(out + row, acc.to(out.dtype.element_ty))


# tile sizes for few rows, unless `choose` returns others
ROUTER = GemmConfig("mma", 16, 128, 4, 4, 3, 512)
COMBINED = 512  # columns per program of `combine`
NUM_WARPS = 8  # of `add_experts`


class GemmTile(NamedTuple):
    """Tile sizes of a grouped product."""

    bn: int  # columns of a tile, for each of gate and up
    bk: int  # elements of the inner dimension per iteration
    num_warps: int
    num_stages: int


class MoeTuning(NamedTuple):
    """Tile sizes of both products."""

    bm: int  # (token, expert) pairs in a tile
    gate_up: GemmTile
    down: GemmTile
    gate_bm: int = 0  # 1 for gate and up of a single token, whose tiles have one pair; 0: bm


# for 16-bit weights if wider tiles would leave SMs idle
NARROW = MoeTuning(16, GemmTile(16, 128, 2, 4), GemmTile(32, 128, 2, 3))
# gate and up of a single token's pairs, in 16 bits; measured for 2,048 inner features
ONE = GemmTile(4, 2048, 4, 1)
# (maximum average pairs per expert, tile sizes)
TUNINGS = (
    (8, MoeTuning(16, GemmTile(32, 128, 4, 3), GemmTile(32, 256, 4, 3))),
    (24, MoeTuning(32, GemmTile(64, 64, 4, 4), GemmTile(64, 128, 4, 3))),
    (96, MoeTuning(64, GemmTile(64, 64, 4, 4), GemmTile(128, 64, 4, 4))),
    (1 << 30, MoeTuning(128, GemmTile(128, 64, 8, 4), GemmTile(256, 64, 8, 4))),
)
# for 8-bit weights
FP8_TUNINGS = (
    (8, MoeTuning(16, GemmTile(32, 128, 4, 3), GemmTile(64, 128, 4, 3))),
    (24, MoeTuning(32, GemmTile(64, 128, 4, 3), GemmTile(128, 64, 4, 3))),
    (1 << 30, MoeTuning(64, GemmTile(64, 64, 4, 3), GemmTile(128, 64, 4, 3))),
)


def gemm_shared_bytes(tile: GemmTile, bm: int, num_weights: int, is_fp8: bool) -> int:
    """Return the bytes of shared memory of a grouped product: tiles of x and weights in flight."""
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

    device: default `this_device`. Tiles measured on an H200 have fewer stages on devices where they
    would not fit.
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


def tuning_of_one(tuning: MoeTuning, hidden_size: int) -> MoeTuning:
    """Return the tile sizes for a single token if gate and up have 16 bits."""
    if hidden_size > ONE.bk or is_deterministic():
        return tuning
    return tuning._replace(gate_bm=1, gate_up=ONE)


def _columns_of_one(top_k: int, down: Tensor) -> int:
    """Return the columns of a program of `add_experts`; 0: it is not for these sizes.

    The weights of a program are tiles of powers of two, 128 elements in each thread.
    """
    _, hidden_size, size = down.shape
    if top_k & (top_k - 1) or size & (size - 1):
        return 0
    columns = min(NUM_WARPS * 32 * 128 // (top_k * size), 8)
    return columns if columns and hidden_size % columns == 0 else 0


def norm_and_logits(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the norm of x [num_tokens, hidden_size], and its `router_logits`.

    One kernel computes both for a single token.
    """
    config = None if is_deterministic() or len(x) > 1 else choose("logits", len(x), *router.shape)
    if config is None or config.kernel != "gemv" or x.shape[1] > config.bk:
        normed = rms_norm(x, norm_weight, eps)
        return normed, router_logits(normed, router)
    normed, logits = torch.empty_like(x), x.new_empty(1, len(router), dtype=torch.float32)
    launch(Product(x, router, logits, norm_weight, eps, normed=normed), config)
    return normed, logits


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` in float32."""
    if deterministic := CHOSEN.deterministic:
        return deterministic.multiply("logits", x, weight)
    num_rows, inner = x.shape
    if num_rows > MAX_ROWS or inner % 16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    logits = x.new_empty(num_rows, len(weight), dtype=torch.float32)
    if num_rows:
        launch(Product(x, weight, logits), choose("logits", num_rows, *weight.shape) or ROUTER)
    return logits


def grouped(
    x: Tensor, routing: Routing, weight: Matrix, swiglu: bool, bm: int, cut: GemmTile
) -> Tensor:
    """Return each pair's product with its expert's weight: [pairs, columns].

    swiglu: x has a row for each token, and weight has the rows of gate and of up; otherwise x has a
    row for each pair.
    """
    if not isinstance(weight, Tensor | Quantized):
        return weight.grouped(x, routing.sources, routing.tiles, swiglu, bm)
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
    shared: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tuning: MoeTuning | None = None,
) -> Tensor:
    """Compute `norm_moe` after the router; x is already normalized, and the residual is added."""
    num_tokens, hidden_size = x.shape
    out = torch.empty_like(x) if out is None else out
    if not num_tokens:
        return out
    per_token = top_k + shared
    is_custom = not isinstance(gate_up, Tensor | Quantized)
    if is_custom and not isinstance(down, Tensor | Quantized) and tuning is None:
        bm = down.pairs_of_tile(num_tokens * per_token, logits.shape[1])
        tuning = NARROW._replace(bm=bm)  # only its bm is used
    if tuning is None:
        is_fp8 = isinstance(down, Quantized)
        tuning = choose_tuning(num_tokens * per_token, logits.shape[1], down.shape[2], is_fp8)
        if num_tokens == 1 and isinstance(gate_up, Tensor):
            tuning = tuning_of_one(tuning, hidden_size)
    routing = sort_by_expert(logits, top_k, normalize, first, len(down), tuning.bm, shared)
    activated = grouped(x, routing, gate_up, True, tuning.gate_bm or tuning.bm, tuning.gate_up)
    if num_tokens == 1 and tuning.gate_bm and isinstance(down, Tensor):
        columns = _columns_of_one(top_k, down) if len(down) == logits.shape[1] else 0
        if columns:
            add_experts[(hidden_size // columns,)](
                activated, routing.tiles, routing.weights, down, residual, out, hidden_size,
                ADD=residual is not None, TOP=top_k, SHARED=shared, BN=columns, K=down.shape[2],
                num_warps=NUM_WARPS, **LAUNCH,
            )  # fmt: skip
            return out
    outputs = grouped(activated, routing, down, False, tuning.bm, tuning.down)
    combine[(num_tokens, triton.cdiv(hidden_size, COMBINED))](
        outputs, routing.weights, routing.places, residual, out, hidden_size,
        ADD=residual is not None, K=per_token, BLOCK=COMBINED, **LAUNCH,
    )  # fmt: skip
    return out
