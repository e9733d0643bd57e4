"""Estimated cost of tile sizes, for GPUs and products that were not measured.

Reading the weights takes nearly all of the time, so that a cost is the bytes that the busiest SM
reads, raised where too few bytes are in flight to use the memory's bandwidth.
"""

from functools import cache

from penstock.kernels.device import Device
from penstock.kernels.linear.gemm_candidates import (
    RESERVED_BYTES,
    GemmShape,
    candidates,
)
from penstock.kernels.linear.gemm_config import GemmConfig, row_block

# bytes of an SM in flight that use the bandwidth: latency times an SM's share of it
IN_FLIGHT = 40 << 10
L2_SPEED = 3  # bandwidth of the L2 in units of the memory's
SPLIT_BYTES = 24 << 10  # bytes that an SM could read while the last program adds up the splits
# bytes of weights for each SM up to which one fused launch beats cuBLAS with 17 to 64 rows
SMALL_BYTES = 128 << 10
# sums of a thread, by the bytes of a weight; widened weights need registers too
MAX_SUMS = {2: 128, 1: 64}


@cache
def cheapest(shape: GemmShape, rows: int, weight_bytes: int, device: Device) -> GemmConfig | None:
    """Return the tile sizes of the least cost for a block of rows, or None for cuBLAS.

    rows: 16, 32 or 64. weight_bytes: of an element. In the measured tables, cuBLAS is faster with
    17 rows or more, unless the weight is small, or one launch replaces three (swiglu), or logits
    need float32. Ranges are chosen only by tables.
    """
    total = shape.num_weights * shape.inner * weight_bytes
    is_fused = shape.kind in ("swiglu", "logits") and weight_bytes == 2
    widened = weight_bytes == 1 and not device.has_fp8
    if rows > 16 and total > SMALL_BYTES * device.num_sms and not is_fused and not widened:
        return None
    max_sums = MAX_SUMS[weight_bytes]
    if device.capability[0] == 10:  # spills registers with as many sums as others hold
        max_sums = min(max_sums, 64)
    ways = [
        one
        for one in candidates(shape, rows, weight_bytes, device)
        if not one.norm_inside and one.kernel != "ranges" and _sums(shape, rows, one) <= max_sums
    ]
    return min(ways, key=lambda one: cost(shape, rows, weight_bytes, one, device), default=None)


def _sums(shape: GemmShape, rows: int, config: GemmConfig) -> int:
    """Return the sums that each thread has in registers."""
    warps = config.num_warps if config.kernel == "mma" else 1
    return row_block(rows) * config.bn * shape.weights_per_column // (32 * warps)


def cost(
    shape: GemmShape, rows: int, weight_bytes: int, config: GemmConfig, device: Device
) -> float:
    """Return the cost of a product, in bytes that an SM reads from memory."""
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
