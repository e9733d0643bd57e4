"""Draws in Triton, without a sort, from the tokens that top-k, top-p and min-p keep.

A threshold logit separates kept and removed tokens. The largest logits of the groups of 32 ids give
a lower bound (the k-th largest of these is at most the k-th largest logit). Usually a few dozen
groups reach the bound. In these groups, the k-th largest logit is found bit by bit. Top-p is
applied by drawing: the winner is accepted if likelier tokens sum to less than top_p. Otherwise all
tokens up to the winner's logit are removed and the next winner is drawn (FlashInfer, "Sorting-Free
GPU Kernels for LLM Sampling", https://flashinfer.ai/2025/03/10/sampling.html). The noise stays the
same, so the result is the winner among the tokens that
`penstock.kernels.sampling.reference.keep_top_k_top_p` keeps.
"""

import triton
import triton.language as tl

from penstock.kernels.layouts.sampling import WORD
from penstock.kernels.sampling.triton_gumbel import RUN, best, load_float, noise_of, weight
from penstock.kernels.triton_collectives import shift

GROUP = tl.constexpr(32)
GROUPS_PER_RUN = tl.constexpr(RUN.value // GROUP.value)
_TILE = tl.constexpr(128)  # groups read at a time
_LOWEST = tl.constexpr(-(2**31))
_TOP_K, _TOP_P = tl.constexpr(WORD["top_k"]), tl.constexpr(WORD["top_p"])
_MIN_P = tl.constexpr(WORD["min_p"])
_NO_GROUP = tl.constexpr(2**25)  # group whose token ids exceed any vocabulary


@triton.jit
def load_limits(slot_ptr, vocab_size: tl.constexpr):
    """Load top_k (0: all), top_p and min_p of a slot, whose words begin at the pointer."""
    top_k = tl.load(slot_ptr + _TOP_K)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    return top_k, load_float(slot_ptr + _TOP_P), load_float(slot_ptr + _MIN_P)


@triton.jit
def is_restricted(temperature, limits):
    """Return True for a random row with top-k, top-p or min-p."""
    top_k, top_p, min_p = limits
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


@triton.jit
def list_groups(
    group_max_ptr,
    group_list_ptr,
    softmax,
    limits,
    shards,
    num_groups: tl.constexpr,
    padded: tl.constexpr,
):
    """List the groups that may contain a kept token, in ascending order; return their number.

    softmax: largest logit, scale of logits, sum of all weights. limits: see `load_limits`. shards:
    see `shift`.
    """
    largest, scale, total = softmax
    top_k, top_p, min_p = limits
    groups = tl.arange(0, padded)
    at = groups + shift(groups, shards, GROUPS_PER_RUN)
    group_max = tl.load(group_max_ptr + at, groups < num_groups, other=-float("inf"))
    keys, weights = _key(group_max), weight(group_max, largest, scale)
    lowest = tl.full((), _LOWEST, tl.int32)
    least = min_p * 0.9999  # margin, since sums in another order round differently
    if top_k > 0:
        lowest = _threshold(keys, tl.full(keys.shape, 1.0, tl.float32), top_k.to(tl.float32))
        least = min_p * 0  # top-p is a share of the tokens after top-k, before min-p
    elif top_p < 1:
        lowest = _threshold(keys, weights, total * top_p * 1.0001)
    likely = ((keys >= lowest) & (weights >= least)) | (group_max == largest)
    listed = (likely & (groups < num_groups)).to(tl.int32)
    tl.store(group_list_ptr + tl.cumsum(listed) - 1, groups, listed > 0)
    tl.debug_barrier()  # other threads read the list
    return tl.sum(listed)


@triton.jit
def draw(row, groups, softmax, limits, noise, vocab_size: tl.constexpr):
    """Return the token of a restricted row; softmax and limits: see `list_groups`.

    row: pointer to the row's logits, and `shards`. groups: the list and its length. noise: seed and
    position.
    """
    largest, _scale, total = softmax
    top_k, top_p, min_p = limits
    above = tl.full((), -float("inf"), tl.float32)
    kth = above
    if top_k > 0:
        kth = _kth_largest(row, groups, top_k, vocab_size)
        if top_p < 1:
            total = _mass_above(row, groups, softmax, above, kth, vocab_size)
    token = tl.full((), 0, tl.int32)
    drawing = token == 0
    while drawing:
        token = _winner(row, groups, softmax, above, kth, min_p, noise, vocab_size)
        some_token = tl.minimum(token, vocab_size - 1)
        logit = tl.load(row[0] + (some_token + shift(some_token, row[1], RUN)))
        # The likeliest token is always kept. NaN also ends the loop.
        drawing = (top_p < 1) & (logit < largest) & (logit > above)
        if drawing:
            mass = _mass_above(row, groups, softmax, logit, kth, vocab_size)
            drawing = mass >= top_p * total
        above = logit
    return token


@triton.jit
def _winner(row, groups, softmax, above, kth, min_p, noise, vocab_size: tl.constexpr):
    """Return the best token that top-k and min-p keep, with a logit larger than `above`."""
    largest, scale, _total = softmax
    seed, position = noise
    top = tl.full((), -float("inf"), tl.float32)
    token = tl.full((), 2**31 - 1, tl.int32)
    for start in range(0, groups[1], _TILE):
        logits, ids = _tile(row, groups, start, vocab_size)
        likely = (weight(logits, largest, scale) >= min_p) | (logits == largest)
        kept = likely & (logits > above) & (logits >= kth)
        scores = (logits - largest) * scale + noise_of(ids, seed, position)
        tile_top, tile_token = best(tl.where(kept, scores, -float("inf")), ids)
        token = tl.where(tile_top > top, tile_token, token)
        top = tl.maximum(top, tile_top)
    return token


@triton.jit
def _mass_above(row, groups, softmax, above, kth, vocab_size: tl.constexpr):
    """Return the total weight of logits larger than `above` and at least `kth`."""
    largest, scale, _total = softmax
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, groups[1], _TILE):
        logits, _ids = _tile(row, groups, start, vocab_size)
        counted = (logits > above) & (logits >= kth)
        mass += tl.sum(tl.where(counted, weight(logits, largest, scale), 0.0))
    return mass


@triton.jit
def _kth_largest(row, groups, top_k, vocab_size: tl.constexpr):
    if groups[1] <= _TILE:
        logits, _ids = _tile(row, groups, 0, vocab_size)
        found = _threshold(
            _key(logits), tl.full(logits.shape, 1.0, tl.float32), top_k.to(tl.float32)
        )
    else:
        found = tl.full((), _LOWEST, tl.int32)
        for i in range(32):
            candidate = found ^ (tl.full((), 1, tl.int32) << (31 - i))
            count = tl.full((), 0, tl.int32)
            for start in range(0, groups[1], _TILE):
                logits, _ids = _tile(row, groups, start, vocab_size)
                count += tl.sum((_key(logits) >= candidate).to(tl.int32))
            found = tl.where(count >= top_k, candidate, found)
    return _value(found)


@triton.jit
def _tile(row, groups, start, vocab_size: tl.constexpr):
    """Return logits and token ids, both [128, 32], of the listed groups from index `start`."""
    list_ptr, num_listed = groups
    index = start + tl.arange(0, _TILE)
    group = tl.load(list_ptr + index, index < num_listed, other=_NO_GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = ids + shift(group * GROUP, row[1], RUN)[:, None]
    return tl.load(row[0] + at, ids < vocab_size, other=-float("inf")), ids


@triton.jit
def _threshold(keys, weights, limit):
    """Return the largest key such that larger or equal keys weigh `limit`, or the lowest key."""
    found = tl.full((), _LOWEST, tl.int32)
    for i in range(32):
        candidate = found ^ (tl.full((), 1, tl.int32) << (31 - i))
        total = tl.sum(tl.where(keys >= candidate, weights, 0.0))
        found = tl.where(total >= limit, candidate, found)
    return found


@triton.jit
def _key(value):
    """Return an int32 that sorts like the float32."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """Return the float32 of a key, with -inf for the lowest key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == _LOWEST, -float("inf"), bits.to(tl.float32, bitcast=True))
