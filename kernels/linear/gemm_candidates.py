"""Products of Qwen3's layers, and the tile sizes worth measuring for each."""

import itertools
from typing import NamedTuple

from penstock.kernels.device import Device, this_device
from penstock.kernels.layouts.sampling import shard_size
from penstock.kernels.linear.gemm_config import MAX_PARTIALS, GemmConfig, row_block

# hidden size, intermediate size, heads, key-value heads of the published Qwen3
PUBLISHED = {
    "0.6B": (1024, 3072, 16, 8),
    "1.7B": (2048, 6144, 16, 8),
    "4B": (2560, 9728, 32, 8),
    "8B": (4096, 12288, 32, 8),
    "14B": (5120, 17408, 40, 8),
    "32B": (5120, 25600, 64, 8),
}
# the published sizes, and ranks' parts of them, such as "8B/2" for 8B at TP 2
SIZES = PUBLISHED | {
    f"{name}/{tp}": (hidden, intermediate // tp, heads // tp, max(1, kv_heads // tp))
    for name, (hidden, intermediate, heads, kv_heads) in PUBLISHED.items()
    for tp in (2, 4, 8)
    if heads % tp == 0
}
HEAD_DIM = 128
VOCAB_SIZE = 151936
RESERVED_BYTES = 7 << 10  # shared memory of an SM that tiles leave


class GemmShape(NamedTuple):
    """A weight [num_weights, inner]."""

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
    """Return the four products of a layer, and the logits."""
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
    """Return tile sizes with enough programs for all SMs and enough bytes in flight that fit.

    device: default `this_device`.
    """
    device = device or this_device()
    ways = [
        one for one in _tensor_cores(shape, rows) if _fits(shape, rows, one, weight_bytes, device)
    ]
    outside = [one for one in ways if one.num_warps > 2]
    if weight_bytes == 1:  # a norm is outside: see `penstock.kernels.linear.small_m_gemm.choose`
        return (_gemvs(shape, 256) if rows == 1 else []) + outside
    if rows == 1:
        return _gemvs(shape, 128) + [one for one in ways if one.kernel == "slices"]
    return outside + [one._replace(norm_inside=True) for one in ways if _may_norm(shape, one)]


def _may_norm(shape: GemmShape, config: GemmConfig) -> bool:
    """Return True if the norm may be inside, where Triton reads its weight ahead."""
    one_tile, is_ranged = config.num_stages == 1, config.kernel == "ranges"
    if shape.kind == "add" or (config.bk == 32 * config.num_warps and not one_tile):
        return False  # at one element a thread, of 2 bytes, Triton does not read ahead
    if config.split_k == 1:
        return config.prefetch > 0 or is_ranged or one_tile or shape.kind == "logits"
    return config.split_k in (2, 4) and config.num_stages == 3 and config.prefetch > 0


def _tensor_cores(shape: GemmShape, rows: int) -> list[GemmConfig]:
    splits = (1,) if shape.kind == "logits" else (1, 2, 3, 4, 8)
    kernels = [("slices", 256, 4), ("slices", 512, 4), ("slices", 512, 8)] if rows <= 16 else []
    kernels += [("mma", 128, 4), ("mma", 256, 4)]
    if rows <= 32:
        kernels += [("mma", 128, 2)]  # for a norm inside, which each warp computes for all of x
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
    # A program with a short share of the inner dimension needs no deep pipeline, and a program of
    # few columns reads more of x than of weights.
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
    """Return tile sizes for one row; most: maximum elements of a thread."""
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
