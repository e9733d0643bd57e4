"""The ends of products: scales, norm, activation and residual, and the sums of split-K."""

import triton
import triton.language as tl

MAX_SPLIT_K = tl.constexpr(8)


@triton.jit
def load_residual(residual, at, exists, ADD: tl.constexpr):
    """Return the residual in float32, or 0 without ADD."""
    return tl.load(residual + at, exists, 0.0).to(tl.float32) if ADD else 0.0


@triton.jit
def norm_factor(squares, K, eps, NORM: tl.constexpr):
    """Return the norm's factor of a row from the sum of its squares, 1 without NORM."""
    return tl.rsqrt(squares / K + eps) if NORM else 1.0


@triton.jit
def load_scales(scale, column, N, SWIGLU: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the scales of the columns of gate (or the only product) and of up."""
    if scale is None or BLOCKS:
        return 1.0, 1.0
    else:
        gate = tl.load(scale + column, column < N, 0.0)
        return gate, tl.load(scale + N + column, column < N, 0.0) if SWIGLU else gate


@triton.jit
def store_result(
    acc, acc_up, norm, scale, up_scale, more, out, at, exists, SWIGLU: tl.constexpr
):  # fmt: skip
    """Store `more + act(norm * scale * acc)`; SWIGLU: acc is the gate's sums, acc_up up's."""
    acc = acc * norm * scale
    if SWIGLU:
        acc = acc / (1 + tl.exp(-acc)) * (acc_up * norm * up_scale)
    acc += more
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)


@triton.jit
def _total(partials, at, exists, size):
    """Return the sum over all splits, in their order: always the same bits."""
    total = tl.load(partials + at, exists, 0.0, cache_modifier=".cg")
    for split in tl.static_range(1, MAX_SPLIT_K):  # unrolled: all loads are in flight at once
        place = split * size + at
        there = exists & (place < tl.num_programs(1) * size)
        total += tl.load(partials + place, there, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def merge(
    acc, acc_up, squares, scale, up_scale, partials, counters, residual, out,
    at, row, exists, size, num_rows, K, eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Add the sums of all splits, in the last program of a tile."""
    split = tl.program_id(1)
    ups = partials + tl.num_programs(1) * size
    row_squares = ups + tl.num_programs(1) * size if SWIGLU else ups
    tl.store(partials + split * size + at, acc, exists)
    if SWIGLU:
        tl.store(ups + split * size + at, acc_up, exists)
    if NORM:  # the tiles of other columns write the same bits to the same place
        tl.store(row_squares + split * num_rows + row, squares, row < num_rows)
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    counter = counters + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        more = load_residual(residual, at, exists, ADD)
        acc = _total(partials, at, exists, size)
        if SWIGLU:
            acc_up = _total(ups, at, exists, size)
        if NORM:
            squares = _total(row_squares, row, row < num_rows, num_rows)
        norm = norm_factor(squares, K, eps, NORM)
        store_result(acc, acc_up, norm, scale, up_scale, more, out, at, exists, SWIGLU)
        tl.store(counter, 0)
