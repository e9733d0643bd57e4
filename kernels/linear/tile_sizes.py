"""Tile sizes of products of up to 64 rows: limits, candidates for measurement, and costs.

The cost is an estimate for GPUs and products that were not measured. Reading the weights takes
nearly all of the time. The cost is therefore the number of bytes that the busiest SM reads. It is
higher if too few bytes are in flight to use the memory's bandwidth.
"""

import itertools
from functools import cache
from typing import NamedTuple

from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.sampling import shard_size

MAX_ROWS = 64
MAX_PARTIALS = 8 << 20  # float32 sums of all splits of a product (32 MB)


class GemmConfig(NamedTuple):
    """Tile sizes of a product: an entry of a tuning table."""

    # mma: tensor cores, the warps divide the columns; slices: tensor cores, the warps divide each
    # bk elements of the inner dimension; ranges: four warps divide the whole inner dimension, a
    # multiple of bk; gemv: only for one row
    kernel: str
    bn: int  # columns of the result per program
    bk: int  # elements of the inner dimension per iteration of all warps
    split_k: int  # number of ranges of the inner dimension, up to MAX_SPLIT_K
    num_warps: int
    num_stages: int
    # elements of each weight row, in equal shares of its ranges, that are fetched into the L2
    # before the previous kernels end: 0, or a power of two of at least 64; a program with one tile
    # reads the tile early
    prefetch: int
    # True if the product computes the norm, as gemv always does; otherwise a separate kernel does
    norm_inside: bool = False


# (kind, rows of the weight, inner dimension, maximum rows of x) → config; None: cuBLAS is faster
Table = dict[tuple[str, int, int, int], GemmConfig | None]


def row_block(num_rows: int) -> int:
    """Return the number of rows of a tensor core tile: 16, 32 or 64."""
    return max(16, 1 << (num_rows - 1).bit_length())


# hidden size, intermediate size, heads and key-value heads of the published Qwen3 models
PUBLISHED = {
    "0.6B": (1024, 3072, 16, 8),
    "1.7B": (2048, 6144, 16, 8),
    "4B": (2560, 9728, 32, 8),
    "8B": (4096, 12288, 32, 8),
    "14B": (5120, 17408, 40, 8),
    "32B": (5120, 25600, 64, 8),
}
# the published sizes, and parts of one rank, such as "8B/2" for 8B at TP 2
SIZES = PUBLISHED | {
    f"{name}/{tp}": (hidden, intermediate // tp, heads // tp, max(1, kv_heads // tp))
    for name, (hidden, intermediate, heads, kv_heads) in PUBLISHED.items()
    for tp in (2, 4, 8)
    if heads % tp == 0
}
HEAD_DIM = 128
VOCAB_SIZE = 151936
RESERVED_BYTES = 7 << 10  # bytes of an SM's shared memory that tiles leave free


class GemmShape(NamedTuple):
    """Weight [num_weights, inner]."""

    kind: str
    num_weights: int
    inner: int

    @property
    def weights_per_column(self) -> int:
        return 2 if self.kind == "swiglu" else 1

    @property
    def num_columns(self) -> int:
        return self.num_weights // self.weights_per_column


def shapes(size: str) -> list[GemmShape]:
    """Return the shapes of the four products of a layer, and of the logits."""
    hidden, intermediate, heads, kv_heads = SIZES[size]
    tp = int(size.partition("/")[2] or 1)
    vocab_size = VOCAB_SIZE if tp == 1 else shard_size(VOCAB_SIZE, tp)
    return [
        GemmShape("norm", (heads + 2 * kv_heads) * HEAD_DIM, hidden),
        GemmShape("add", hidden, heads * HEAD_DIM),
        GemmShape("swiglu", 2 * intermediate, hidden),
        GemmShape("add", hidden, intermediate),
        GemmShape("logits", vocab_size, hidden),
    ]


def candidates(
    shape: GemmShape, rows: int, weight_bytes: int = 2, device: Device | None = None
) -> list[GemmConfig]:
    """Return tile sizes that fit and have enough programs for all SMs and enough bytes in flight.

    device: default `this_device`.
    """
    device = device or this_device()
    ways = [
        config
        for config in _tensor_cores(shape, rows)
        if _fits(shape, rows, config, weight_bytes, device)
    ]
    outside = [config for config in ways if config.num_warps > 2]
    if weight_bytes == 1:  # separate norm: see `penstock.kernels.linear.small_m_gemm.choose`
        return (_gemvs(shape, 256) + _narrow_gemvs(shape) if rows == 1 else []) + outside
    if rows == 1:
        return _gemvs(shape, 128) + [config for config in ways if config.kernel == "slices"]
    return outside + [
        config._replace(norm_inside=True) for config in ways if _may_norm(shape, config)
    ]


def _may_norm(shape: GemmShape, config: GemmConfig) -> bool:
    """Return True if the kernel can compute the norm, because Triton prefetches its weight."""
    one_tile, is_ranged = config.num_stages == 1, config.kernel == "ranges"
    if shape.kind == "add" or (config.bk == 32 * config.num_warps and not one_tile):
        return False  # Triton does not prefetch if each thread loads one element of 2 bytes
    if config.split_k == 1:
        return config.prefetch > 0 or is_ranged or one_tile or shape.kind == "logits"
    return config.split_k in (2, 4) and config.num_stages == 3 and config.prefetch > 0


def _tensor_cores(shape: GemmShape, rows: int) -> list[GemmConfig]:
    splits = (1,) if shape.kind == "logits" else (1, 2, 3, 4, 8)
    kernels = [("slices", 256, 4), ("slices", 512, 4), ("slices", 512, 8)] if rows <= 16 else []
    kernels += [("mma", 128, 4), ("mma", 256, 4)]
    if rows <= 32:
        kernels += [("mma", 128, 2)]  # for a fused norm, which each warp computes for all of x
    if rows > 16:
        kernels += [("mma", 64, 4), ("mma", 128, 8)]
    return [*_whole(shape, rows), *_ranges(shape, rows)] + [
        GemmConfig(kernel, bn, bk, split_k, num_warps, num_stages, prefetch)
        for (kernel, bk, num_warps), bn, split_k, (num_stages, prefetch) in itertools.product(
            kernels, (8, 16, 32, 64, 128), splits, ((3, 0), (3, 512), (5, 512))
        )
    ]


def _whole(shape: GemmShape, rows: int) -> list[GemmConfig]:
    """Return tile sizes with one tile for each program."""
    kernels = [("slices", 4), ("slices", 8)] if rows <= 16 else [("mma", 4), ("mma", 8)]
    configs = []
    for (kernel, num_warps), bn, bk in itertools.product(
        kernels, (8, 16, 32, 64), (256, 512, 1024, 2048)
    ):
        registers = (row_block(rows) + bn * shape.weights_per_column) * bk // (64 * num_warps)
        split_k = shape.inner // bk
        if registers <= 144 and 1 <= split_k <= 8 and (split_k == 1 or shape.kind != "logits"):
            configs.append(GemmConfig(kernel, bn, bk, split_k, num_warps, 1, 0))
    return configs


def _ranges(shape: GemmShape, rows: int) -> list[GemmConfig]:
    """Return tile sizes with a warp for each range of the inner dimension."""
    if rows > 16 or shape.kind == "logits":
        return []
    sizes = itertools.product((8, 16, 32), (3, 4, 5))
    return [GemmConfig("ranges", bn, 256, 1, 4, num_stages, 0) for bn, num_stages in sizes]


def _fits(
    shape: GemmShape, rows: int, config: GemmConfig, weight_bytes: int, device: Device
) -> bool:
    programs = -(-shape.num_columns // config.bn) * config.split_k
    if shape.inner % config.bk or config.bk * config.split_k > shape.inner:
        return False
    num_sums = rows * (shape.num_weights + 1) * config.split_k
    if config.split_k > 1 and num_sums > MAX_PARTIALS:
        return False
    if not 100 <= programs <= max(600, shape.num_columns // 32):
        return False
    # A program with a short share of the inner dimension needs no deep pipeline. A program of few
    # columns reads more of x than of the weights.
    steps = shape.inner // config.bk // config.split_k
    if (config.num_stages == 5 and steps < 4) or config.bn * 4 < row_block(rows):
        return False
    weights = config.bn * shape.weights_per_column * weight_bytes
    tile = config.bk * (2 * row_block(rows) + weights)
    shared_bytes = device.shared_bytes - RESERVED_BYTES
    # At most this many programs have their tiles on one SM at once.
    resident = min(-(-programs // device.num_sms), shared_bytes // (tile * config.num_stages))
    in_flight = resident * config.bk * weights * min(config.num_stages - 1, steps)
    share_of_sm = shape.num_weights * shape.inner * weight_bytes // device.num_sms
    return resident > 0 and in_flight >= min(24 << 10, share_of_sm // 2)


def _gemvs(shape: GemmShape, most: int) -> list[GemmConfig]:
    """Return tile sizes for one row; most: maximum elements per thread."""
    whole = 1 << (shape.inner - 1).bit_length()
    configs = []
    for bn, num_warps in itertools.product((1, 2, 4, 8, 16), (2, 4, 8)):
        per_thread = bn * whole * shape.weights_per_column // (32 * num_warps)
        if 16 <= per_thread <= most and whole >= num_warps * 256:
            configs.append(GemmConfig("gemv", bn, whole, 1, num_warps, 1, 0))
    for bn, bk, num_stages, prefetch in itertools.product((4, 8), (512, 1024), (3, 5), (0, 512)):
        if shape.inner > bk:
            configs.append(GemmConfig("gemv", bn, bk, 1, 4, num_stages, prefetch))
    return configs


def _narrow_gemvs(shape: GemmShape) -> list[GemmConfig]:
    """Return more tile sizes for one row and 8 bits, whose conversion takes most instructions."""
    sizes = itertools.product((4, 8, 16), ((256, 1), (256, 2), (512, 2), (2048, 4)), (3, 4, 6))
    return [
        GemmConfig("gemv", bn, bk, 1, num_warps, num_stages, prefetch)
        for bn, (bk, num_warps), num_stages in sizes
        for prefetch in (0, 512)
        if shape.inner > bk and bn * bk * shape.weights_per_column <= 64 * 32 * num_warps
    ]


# bytes in flight of an SM that use the full bandwidth: latency times the SM's share of it
IN_FLIGHT = 40 << 10
L2_SPEED = 3  # bandwidth of the L2, relative to the memory's
SPLIT_BYTES = 24 << 10  # bytes that an SM could read while the last program adds the splits
# bytes of weights per SM; up to this number one fused launch beats cuBLAS at 17 to 64 rows
SMALL_BYTES = 128 << 10
# maximum sums of a thread, by bytes of a weight's element; widened weights also need registers
MAX_SUMS = {2: 128, 1: 64}


@cache
def cheapest(shape: GemmShape, rows: int, weight_bytes: int, device: Device) -> GemmConfig | None:
    """Return the tile sizes of the least cost for a block of rows, or None to use cuBLAS.

    rows: 16, 32 or 64. weight_bytes: bytes of an element. In the measured tables, cuBLAS is faster
    with 17 rows or more. Exceptions are small weights, swiglu (one launch replaces three) and
    logits in float32. Only tables choose kernels with ranges.
    """
    total = shape.num_weights * shape.inner * weight_bytes
    is_fused = shape.kind in ("swiglu", "logits") and weight_bytes == 2
    widened = weight_bytes == 1 and not device.has_fp8
    if rows > 16 and total > SMALL_BYTES * device.num_sms and not is_fused and not widened:
        return None
    max_sums = MAX_SUMS[weight_bytes]
    if device.capability[0] == 10:  # this GPU spills registers with as many sums as other GPUs hold
        max_sums = min(max_sums, 64)
    ways = [
        config
        for config in candidates(shape, rows, weight_bytes, device)
        if not config.norm_inside
        and config.kernel != "ranges"
        and _sums(shape, rows, config) <= max_sums
    ]
    return min(
        ways, key=lambda config: cost(shape, rows, weight_bytes, config, device), default=None
    )


def _sums(shape: GemmShape, rows: int, config: GemmConfig) -> int:
    """Return the number of sums that each thread holds in registers."""
    warps = config.num_warps if config.kernel == "mma" else 1
    return row_block(rows) * config.bn * shape.weights_per_column // (32 * warps)


def cost(
    shape: GemmShape, rows: int, weight_bytes: int, config: GemmConfig, device: Device
) -> float:
    """Return the cost of a product: the bytes that an SM reads from memory."""
    programs = -(-shape.num_columns // config.bn) * config.split_k
    per_sm = -(-programs // device.num_sms)
    share = shape.inner / config.split_k
    weights = config.bn * shape.weights_per_column * weight_bytes
    read = share * (weights + 2 * row_block(rows) / L2_SPEED)
    tile = config.bk * (2 * row_block(rows) + weights)
    resident = (device.shared_bytes - RESERVED_BYTES) // (tile * max(1, config.num_stages - 1))
    ahead = config.bk * max(1, min(config.num_stages - 1, share // config.bk))
    in_flight = min(per_sm, max(resident, 1)) * ahead * weights
    total = per_sm * read * max(1.0, IN_FLIGHT / in_flight)
    if config.split_k > 1:
        sums = 2 * 4 * config.split_k * rows * shape.num_weights / (L2_SPEED * device.num_sms)
        total += sums + SPLIT_BYTES
    return total
