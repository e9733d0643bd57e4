"""The route of tokens to experts in Triton: choose experts, and sort the pairs by expert.

A pair is a token and one of its experts. Pairs are sorted by expert, so that a tile of pairs is
multiplied with the weights of one expert. The tiles are listed on the device, since their number
depends on the router's choice. Megatron-Core and vLLM sort with atomics. Here the chosen experts
are a 0/1 matrix [tokens, experts]. A pair's index is the sum of the columns to the left, plus the
rows above in its own column. The order is therefore always the same.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.back_ends import is_deterministic
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

_LOWEST = tl.constexpr(-0x7F800001)  # `_ordered` of minus infinity
TILE = tl.constexpr(4)  # int32 values of a tile: expert, first pair, end of the pairs, unused


@triton.jit
def _ordered(bits):
    """Return integers in the order of the floats with these bits, or the bits of such integers.

    A warp finds the largest integer with one instruction.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _top_k(
    logits, token, exists, E, NORMALIZE: tl.constexpr, SHARED: tl.constexpr,
    K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Return the K experts of each row, the likeliest first, and their weights, [tokens, KB]."""
    expert, place = tl.arange(0, EB)[None, :], tl.arange(0, KB)[None, :]
    inside = exists[:, None] & (expert < E)
    logits += token[:, None] * (E + SHARED)
    rest = tl.load(logits + expert, inside, float("-inf"))
    # NaN must not choose an expert that does not exist
    rest = tl.where(rest == rest, rest, float("-inf"))
    most = tl.max(rest, 1)
    total = tl.sum(tl.exp(rest - most[:, None]), 1)
    rest = _ordered(rest.to(tl.int32, bitcast=True))
    ids = tl.zeros_like(token)[:, None] + tl.zeros_like(place)
    weights = ids.to(tl.float32)
    for k in tl.static_range(K - SHARED):
        best = tl.max(rest, 1)
        index = tl.min(tl.where(rest == best[:, None], expert, EB), 1)
        value = _ordered(best).to(tl.float32, bitcast=True)
        ids = tl.where(place == k, index[:, None], ids)
        weights = tl.where(place == k, (tl.exp(value - most) / total)[:, None], weights)
        rest = tl.where(expert == index[:, None], _LOWEST, rest)
    if NORMALIZE:
        weights /= tl.sum(weights, 1)[:, None]
    if SHARED:
        gate = tl.load(logits + E, exists[:, None], 0.0)
        ids = tl.where(place == K - 1, E, ids)
        weights = tl.where(place == K - 1, 1 / (1 + tl.exp(-gate)), weights)
    return ids, weights


@triton.jit
def _hits(ids, k, exists, first, L, KB: tl.constexpr, LB: tl.constexpr):
    """Return True where a token's k-th expert is local, [tokens, LB]."""
    place, expert = tl.arange(0, KB)[None, :], tl.arange(0, LB)[None, :]
    chosen = tl.sum(tl.where(place == k, ids, 0), 1) - first
    return (chosen[:, None] == expert) & (expert < L) & exists[:, None]


@triton.jit
def _chosen(
    ids, exists, first, L, SHARED: tl.constexpr,
    K: tl.constexpr, KB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """Return the 0/1 matrix of chosen local experts but the shared one, [tokens, LB]."""
    chosen = tl.zeros((exists.shape[0], LB), tl.int32)
    for k in tl.static_range(K - SHARED):
        chosen |= _hits(ids, k, exists, first, L, KB, LB).to(tl.int32)
    return chosen


@triton.jit
def _list_tiles(tiles, totals, num_tokens, L, BM, SHARED: tl.constexpr):
    """Store the number of tiles, then each expert's tiles of BM pairs, the shared one's last."""
    here = tl.arange(0, totals.shape[0])
    counts = (totals + BM - 1) // BM
    begin = tl.cumsum(totals, 0) - totals
    place = tl.cumsum(counts, 0) - counts + 1
    number = tl.sum(counts, 0)
    if SHARED:
        pairs, more = tl.sum(totals, 0), tl.cdiv(num_tokens, BM)
        for some in tl.range(0, more, totals.shape[0]):
            index = some + here
            at, exists = tiles + (1 + number + index) * TILE, index < more
            tl.store(at, L, exists)
            tl.store(at + 1, pairs + index * BM, exists)
            tl.store(at + 2, pairs + num_tokens, exists)
        number += more
    tl.store(tiles, number)
    for index in tl.range(0, tl.max(counts, 0)):
        at = tiles + (place + index) * TILE
        exists = index < counts
        tl.store(at, here, exists)
        tl.store(at + 1, begin + index * BM, exists)
        tl.store(at + 2, begin + totals, exists)


@triton.jit
def _place(
    ids, chosen, begin, pairs, token, exists, first, L, sources, places,
    SHARED: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """Store each pair's token, and each token's pairs, with -1 if the expert is not local.

    begin: [LB], index of each expert's first pair among these tokens. pairs: number of pairs
    before those of the shared expert.
    """
    at = begin[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(sources + at, tl.zeros_like(at) + token[:, None], chosen > 0)
    for k in tl.static_range(K - SHARED):
        hits = _hits(ids, k, exists, first, L, KB, LB)
        tl.store(places + token * K + k, tl.sum(tl.where(hits, at + 1, 0), 1) - 1, exists)
    if SHARED:
        tl.store(sources + pairs + token, token, exists)
        tl.store(places + token * K + K - 1, pairs + token, exists)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def route(
    logits, ids, weights, counts, sources, places, tiles, num_tokens, E, first, L,
    NORMALIZE: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr, KB: tl.constexpr, EB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """Choose the experts of CHUNK tokens in each program, and count each expert's pairs for `sort`.

    L: number of local experts but the shared one. SHARED: expert E follows the K - 1 experts of
    each token. ONE: there is one token, and all experts are local, so nothing is left to `sort`.
    """
    launch_dependents()
    wait()
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < num_tokens
    best, probabilities = _top_k(logits, token, exists, E, NORMALIZE, SHARED, K, KB, EB)
    place = tl.arange(0, KB)[None, :]
    at, inside = token[:, None] * K + place, exists[:, None] & (place < K)
    tl.store(weights + at, probabilities, inside)
    if ONE:  # each expert has a tile of one pair
        tile = tiles + (1 + at) * TILE
        tl.store(tiles, K)
        tl.store(tile, best, inside)
        tl.store(tile + 1, at, inside)
        tl.store(tile + 2, at + 1, inside)
        tl.store(sources + at, 0, inside)
        tl.store(places + at, at, inside)
    else:
        tl.store(ids + at, best, inside)
        totals = tl.sum(_chosen(best, exists, first, L, SHARED, K, KB, LB), 0)
        tl.store(counts + chunk * LB + tl.arange(0, LB), totals)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def sort(
    ids, counts, sources, places, tiles, num_tokens, first, L, BM,
    SHARED: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
    LB: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of CHUNK tokens in each program; COUNTS: chunks counted at a time."""
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
        _list_tiles(tiles, totals, num_tokens, L, BM, SHARED)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = token < num_tokens
    place = tl.arange(0, KB)[None, :]
    best = tl.load(ids + token[:, None] * K + place, exists[:, None] & (place < K), -1)
    chosen = _chosen(best, exists, first, L, SHARED, K, KB, LB)
    begin, pairs = tl.cumsum(totals, 0) - totals + before, tl.sum(totals, 0)
    _place(best, chosen, begin, pairs, token, exists, first, L, sources, places, SHARED, K, KB, LB)


CHUNK = 16  # tokens of a program of `route` and `sort`
PROGRAMS = 16  # of fewer tokens each, if they suffice
COUNTS = 32


class Routing(NamedTuple):
    """Pairs of a token and one of its local experts, sorted by expert."""

    weights: Tensor  # float32 [num_tokens, top_k]
    sources: Tensor  # int32 [pairs]: the token of each pair
    # int32 [num_tokens, top_k]: indices of a token's pairs; -1 if the expert is not local
    places: Tensor
    tiles: Tensor  # int32 [1 + maximum tiles, TILE]: number of tiles, then the tiles


def sort_by_expert(
    logits: Tensor,
    top_k: int,
    normalize: bool,
    first: int,
    num_here: int,
    bm: int,
    shared: bool = False,
) -> Routing:
    """Route float32 logits [num_tokens, num_experts] to local experts, which start at `first`.

    shared: as in `penstock.kernels.moe.norm_moe`; `top_k` of the result is one more.
    """
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - shared
    top_k += shared
    num_pairs = num_tokens * top_k
    used = min(num_pairs, num_here)  # each expert may have one partial tile
    most_tiles = used + (num_pairs - used) // bm
    # few tokens are divided among more programs, but then the chunk's size determines how threads
    # share the sum of a token's probabilities
    chunk = CHUNK
    if not is_deterministic():
        chunk = min(chunk, triton.next_power_of_2(triton.cdiv(num_tokens, PROGRAMS)))
    num_chunks = triton.cdiv(num_tokens, chunk)
    num_here -= shared
    here = triton.next_power_of_2(num_here)
    is_one = num_tokens == 1 and num_here == num_experts
    empty = partial(logits.new_empty, dtype=torch.int32)
    routing = Routing(
        logits.new_empty(num_tokens, top_k),
        empty(num_pairs),
        empty(num_tokens, top_k),
        empty(1 + most_tiles, TILE.value),
    )
    weights, *sorted_pairs = routing
    ids, counts = empty(num_tokens, top_k), empty(num_chunks, here)
    sizes = {"SHARED": shared, "CHUNK": chunk, "LB": here}
    sizes |= {"K": top_k, "KB": triton.next_power_of_2(top_k)}
    route[(num_chunks,)](
        logits, ids, weights, counts, *sorted_pairs, num_tokens, num_experts, first, num_here,
        NORMALIZE=normalize, ONE=is_one, EB=triton.next_power_of_2(num_experts),
        num_warps=1 if is_one and chunk == 1 else 4, **sizes, **LAUNCH,
    )  # fmt: skip
    if not is_one:
        sort[(num_chunks,)](
            ids, counts, *sorted_pairs, num_tokens, first, num_here, bm,
            COUNTS=COUNTS, num_warps=4, **sizes, **LAUNCH,
        )  # fmt: skip
    return routing
