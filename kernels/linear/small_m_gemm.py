"""Matrix products of up to 64 rows, fused with the norm, activation or sum around them.

Reading the weights once takes nearly all of the time. Tables hold the tile sizes measured on a GPU;
for other GPUs, tile sizes are estimated.
"""

from functools import cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from penstock.kernels.device import Device, this_device
from penstock.kernels.linear.tile_sizes import (
    MAX_PARTIALS,
    MAX_ROWS,
    GemmConfig,
    GemmShape,
    cheapest,
    row_block,
)
from penstock.kernels.linear.triton_small_m_gemm import (
    MAX_SPLIT_K,
    gemv_kernel,
    small_m_gemm_kernel,
)
from penstock.kernels.linear.tuning_tables import tuning_tables
from penstock.kernels.matrices import Quantized, Rows, parts
from penstock.kernels.triton_elementwise import as_operand, rms_norm
from penstock.kernels.triton_pdl import LAUNCH

MAX_TILES = 8192  # maximum tiles of a product with split-K
# bytes of weights; the next kernel may overlap a product of several rows with at most this number
EARLY = 24 << 20
# one row and 8-bit weights of sizes that are in no table, which wait in shared memory, by weights
# for each column
GEMV_FP8 = {
    1: [GemmConfig("gemv", bn, 512, 1, 4, 3, 512) for bn in (16, 8, 4)],
    2: [GemmConfig("gemv", bn, 256, 1, 2, 4, 512) for bn in (8, 4)],
}


class Product(NamedTuple):
    """Operands of `residual + act(rms_norm(x) @ weight.T)`; only the product is required."""

    x: Tensor  # [num_rows, K], num_rows <= MAX_ROWS
    weight: Rows  # [N, K]; with swiglu [2 * N, K]: gate, then up
    out: Tensor  # [num_rows, N]
    norm_weight: Tensor | None = None  # [K]
    eps: float = 0.0
    residual: Tensor | None = None  # [num_rows, N]
    swiglu: bool = False
    normed: Tensor | None = None  # [1, K], takes the norm of one row if a tile has all of it


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for partial sums, and the tiles' counters, which are 0 between products.

    Products must run in one stream. Raises RuntimeError during the capture of a CUDA graph, in
    whose pool the memory would otherwise be allocated.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("workspace: call it, or a product, before the capture of a graph")
    partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
    return partials, torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def choose(
    kind: str,
    num_rows: int,
    num_weights: int,
    inner: int,
    is_fp8: bool = False,
    device: Device | None = None,
) -> GemmConfig | None:
    """Return the tile sizes for a weight [num_weights, inner], or None if cuBLAS is faster.

    On an H200, cuBLAS multiplies sizes missing from the tables, except one row, for which the
    estimate is safe. On other GPUs the cost is estimated. Unmeasured 8-bit weights have the tile
    sizes of 16 bits, with a separate kernel for the norm: Triton does not prefetch x when it
    multiplies 8-bit with 16-bit numbers.

    kind: add (with or without a residual), norm, swiglu or logits (a norm, float32 out). device:
    default `this_device`.
    """
    if not 1 <= num_rows <= MAX_ROWS or inner % 16:
        return None
    rows = 1 if num_rows == 1 else row_block(num_rows)
    key = (kind, num_weights, inner, rows)
    device = device or this_device()
    tables = tuning_tables(device)
    table = tables["fp8"] if is_fp8 and key in tables["fp8"] else tables["bfloat16"]
    if key in table:
        config = table[key]
        return config._replace(norm_inside=False) if config and is_fp8 else config
    if rows == 1:
        weights_per_column = 2 if kind == "swiglu" else 1
        if is_fp8:
            shared_bytes = partial(_gemv_shared_bytes, weights_per_column)
            return device.fitting(GEMV_FP8[weights_per_column], shared_bytes)
        return _guess_gemv(num_weights // weights_per_column, inner, weights_per_column, device)
    if device.is_measured:
        return None
    return cheapest(GemmShape(kind, num_weights, inner), rows, 1 if is_fp8 else 2, device)


def _guess_gemv(
    num_columns: int, inner: int, weights_per_column: int, device: Device
) -> GemmConfig:
    """Return tile sizes with weights in registers: up to 128 elements in each of 256 threads."""
    bk = triton.next_power_of_2(inner)
    most = 256 * 128 // (bk * weights_per_column)
    if not most:
        configs = [GemmConfig("gemv", bn, 1024, 1, 4, 4, 1024) for bn in (8, 4)]
        return device.fitting(configs, partial(_gemv_shared_bytes, weights_per_column))
    bn = min(_floor_power(num_columns // (2 * device.num_sms)), most, 16)
    num_warps = bn * bk * weights_per_column // (32 * 128)
    return GemmConfig("gemv", bn, bk, 1, min(max(num_warps, 1), 8), 1, 0)


def _gemv_shared_bytes(weights_per_column: int, config: GemmConfig) -> int:
    """Return the bytes of weights, x and the norm's weight in flight, in 16 bits."""
    rows = config.bn * weights_per_column + 2
    return (config.num_stages - 1) * rows * config.bk * 2


def _floor_power(number: int) -> int:
    """Return the largest power of two up to `number`, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def multiply(
    kind: str,
    x: Tensor,
    weight: Rows,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the result in x's dtype, or float32 for logits; None if cuBLAS is faster.

    out: memory of the result.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    num_weights, inner = weight.shape
    config = choose(kind, x.shape[0], num_weights, inner, isinstance(weight, Quantized))
    if config is None:
        return None
    if x.dtype == torch.float16:
        config = config._replace(norm_inside=False)  # squares of x may exceed float16
    product = empty_product(kind, x, weight, norm_weight, eps, residual, out)
    launch(product, config)
    return product.out


def empty_product(
    kind: str,
    x: Tensor,
    weight: Rows,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Product:
    """Return the operands with memory for the result, unless `out` is given."""
    swiglu = kind == "swiglu"
    dtype = torch.float32 if kind == "logits" else x.dtype
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0] // (2 if swiglu else 1), dtype=dtype)
    return Product(x, weight, out, norm_weight, eps, residual, swiglu)


def _check_workspace(product: Product, config: GemmConfig, tiles: int) -> None:
    if config.split_k == 1:
        return
    if config.split_k > MAX_SPLIT_K.value:
        raise ValueError(f"split_k: got {config.split_k}, expected at most {MAX_SPLIT_K.value}")
    per_split = product.out.numel() * (2 if product.swiglu else 1) + len(product.x)
    num_sums = config.split_k * per_split
    if num_sums > MAX_PARTIALS or tiles > MAX_TILES:
        raise ValueError(
            f"workspace: got {tiles} tiles and {num_sums} sums, expected at most {MAX_TILES} tiles "
            f"and {MAX_PARTIALS} sums"
        )


def launch(product: Product, config: GemmConfig) -> None:
    """Compute `product.out`; all tensors must be contiguous."""
    x, weight, out, norm_weight, eps, residual, *_ = product
    values, scale = parts(weight)
    num_rows, inner = x.shape
    num_columns = out.shape[1]
    if norm_weight is not None and not config.norm_inside and config.kernel != "gemv":
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    values = as_operand(values)
    tiles = triton.cdiv(num_columns, config.bn)
    flags = {
        "NORM": norm_weight is not None,
        "SWIGLU": product.swiglu,
        "ADD": residual is not None,
        "BN": config.bn,
        "EVEN": inner % config.bk == 0,
        "PREFETCH": config.prefetch,
        "BLOCKS": isinstance(weight, Quantized) and weight.in_blocks,
        "num_warps": config.num_warps,
        **LAUNCH,
    }
    if config.kernel == "gemv":
        gemv_kernel[(tiles,)](
            x, norm_weight, values, scale, residual, out, product.normed, num_columns, inner, eps,
            BK=config.bk, WHOLE=inner <= config.bk, STAGES=config.num_stages, **flags,
        )  # fmt: skip
        return
    _check_workspace(product, config, tiles)
    slices = 1 if config.kernel == "mma" else config.num_warps
    is_ranged = config.kernel == "ranges"
    partials, counters = workspace(x.device) if config.split_k > 1 else (None, None)
    small_m_gemm_kernel[(tiles, config.split_k)](
        x, norm_weight, values, scale, residual, out, partials, counters,
        num_rows, num_columns, inner, inner // slices if is_ranged else 0, eps,
        BM=row_block(num_rows), BK=config.bk // slices, SLICES=slices, RANGED=is_ranged,
        SPLIT=config.split_k > 1,
        WHOLE=triton.cdiv(inner, config.bk) == config.split_k,
        num_stages=config.num_stages, EARLY=values.nbytes <= EARLY, **flags,
    )  # fmt: skip
