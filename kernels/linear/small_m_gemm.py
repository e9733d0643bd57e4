"""Matrix products of up to 64 rows: the weights pass once, and what is around a product is fused.

Such a product takes as long as its weights take to read. How it is cut up is chosen by
`small_m_gemm_table.py`, which `penstock.kernels.bench.linear` measures and writes.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from penstock.kernels.elementwise.triton_norm import rms_norm
from penstock.kernels.linear.small_m_gemm_table import FP8_TABLE, TABLE
from penstock.kernels.linear.triton_gemv import gemv
from penstock.kernels.linear.triton_small_m_gemm import MAX_SPLIT_K, skinny
from penstock.kernels.quantize.quantize import Matrix, Quantized, parts
from penstock.kernels.triton_pdl import LAUNCH

MAX_ROWS = 64
MAX_PARTIALS = 8 << 20
"""float32 sums that all splits of a product may write together (32 MB)"""
MAX_TILES = 8192
"""of a product with split-K"""
NUM_SMS = 132
"""of an H100 or H200"""
EARLY = 24 << 20
"""bytes of weights up to which the next kernel may start beside a product of several rows"""


class Config(NamedTuple):
    """How a product is cut up."""

    kernel: str
    """mma: tensor cores, warps side by side; slices: tensor cores, warps divide the inner
    dimension; gemv: for one row"""
    bn: int
    """columns of the result per program"""
    bk: int
    """elements of the inner dimension per iteration, of all warps together"""
    split_k: int
    """ranges of the inner dimension, at most MAX_SPLIT_K"""
    num_warps: int
    num_stages: int
    prefetch: int
    """not where a program's share of the inner dimension is one tile, which is read early anyway:
    elements of each weight row fetched into the L2 before the kernels in front have ended, a
    power of two of 64 or more, or 0"""
    norm_inside: bool = False
    """a norm is part of the product and not a kernel in front; gemv has it inside in any case"""


class Product(NamedTuple):
    """`residual + act(rms_norm(x) @ weight.T)`, each but the product itself may be missing."""

    x: Tensor
    """[num_rows, K], num_rows <= MAX_ROWS"""
    weight: Matrix
    """[N, K], with swiglu [2 * N, K]: gate, then up"""
    out: Tensor
    """[num_rows, N]"""
    norm_weight: Tensor | None = None
    """[K]"""
    eps: float = 0.0
    residual: Tensor | None = None
    """[num_rows, N]"""
    swiglu: bool = False


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and the tiles' counters, zero between products; products run in one stream.

    Raises RuntimeError while a graph is captured, whose memory pool it would become part of.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call workspace(device), or a product, before a graph is captured")
    partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
    return partials, torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def row_block(num_rows: int) -> int:
    """Rows of a tile of tensor cores: 16, 32 or 64."""
    return max(16, 1 << (num_rows - 1).bit_length())


def choose(
    kind: str, num_rows: int, num_weights: int, inner: int, is_fp8: bool = False
) -> Config | None:
    """How to multiply with a weight [num_weights, inner], or None: cuBLAS is faster.

    What was not measured is for cuBLAS, but for one row, where the guess is safe. Weights of 8 bits
    that were not measured are cut up as others are, but with the norm in front: Triton does not
    read x ahead where it is multiplied with numbers of 8 and of 16 bits.
    kind: add (also without a residual), norm, swiglu or logits (a norm, float32 out).
    """
    if not 1 <= num_rows <= MAX_ROWS or inner % 16:
        return None
    rows = 1 if num_rows == 1 else row_block(num_rows)
    key = (kind, num_weights, inner, rows)
    table = FP8_TABLE if is_fp8 and key in FP8_TABLE else TABLE
    if key not in table and rows == 1:
        weights_per_column = 2 if kind == "swiglu" else 1
        return _guess_gemv(num_weights // weights_per_column, inner, weights_per_column)
    entry = table.get(key)
    if entry is None:
        return None
    config = Config(*entry)
    return config._replace(norm_inside=False) if is_fp8 else config


def _guess_gemv(num_columns: int, inner: int, weights_per_column: int) -> Config:
    """Weights in registers: at most 128 elements per thread, of 256 threads."""
    bk = triton.next_power_of_2(inner)
    most = 256 * 128 // (bk * weights_per_column)
    if not most:
        return Config("gemv", 8, 1024, 1, 4, 4, 1024)
    bn = min(_floor_power(num_columns // (2 * NUM_SMS)), most, 16)
    num_warps = bn * bk * weights_per_column // (32 * 128)
    return Config("gemv", bn, bk, 1, min(max(num_warps, 1), 8), 1, 0)


def _floor_power(number: int) -> int:
    """The largest power of two of at most `number`, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def multiply(
    kind: str,
    x: Tensor,
    weight: Matrix,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """The result, bfloat16 or for logits float32; None where cuBLAS should do it.

    out: where it goes.
    """
    if x.dtype != torch.bfloat16:
        return None
    num_weights, inner = weight.shape
    config = choose(kind, x.shape[0], num_weights, inner, isinstance(weight, Quantized))
    if config is None:
        return None
    product = empty_product(kind, x, weight, norm_weight, eps, residual, out)
    launch(product, config)
    return product.out


def empty_product(
    kind: str,
    x: Tensor,
    weight: Matrix,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Product:
    """With memory for the result, unless `out` is that."""
    swiglu = kind == "swiglu"
    dtype = torch.float32 if kind == "logits" else x.dtype
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0] // (2 if swiglu else 1), dtype=dtype)
    return Product(x, weight, out, norm_weight, eps, residual, swiglu)


def _check_workspace(product: Product, config: Config, tiles: int) -> None:
    if config.split_k == 1:
        return
    if config.split_k > MAX_SPLIT_K.value:
        raise ValueError(f"split_k is {config.split_k}; at most {MAX_SPLIT_K.value} is possible")
    per_split = product.out.numel() * (2 if product.swiglu else 1) + len(product.x)
    num_sums = config.split_k * per_split
    if num_sums > MAX_PARTIALS or tiles > MAX_TILES:
        raise ValueError(
            f"{tiles} tiles and {num_sums} sums; at most {MAX_TILES} tiles and {MAX_PARTIALS} "
            "sums fit"
        )


def launch(product: Product, config: Config) -> None:
    """Writes `product.out`; all tensors are contiguous."""
    x, weight, out, norm_weight, eps, residual, _ = product
    values, scale = parts(weight)
    num_rows, inner = x.shape
    num_columns = out.shape[1]
    if norm_weight is not None and not config.norm_inside and config.kernel != "gemv":
        x, norm_weight = rms_norm(x, norm_weight, eps), None
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
        gemv[(tiles,)](
            x, norm_weight, values, scale, residual, out, num_columns, inner, eps,
            BK=config.bk, WHOLE=inner <= config.bk, STAGES=config.num_stages, **flags,
        )  # fmt: skip
        return
    _check_workspace(product, config, tiles)
    slices = config.num_warps if config.kernel == "slices" else 1
    partials, counters = workspace(x.device) if config.split_k > 1 else (None, None)
    skinny[(tiles, config.split_k)](
        x, norm_weight, values, scale, residual, out, partials, counters,
        num_rows, num_columns, inner, eps,
        BM=row_block(num_rows), BK=config.bk // slices, SLICES=slices, SPLIT=config.split_k > 1,
        WHOLE=triton.cdiv(inner, config.bk) == config.split_k, num_stages=config.num_stages,
        EARLY=values.nbytes <= EARLY, **flags,
    )  # fmt: skip
