"""The kernels of `penstock.kernels.linear.small_m_gemm`.

Each program reads a tile of weight rows with many bytes in flight; x is small and stays in the L2.
With too few weight rows for all SMs, the inner dimension is split as well (split-K). The last
program to arrive adds the partial sums, as in Stream-K (Osama et al. 2023,
https://arxiv.org/abs/2301.03598). A norm needs no separate kernel:
`rms_norm(x) @ w.T = (x * norm_weight) @ w.T / rms(x)`. The root mean square is known after the
inner dimension has been read. With several rows every program needs all squares, which may take
longer than a separate kernel. One row of x is multiplied without tensor cores.

Weights of 8 bits are converted to x's type in registers. The sums of a column are then multiplied
by its scale, or the weights by the scales of their blocks before the product.
"""

import triton
import triton.language as tl

from penstock.kernels.matrices import BLOCK
from penstock.kernels.triton_elementwise import widen
from penstock.kernels.triton_pdl import launch_dependents, prefetch_rows, wait

MAX_SPLIT_K = tl.constexpr(8)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def scaled_tile(
    tile, scale, rows, first, stride, K, BK: tl.constexpr, SLICES: tl.constexpr
):  # fmt: skip
    """Return the tile [BN, BK] or [SLICES, BN, BK] of a weight [.., K] in float32.

    scale: scales of the weight's blocks. rows: [BN], rows of the weight. first: the tile's first
    column, a multiple of BK, which is a power of two. stride: columns from one slice to the next, a
    multiple of BK.
    """
    COLUMNS = tl.cdiv(K, _BLOCK)
    NUM: tl.constexpr = BK // _BLOCK if BK > _BLOCK else 1
    BN: tl.constexpr = rows.shape[0]
    begin = first + tl.arange(0, SLICES)[:, None, None] * stride
    column = begin // _BLOCK + tl.arange(0, NUM)[None, None, :]
    at = (rows // _BLOCK)[None, :, None] * COLUMNS + tl.minimum(column, COLUMNS - 1)
    factors = tl.load(scale + at)  # [SLICES, BN, NUM]
    wide = tl.reshape(tile.to(tl.float32), (SLICES, BN, NUM, BK // NUM))
    return tl.reshape(wide * factors[:, :, :, None], tile.shape)


@triton.jit
def load_residual(residual, at, exists, ADD: tl.constexpr):
    """Return the residual in float32, or 0 without ADD."""
    return tl.load(residual + at, exists, 0.0).to(tl.float32) if ADD else 0.0


@triton.jit
def norm_factor(squares, K, eps, NORM: tl.constexpr):
    """Return a row's norm factor from the sum of its squares, or 1 without NORM."""
    return tl.rsqrt(squares / K + eps) if NORM else 1.0


@triton.jit
def load_scales(scale, column, N, SWIGLU: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the column scales of gate (or of the only product) and of up."""
    if scale is None or BLOCKS:
        return 1.0, 1.0
    else:
        gate = tl.load(scale + column, column < N, 0.0)
        return gate, tl.load(scale + N + column, column < N, 0.0) if SWIGLU else gate


@triton.jit
def store_result(
    acc, acc_up, norm, scale, up_scale, more, out, at, exists, SWIGLU: tl.constexpr
):  # fmt: skip
    """Store `more + act(norm * scale * acc)`; SWIGLU: acc holds sums of gate, acc_up sums of up."""
    acc = acc * norm * scale
    if SWIGLU:
        acc = acc / (1 + tl.exp(-acc)) * (acc_up * norm * up_scale)
    acc += more
    tl.store(out + at, acc.to(out.dtype.element_ty), exists)


@triton.jit
def _total(partials, at, exists, size):
    """Return the sum over all splits, added in order, so that its bits never differ."""
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
    tl.debug_barrier()  # all threads' stores precede the release by one thread
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


@triton.jit
def _indices(rows, stride, BK: tl.constexpr, SLICES: tl.constexpr):
    """Return indices of a tile, [.., rows, 1] and [.., 1, BK], with a leading slice if SLICES.

    stride: elements from one slice to the next.
    """
    k = tl.arange(0, BK)
    if SLICES == 1:
        return rows[:, None], k[None, :]
    else:
        slices = tl.arange(0, SLICES)
        return rows[None, :, None], slices[:, None, None] * stride + k[None, None, :]


@triton.jit
def load(at, inside, EVEN: tl.constexpr):
    """Load elements, with 0 where `inside` is False; EVEN: all elements are inside."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, inside, 0.0)


@triton.jit
def weight_tile(
    at, inside, scale, rows, first, K,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, stride=0,
):  # fmt: skip
    """Load a tile of a weight's rows; BLOCKS: scale it by its blocks, in float32.

    stride: elements from one slice to the next.
    """
    tile = widen(load(at, inside, EVEN))
    if BLOCKS:
        tile = scaled_tile(tile, scale, rows, first, stride, K, BK, SLICES)
    return tile


@triton.jit
def operand(tile, dtype: tl.constexpr):
    """Convert a tile of weights to dtype via float32: the direct way to bfloat16 is slow."""
    return tile if tile.dtype == dtype else tile.to(tl.float32).to(dtype)


@triton.jit
def _dot(x, weight, acc, SLICES: tl.constexpr):
    weight = tl.permute(weight, (1, 0)) if SLICES == 1 else tl.permute(weight, (0, 2, 1))
    return tl.dot(x, operand(weight, x.dtype), acc, input_precision="ieee")


@triton.jit
def scaled(
    x_tile, norm_weight, squares, NORM: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr
):  # fmt: skip
    """Return x times the norm's weight, and the sums of x's squares in 8 equal columns.

    Tensor cores also add the squares, so that a thread needs the same elements of x for both. A
    square is rounded to x's type; the sum is in float32.
    """
    if NORM:
        ones = tl.full((BK, 8) if SLICES == 1 else (SLICES, BK, 8), 1.0, x_tile.dtype)
        squares = tl.dot(x_tile * x_tile, ones, squares, input_precision="ieee")
        x_tile = (x_tile * norm_weight).to(x_tile.dtype)  # a weight may be float32
    return x_tile, squares


@triton.jit
def in_turn(sums):
    """Return the sums [ROWS, ..] of four slices from [4, ROWS, ..], added in order."""
    last = tl.permute(sums, (1, 2, 0))
    even, odd = tl.split(tl.reshape(last, (last.shape[0], last.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first + second + third + fourth


@triton.jit
def _total_of_slices(sums, RANGED: tl.constexpr):
    return in_turn(sums) if RANGED else tl.sum(sums, 0)


@triton.jit
def _reduced(
    acc, acc_up, squares,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, SLICES: tl.constexpr, RANGED: tl.constexpr,
):  # fmt: skip
    """Return the sums over the slices, and one column of the squares."""
    if SLICES > 1:
        acc = _total_of_slices(acc, RANGED)
        acc_up = _total_of_slices(acc_up, RANGED) if SWIGLU else acc
        squares = _total_of_slices(squares, RANGED) if NORM else acc
    return acc, acc_up, tl.max(squares, 1)[:, None]


@triton.jit
def _whole_products(
    x, norm_weight, weight, scale, weight_rows, num_rows, begin, end, N, K, NORM: tl.constexpr,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SLICES: tl.constexpr, RANGED: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute `_products` of one tile; its weights are read before previous kernels end."""
    m, k = _indices(tl.arange(0, BM), BK, BK, SLICES)
    n, _ = _indices(weight_rows, BK, BK, SLICES)
    inside = begin + k < end
    tile = weight_tile(
        weight + n * K + begin + k, inside, scale, weight_rows, begin, K, EVEN, BLOCKS, BK, SLICES,
        BK,
    )  # fmt: skip
    up = tile
    if SWIGLU:
        up_at, up_rows = weight + (n + N) * K + begin + k, weight_rows + N
        up = weight_tile(up_at, inside, scale, up_rows, begin, K, EVEN, BLOCKS, BK, SLICES, BK)
    factor = load(norm_weight + begin + k, inside, EVEN) if NORM else 1.0
    wait()
    x_at = x + m * K + begin + k
    x_tile = tl.load(x_at, m < num_rows if EVEN else (m < num_rows) & inside, 0.0)
    squares = tl.zeros((BM, 8) if SLICES == 1 else (SLICES, BM, 8), tl.float32)
    x_tile, squares = scaled(x_tile, factor, squares, NORM, BK, SLICES)
    zeros = tl.zeros((BM, BN) if SLICES == 1 else (SLICES, BM, BN), tl.float32)
    acc = _dot(x_tile, tile, zeros, SLICES)
    acc_up = _dot(x_tile, up, zeros, SLICES) if SWIGLU else zeros
    return _reduced(acc, acc_up, squares, NORM, SWIGLU, SLICES, RANGED)


@triton.jit
def _products(
    x, norm_weight, weight, scale, weight_rows, num_rows, begin, end, stride, N, K,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, RANGED: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return sums over [begin, end) of gate (or of the only product), of up, and of x's squares.

    stride: elements from one slice to the next. RANGED: each slice is a separate range that begins
    there.
    """
    wait()
    m, k = _indices(tl.arange(0, BM), stride, BK, SLICES)
    n, _ = _indices(weight_rows, stride, BK, SLICES)
    x_at = x + m * K + k
    weight_at = weight + n * K + k
    up_at = weight + (n + N) * K + k
    acc = tl.zeros((BM, BN) if SLICES == 1 else (SLICES, BM, BN), tl.float32)
    acc_up = acc
    squares = tl.zeros((BM, 8) if SLICES == 1 else (SLICES, BM, 8), tl.float32)
    for first in tl.range(begin, end, BK if RANGED else BK * SLICES):
        inside = first + k < end
        x_tile = tl.load(x_at + first, m < num_rows if EVEN else (m < num_rows) & inside, 0.0)
        factor = load(norm_weight + first + k, inside, EVEN) if NORM else 1.0
        x_tile, squares = scaled(x_tile, factor, squares, NORM, BK, SLICES)
        tile = weight_tile(
            weight_at + first, inside, scale, weight_rows, first, K, EVEN, BLOCKS, BK, SLICES,
            stride,
        )  # fmt: skip
        acc = _dot(x_tile, tile, acc, SLICES)
        if SWIGLU:
            up_rows = weight_rows + N
            up = weight_tile(
                up_at + first, inside, scale, up_rows, first, K, EVEN, BLOCKS, BK, SLICES, stride
            )
            acc_up = _dot(x_tile, up, acc_up, SLICES)
    return _reduced(acc, acc_up, squares, NORM, SWIGLU, SLICES, RANGED)


@triton.jit(do_not_specialize=["num_rows"])
def small_m_gemm_kernel(
    x, norm_weight, weight, scale, residual, out, partials, counters, num_rows, N, K, range_size,
    eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    RANGED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of out over one range of the inner dimension in each program.

    NORM: the kernel computes the norm of x. SPLIT: programs on axis 1 are ranges, up to
    MAX_SPLIT_K. EVEN: BK * SLICES divides K. WHOLE: a range is one tile. SLICES: number of warps
    that divide BK * SLICES elements. Each has all rows and columns, since a tile of few rows and
    columns keeps only one warp busy. RANGED: each slice is a range of `range_size` elements
    instead. EARLY: the next kernel may overlap this kernel. After a long product, its programs
    would occupy the free SMs instead of keeping all SMs equally busy.
    """
    if EARLY:
        launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_rows = tl.minimum(column, N - 1).to(tl.int64)
    share = tl.cdiv(tl.cdiv(K, BK * SLICES), tl.num_programs(1)) * BK * SLICES
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, K)
    if PREFETCH:
        PARTS: tl.constexpr = SLICES if RANGED else 1
        for number in tl.static_range(2 * PARTS if SWIGLU else PARTS):
            rows = weight_rows + number // PARTS * N
            first = begin + number % PARTS * range_size
            prefetch_rows(weight, rows, first, end, K, PREFETCH // PARTS)
    gate_scale, up_scale = load_scales(scale, column[None, :], N, SWIGLU, BLOCKS)
    if WHOLE:
        acc, acc_up, squares = _whole_products(
            x, norm_weight, weight, scale, weight_rows, num_rows, begin, end, N, K,
            NORM, SWIGLU, BM, BN, BK, SLICES, RANGED, EVEN, BLOCKS,
        )  # fmt: skip
    else:
        if RANGED:
            begin, end = 0, range_size
        acc, acc_up, squares = _products(
            x, norm_weight, weight, scale, weight_rows, num_rows, begin, end,
            range_size if RANGED else BK, N, K,
            NORM, SWIGLU, BM, BN, BK, SLICES, RANGED, EVEN, BLOCKS,
        )  # fmt: skip
    row = tl.arange(0, BM)[:, None]
    exists = (row < num_rows) & (column < N)[None, :]
    at = row.to(tl.int64) * N + column[None, :]
    if SPLIT:
        merge(
            acc, acc_up, squares, gate_scale, up_scale, partials, counters, residual, out,
            at, row, exists, num_rows.to(tl.int64) * N, num_rows, K, eps, NORM, SWIGLU, ADD,
        )  # fmt: skip
    else:
        more = load_residual(residual, at, exists, ADD)
        norm = norm_factor(squares, K, eps, NORM)
        store_result(acc, acc_up, norm, gate_scale, up_scale, more, out, at, exists, SWIGLU)


@triton.jit
def _row(x, norm_weight, k, inside, NORM: tl.constexpr, EVEN: tl.constexpr):
    row = load(x + k, inside, EVEN).to(tl.float32)
    squares = row * row
    if NORM:
        row *= load(norm_weight + k, inside, EVEN).to(tl.float32)
    return row, squares


@triton.jit
def _row_products(
    x, norm_weight, weight, scale, rows, N, K,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return unreduced sums of gate (or the only product) and up [BN, BK], of x's squares [BK]."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = acc
    squares = tl.zeros((BK,), tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        inside = first + k < K
        row, more = _row(x, norm_weight, first + k, inside, NORM, EVEN)
        squares += more
        at = weight + rows[:, None] * K + (first + k)[None, :]
        tile = weight_tile(at, inside[None, :], scale, rows, first, K, EVEN, BLOCKS, BK, 1)
        acc += tile.to(tl.float32) * row[None, :]
        if SWIGLU:
            at = weight + (rows + N)[:, None] * K + (first + k)[None, :]
            up = weight_tile(at, inside[None, :], scale, rows + N, first, K, EVEN, BLOCKS, BK, 1)
            acc_up += up.to(tl.float32) * row[None, :]
    return acc, acc_up, squares


@triton.jit
def gemv_kernel(
    x, norm_weight, weight, scale, residual, out, normed, N, K, eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute BN columns of out in each program.

    WHOLE: BK >= K. All loads are in flight; loads of the weights start before previous kernels end.
    normed: takes the norm of x [K], with WHOLE; or None.
    """
    launch_dependents()
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(column, N - 1).to(tl.int64)
    gate_scale, up_scale = load_scales(scale, column, N, SWIGLU, BLOCKS)
    if WHOLE:
        k = tl.arange(0, BK)
        inside = k < K
        at = weight + rows[:, None] * K + k[None, :]
        tile = weight_tile(at, inside[None, :], scale, rows, 0, K, EVEN, BLOCKS, BK, 1)
        up = tile
        if SWIGLU:
            at = weight + (rows + N)[:, None] * K + k[None, :]
            up = weight_tile(at, inside[None, :], scale, rows + N, 0, K, EVEN, BLOCKS, BK, 1)
        factor = 1.0
        if NORM:
            factor = load(norm_weight + k, inside, EVEN).to(tl.float32)
        wait()
        row = load(x + k, inside, EVEN).to(tl.float32)
        more = load_residual(residual, column, column < N, ADD)
        squares = row * row
        row *= factor
        acc, acc_up = tile.to(tl.float32) * row[None, :], up.to(tl.float32) * row[None, :]
    else:
        if PREFETCH:
            prefetch_rows(weight, rows, 0, K, K, PREFETCH)
            if SWIGLU:
                prefetch_rows(weight, rows + N, 0, K, K, PREFETCH)
        wait()
        more = load_residual(residual, column, column < N, ADD)
        acc, acc_up, squares = _row_products(
            x, norm_weight, weight, scale, rows, N, K, NORM, SWIGLU, BN, BK, STAGES, EVEN, BLOCKS
        )
    acc, acc_up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    norm = norm_factor(tl.sum(squares, 0), K, eps, NORM)
    if normed is not None:
        k = tl.arange(0, BK)
        first = (tl.program_id(0) == 0) & (k < K)
        tl.store(normed + k, (row * norm).to(normed.dtype.element_ty), first)
    at, exists = column, column < N
    store_result(acc, acc_up, norm, gate_scale, up_scale, more, out, at, exists, SWIGLU)
