"""The kernels of `penstock.kernels.gpu.skinny`.

Each program reads a tile of weight rows with many bytes in flight, and x, small, comes from the L2.
Where there are too few weight rows for all SMs, the inner dimension is split as well: split-K, with
the last program to arrive adding up the partial sums, as in Stream-K (Osama et al. 2023,
https://arxiv.org/abs/2301.03598). With one row a norm in front costs no kernel:
`rms_norm(x) @ w.T = (x * norm_weight) @ w.T / rms(x)`, and the root mean square is known when the
inner dimension has been read. With more rows every program would norm all of x again, which takes
longer than a kernel of its own.
"""

import triton
import triton.language as tl

from penstock.kernels.gpu.pdl import PDL, launch_dependents, wait

LINE = tl.constexpr(128)
"""bytes that one prefetch brings into the L2"""
MAX_SPLIT_K = tl.constexpr(8)


@triton.jit
def _prefetch(weight, rows, begin, end, K, COUNT: tl.constexpr):
    """`COUNT` elements of each row from `begin` on come into the L2."""
    if PDL:
        PER_LINE: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        k = tl.minimum(begin + tl.arange(0, COUNT // PER_LINE) * PER_LINE, end - 1)
        address = (weight + rows[:, None] * K + k[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _indices(rows, BK: tl.constexpr, SLICES: tl.constexpr):
    """[.., rows, 1], [.., 1, BK]: indices of a tile, in front of them one of a slice if SLICES."""
    k = tl.arange(0, BK)
    if SLICES == 1:
        return rows[:, None], k[None, :]
    else:
        slices = tl.arange(0, SLICES)
        return rows[None, :, None], slices[:, None, None] * BK + k[None, None, :]


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, inside, 0.0)


@triton.jit
def _dot(x, weight, acc, SLICES: tl.constexpr):
    weight = tl.permute(weight, (1, 0)) if SLICES == 1 else tl.permute(weight, (0, 2, 1))
    return tl.dot(x, weight, acc, input_precision="ieee")


@triton.jit
def _whole_products(
    x, weight, rows, num_rows, begin, end, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """As `_products` for one tile, whose weights are read before the kernels in front end."""
    m, k = _indices(tl.arange(0, BM), BK, SLICES)
    n, _ = _indices(rows, BK, SLICES)
    inside = begin + k < end
    tile = _load(weight + n * K + begin + k, inside, EVEN)
    up = tile
    if SWIGLU:
        up = _load(weight + (n + N) * K + begin + k, inside, EVEN)
    wait()
    x_at = x + m * K + begin + k
    x_tile = tl.load(x_at, m < num_rows if EVEN else (m < num_rows) & inside, 0.0)
    zeros = tl.zeros((BM, BN) if SLICES == 1 else (SLICES, BM, BN), tl.float32)
    acc = _dot(x_tile, tile, zeros, SLICES)
    acc_up = _dot(x_tile, up, zeros, SLICES) if SWIGLU else zeros
    if SLICES > 1:
        acc, acc_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
    return acc, acc_up


@triton.jit
def _products(
    x, weight, rows, num_rows, begin, end, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums over [begin, end) of gate (or the only product) and of up."""
    wait()
    m, k = _indices(tl.arange(0, BM), BK, SLICES)
    n, _ = _indices(rows, BK, SLICES)
    x_at = x + m * K + k
    weight_at = weight + n * K + k
    up_at = weight + (n + N) * K + k
    acc = tl.zeros((BM, BN) if SLICES == 1 else (SLICES, BM, BN), tl.float32)
    acc_up = acc
    for first in tl.range(begin, end, BK * SLICES):
        inside = first + k < end
        x_tile = tl.load(x_at + first, m < num_rows if EVEN else (m < num_rows) & inside, 0.0)
        acc = _dot(x_tile, _load(weight_at + first, inside, EVEN), acc, SLICES)
        if SWIGLU:
            up = _load(up_at + first, inside, EVEN)
            acc_up = _dot(x_tile, up, acc_up, SLICES)
    if SLICES > 1:
        acc, acc_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
    return acc, acc_up


@triton.jit
def _residual(residual, at, exists, ADD: tl.constexpr):
    return tl.load(residual + at, exists, 0.0).to(tl.float32) if ADD else 0.0


@triton.jit
def _store(acc, acc_up, more, out, at, exists, SWIGLU: tl.constexpr):
    if SWIGLU:
        acc = acc / (1 + tl.exp(-acc)) * acc_up
    acc += more
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)


@triton.jit
def _total(partials, at, exists, size):
    """The sum over all splits, in their order: always the same bits."""
    total = tl.load(partials + at, exists, 0.0, cache_modifier=".cg")
    for split in tl.static_range(1, MAX_SPLIT_K):  # unrolled: all loads are in flight at once
        place = split * size + at
        there = exists & (place < tl.num_programs(1) * size)
        total += tl.load(partials + place, there, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def _merge(
    acc, acc_up, partials, counters, residual, out, at, exists, size,
    ADD: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """The last program of a tile adds up all splits' sums."""
    ups = partials + tl.num_programs(1) * size
    tl.store(partials + tl.program_id(1) * size + at, acc, exists)
    if SWIGLU:
        tl.store(ups + tl.program_id(1) * size + at, acc_up, exists)
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    counter = counters + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        more = _residual(residual, at, exists, ADD)
        acc = _total(partials, at, exists, size)
        if SWIGLU:
            acc_up = _total(ups, at, exists, size)
        _store(acc, acc_up, more, out, at, exists, SWIGLU)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_rows"])
def skinny(
    x, weight, residual, out, partials, counters, num_rows, N, K,
    SWIGLU: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program: BN columns of out, over one range of the inner dimension.

    SPLIT: of several ranges, at most MAX_SPLIT_K; their number is that of programs on axis 1.
    EVEN: BK * SLICES divides K. WHOLE: a range is one tile. SLICES: warps between which BK * SLICES
    elements are divided, each with all rows and columns, since a tile of few rows and columns keeps
    but one warp busy. EARLY: the next kernel may start beside this one. Where a product takes long,
    its programs would get the places that are free and not those that keep all SMs equally busy.
    """
    if EARLY:
        launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1).to(tl.int64)
    share = tl.cdiv(tl.cdiv(K, BK * SLICES), tl.num_programs(1)) * BK * SLICES
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, K)
    if PREFETCH:
        _prefetch(weight, rows, begin, end, K, PREFETCH)
        if SWIGLU:
            _prefetch(weight, rows + N, begin, end, K, PREFETCH)
    row = tl.arange(0, BM)[:, None]
    exists = (row < num_rows) & (column < N)[None, :]
    at = row.to(tl.int64) * N + column[None, :]
    if WHOLE:
        acc, acc_up = _whole_products(
            x, weight, rows, num_rows, begin, end, N, K, SWIGLU, BM, BN, BK, SLICES, EVEN
        )
    else:
        acc, acc_up = _products(
            x, weight, rows, num_rows, begin, end, N, K, SWIGLU, BM, BN, BK, SLICES, EVEN
        )
    if SPLIT:
        size = num_rows.to(tl.int64) * N
        _merge(
            acc, acc_up, partials, counters, residual, out, at, exists, size, ADD, SWIGLU
        )  # fmt: skip
    else:
        more = _residual(residual, at, exists, ADD)
        _store(acc, acc_up, more, out, at, exists, SWIGLU)


@triton.jit
def _row(x, norm_weight, k, inside, NORM: tl.constexpr, EVEN: tl.constexpr):
    row = _load(x + k, inside, EVEN).to(tl.float32)
    squares = row * row
    if NORM:
        row *= _load(norm_weight + k, inside, EVEN).to(tl.float32)
    return row, squares


@triton.jit
def _row_products(
    x, norm_weight, weight, rows, N, K,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Unreduced sums of gate (or the only product) and up [BN, BK] and of the squares of x [BK]."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = acc
    squares = tl.zeros((BK,), tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        inside = first + k < K
        row, more = _row(x, norm_weight, first + k, inside, NORM, EVEN)
        squares += more
        at = weight + rows[:, None] * K + (first + k)[None, :]
        acc += _load(at, inside[None, :], EVEN).to(tl.float32) * row[None, :]
        if SWIGLU:
            at = weight + (rows + N)[:, None] * K + (first + k)[None, :]
            acc_up += _load(at, inside[None, :], EVEN).to(tl.float32) * row[None, :]
    return acc, acc_up, squares


@triton.jit
def gemv(
    x, norm_weight, weight, residual, out, N, K, eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """One row of x, without tensor cores. WHOLE: BK >= K, all of a program's loads are in flight.

    They are then, but for x, sent before the kernels in front have ended.
    """
    launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1).to(tl.int64)
    if WHOLE:
        k = tl.arange(0, BK)
        inside = k < K
        tile = _load(weight + rows[:, None] * K + k[None, :], inside[None, :], EVEN)
        up = tile
        if SWIGLU:
            up = _load(weight + (rows + N)[:, None] * K + k[None, :], inside[None, :], EVEN)
        scale = 1.0
        if NORM:
            scale = _load(norm_weight + k, inside, EVEN).to(tl.float32)
        wait()
        row = _load(x + k, inside, EVEN).to(tl.float32)
        more = _residual(residual, column, column < N, ADD)
        squares = row * row
        row *= scale
        acc, acc_up = tile.to(tl.float32) * row[None, :], up.to(tl.float32) * row[None, :]
    else:
        if PREFETCH:
            _prefetch(weight, rows, 0, K, K, PREFETCH)
            if SWIGLU:
                _prefetch(weight, rows + N, 0, K, K, PREFETCH)
        wait()
        more = _residual(residual, column, column < N, ADD)
        acc, acc_up, squares = _row_products(
            x, norm_weight, weight, rows, N, K, NORM, SWIGLU, BN, BK, STAGES, EVEN
        )
    acc, acc_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        acc *= scale
        acc_up *= scale
    _store(acc, acc_up, more, out, column, column < N, SWIGLU)
