"""The kernels of `penstock.kernels.moe.triton_moe`.

A pair is a token and one of its experts. Pairs are sorted by expert, so that a tile of pairs is
multiplied with the weights of one expert. The tiles are listed on the device, since their number
depends on the router's choice. Megatron-Core and vLLM sort with atomics. Here a pair's index
follows from the chosen experts as a 0/1 matrix [tokens, experts]: the sum of the columns to the
left, and of the rows above in its own column. The order is therefore always the same.
"""

import triton
import triton.language as tl

from penstock.kernels.linear.triton_small_m_gemm import weight_tile
from penstock.kernels.quantize import types
from penstock.kernels.triton_pdl import launch_dependents, wait

BLOCK = tl.constexpr(types.BLOCK)
TILE = tl.constexpr(4)  # int32 of a tile in the list: expert, first pair, end of the pairs, unused


@triton.jit
def _top_k(
    logits, token, exists, E, NORMALIZE: tl.constexpr,
    K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Return the K experts of largest probability of each row, and these, [tokens, KB]."""
    expert, place = tl.arange(0, EB)[None, :], tl.arange(0, KB)[None, :]
    inside = exists[:, None] & (expert < E)
    rest = tl.load(logits + token[:, None] * E + expert, inside, float("-inf"))
    rest = tl.where(
        rest == rest, rest, float("-inf")
    )  # NaN must not choose an expert that does not exist
    most = tl.max(rest, 1)
    total = tl.sum(tl.exp(rest - most[:, None]), 1)
    ids = tl.zeros_like(token)[:, None] + tl.zeros_like(place)
    weights = ids.to(tl.float32)
    for k in tl.static_range(K):
        value, index = tl.max(rest, 1, return_indices=True)
        ids = tl.where(place == k, index[:, None], ids)
        weights = tl.where(place == k, (tl.exp(value - most) / total)[:, None], weights)
        rest = tl.where(expert == index[:, None], float("-inf"), rest)
    if NORMALIZE:
        weights /= tl.sum(weights, 1)[:, None]
    return ids, weights


@triton.jit
def _hits(ids, k, exists, first, L, KB: tl.constexpr, LB: tl.constexpr):
    """Return True at a token's k-th expert if it is local, [tokens, LB]."""
    place, expert = tl.arange(0, KB)[None, :], tl.arange(0, LB)[None, :]
    chosen = tl.sum(tl.where(place == k, ids, 0), 1) - first
    return (chosen[:, None] == expert) & (expert < L) & exists[:, None]


@triton.jit
def _chosen(
    ids, exists, first, L, K: tl.constexpr, KB: tl.constexpr, LB: tl.constexpr
):  # fmt: skip
    """Return the 0/1 matrix of chosen local experts, [tokens, LB]."""
    chosen = tl.zeros((exists.shape[0], LB), tl.int32)
    for k in tl.static_range(K):
        chosen |= _hits(ids, k, exists, first, L, KB, LB).to(tl.int32)
    return chosen


@triton.jit
def _list_tiles(tiles, totals, BM):
    """Store the number of tiles, then each expert's tiles of BM pairs."""
    here = tl.arange(0, totals.shape[0])
    counts = (totals + BM - 1) // BM
    begin = tl.cumsum(totals, 0) - totals
    place = tl.cumsum(counts, 0) - counts + 1
    tl.store(tiles, tl.sum(counts, 0))
    for index in tl.range(0, tl.max(counts, 0)):
        at = tiles + (place + index) * TILE
        exists = index < counts
        tl.store(at, here, exists)
        tl.store(at + 1, begin + index * BM, exists)
        tl.store(at + 2, begin + totals, exists)


@triton.jit
def _place(
    ids, chosen, begin, token, exists, first, L, sources, places,
    K: tl.constexpr, KB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """Store each pair's token, and each token's pairs: -1 if the expert is not local.

    begin: [LB], index of each expert's first pair among these tokens.
    """
    at = begin[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(sources + at, tl.zeros_like(at) + token[:, None], chosen > 0)
    for k in tl.static_range(K):
        hits = _hits(ids, k, exists, first, L, KB, LB)
        tl.store(places + token * K + k, tl.sum(tl.where(hits, at + 1, 0), 1) - 1, exists)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def route(
    logits, ids, weights, counts, sources, places, tiles, num_tokens, E, first, L, BM,
    NORMALIZE: tl.constexpr, ALL: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """Choose the experts of CHUNK tokens in each program.

    ALL: one program has all tokens, and sorts their pairs. Otherwise their experts and the number
    of pairs of each expert are stored for `sort`.
    """
    launch_dependents()
    wait()
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < num_tokens
    best, probabilities = _top_k(logits, token, exists, E, NORMALIZE, K, KB, EB)
    place = tl.arange(0, KB)[None, :]
    at, inside = token[:, None] * K + place, exists[:, None] & (place < K)
    tl.store(weights + at, probabilities, inside)
    chosen = _chosen(best, exists, first, L, K, KB, LB)
    totals = tl.sum(chosen, 0)
    if ALL:
        _list_tiles(tiles, totals, BM)
        begin = tl.cumsum(totals, 0) - totals
        _place(best, chosen, begin, token, exists, first, L, sources, places, K, KB, LB)
    else:
        tl.store(ids + at, best, inside)
        tl.store(counts + chunk * LB + tl.arange(0, LB), totals)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def sort(
    ids, counts, sources, places, tiles, num_tokens, first, L, BM,
    CHUNK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LB: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of CHUNK tokens in each program; COUNTS: chunks counted at once."""
    launch_dependents()
    wait()
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    totals = tl.zeros((LB,), tl.int32)
    before = totals
    for some in tl.range(0, num_chunks, COUNTS):
        other = (some + tl.arange(0, COUNTS))[:, None]
        at = counts + other * LB + tl.arange(0, LB)[None, :]
        tile = tl.load(at, other < num_chunks, 0)
        totals += tl.sum(tile, 0)
        before += tl.sum(tl.where(other < chunk, tile, 0), 0)
    if chunk == 0:
        _list_tiles(tiles, totals, BM)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < num_tokens
    place = tl.arange(0, KB)[None, :]
    best = tl.load(ids + token[:, None] * K + place, exists[:, None] & (place < K), -1)
    chosen = _chosen(best, exists, first, L, K, KB, LB)
    begin = tl.cumsum(totals, 0) - totals + before
    _place(best, chosen, begin, token, exists, first, L, sources, places, K, KB, LB)


@triton.jit
def _multiply_tile(
    x, sources, tile, weight, scale, out, column, N, K,
    SWIGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    pair = tl.load(tile + 1) + tl.arange(0, BM)
    exists = pair < tl.load(tile + 2)
    row = pair
    if SWIGLU:
        row = tl.load(sources + pair, exists, 0)
    k = tl.arange(0, BK)
    NUM: tl.constexpr = 2 if SWIGLU else 1
    first_row = tl.load(tile).to(tl.int64) * (NUM * N)
    weight += first_row * K
    x_at = x + row[:, None].to(tl.int64) * K + k[None, :]
    weight_row = tl.minimum(column, N - 1)
    weight_at = weight + weight_row[:, None] * K + k[None, :]
    if BLOCKS:
        scale += first_row // (NUM * N) * (tl.cdiv(NUM * N, BLOCK) * tl.cdiv(K, BLOCK))
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for first in tl.range(0, K, BK):
        inside = first + k[None, :] < K
        x_tile = tl.load(x_at + first, exists[:, None] if EVEN else exists[:, None] & inside, 0.0)
        gate = weight_tile(
            weight_at + first, inside, scale, weight_row, first, K, EVEN, BLOCKS, BK, 1
        ).to(x_tile.dtype)
        acc = tl.dot(x_tile, gate.T, acc, input_precision="ieee")
        if SWIGLU:
            up_at, up_row = weight_at + N * K + first, weight_row + N
            up = weight_tile(up_at, inside, scale, up_row, first, K, EVEN, BLOCKS, BK, 1)
            up = up.to(x_tile.dtype)
            acc_up = tl.dot(x_tile, up.T, acc_up, input_precision="ieee")
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

    SWIGLU: computes gate and up from the rows of x of the pairs' tokens; otherwise x has a row for
    each pair. The grid suffices for any choice of the router. EVEN: BK divides K. scale: of each
    row of the weights in 8 bits, which are converted to x's type in registers; BLOCKS: of blocks.
    """
    wait()
    columns = tl.cdiv(N, BN)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    if tile < tl.load(tiles):
        _multiply_tile(
            x, sources, tiles + (tile + 1) * TILE, weight, scale, out, column, N, K,
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
