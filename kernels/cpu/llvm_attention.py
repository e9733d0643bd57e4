"""Causal attention over a paged KV cache, in one pass (FlashAttention, arXiv:2205.14135).

A tile of query rows, up to four that fit the registers (a row is a query head of a token), goes
through the keys of its sequence in tiles of 16, with a running maximum and sum. Tiles begin at
multiples of 16 positions, a later key has weight 0, and every row has its own sums, so that the
bits of a row do not depend on its tile, on the chunk of its token or on the batch.
"""

import math
from typing import NamedTuple

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel, Variable
from penstock.kernels.cpu.llvm_elementwise import add_lanes, exp
from penstock.kernels.cpu.llvm_linear import COLUMNS, dot_tile
from penstock.kernels.cpu.values import Pointer, Value

KEYS = 16  # keys of a tile
MAX_ROWS = 4


class _Row(NamedTuple):
    """A query head of a token."""

    query: Pointer
    out: Pointer
    limit: Value  # number of keys that it sees
    largest: Variable
    total: Variable
    weighted: Pointer  # sum of the values so far, [head_dim]
    weights: Pointer  # of a tile's keys


def emit_attention(k: Kernel, target: Target, head_dim: int, group: int) -> None:
    """Compute the attention of one KV head for tokens `begin` to `end` of one sequence.

    Arguments: q (the sequence's first token in the step, head 0), q_stride, out, out_stride,
    k_cache, v_cache (the KV head of the first block), block_stride (of the caches), table (block
    ids), block_size, piece (keys of a tile that lie side by side), first_position, begin, end, head
    (the first of the group).
    """
    begin, end = k.arguments[11:13]
    k.tiles(
        0,
        (end - begin) * group,
        min(target.rows, MAX_ROWS),
        lambda first, number: _tile(k, target, head_dim, group, first, number),
    )


def _tile(k: Kernel, target: Target, head_dim: int, group: int, first: Value, count: int) -> None:
    (q, q_stride, out, out_stride, k_cache, v_cache, block_stride, table, block_size,
     piece, first_position, begin, _, head) = k.arguments  # fmt: skip
    rows = []
    for index in range(count):
        row = first + index
        token, at = begin + row // group, (head + row % group) * head_dim
        weighted = k.array(head_dim)
        for feature in range(0, head_dim, KEYS):
            weighted[feature] = k.zeros(KEYS)
        rows.append(
            _Row(
                q + (token * q_stride + at),
                out + (token * out_stride + at),
                first_position + token + 1,
                k.variable(k.real(-math.inf)),
                k.variable(k.zeros(KEYS)),
                weighted,
                k.array(KEYS),
            )
        )
    most = rows[-1].limit
    places = k.array(KEYS, "i64")
    with k.range(0, most, KEYS) as key:
        with k.range(0, KEYS, piece) as at:
            # masked keys of a later piece are read in the last one
            position = k.smaller(key + at, most - 1)
            place = _place(position - position % piece, head_dim, table, block_size, block_stride)
            with k.range(0, piece) as offset:
                places[at + offset] = place + offset * head_dim
        # a CPU foresees neither the next tile of this head, nor the first one of the next head
        is_last = key + KEYS >= most
        after = is_last.choose(k.integer(0), key + KEYS)
        ahead = _place(after, head_dim, table, block_size, block_stride) - places[0]
        ahead = ahead + is_last.choose(block_size * head_dim, 0)
        scores = _scores(k, target, head_dim, rows, k_cache, places, ahead)
        valid = k.smaller(most - key, KEYS)
        for own, row_scores in zip(rows, scores, strict=True):
            _weigh(k, head_dim, own, row_scores, key)
        of_tile = target.rows * COLUMNS * target.lanes // (count * KEYS) * KEYS
        for feature in range(0, head_dim, of_tile):
            features = range(feature, min(feature + of_tile, head_dim), KEYS)
            _add_values(k, features, rows, valid, v_cache, places, ahead)
    for own in rows:
        total = 1.0 / add_lanes([own.total.value], KEYS).lane(0)
        for feature in range(0, head_dim, KEYS):
            own.out[feature] = own.weighted.vector(feature, KEYS) * total


def _place(
    position: Value, head_dim: int, table: Pointer, block_size: Value, block_stride: Value
) -> Value:
    """Return where the key or value of a position lies in the cache."""
    return table[position // block_size] * block_stride + position % block_size * head_dim


def _scores(
    k: Kernel,
    target: Target,
    head_dim: int,
    rows: list[_Row],
    cache: Pointer,
    places: Pointer,
    ahead: Value,
) -> list[Value]:
    """Return the scores of each row with a tile's keys; prefetch the keys `ahead` of them."""
    with k.range(0, KEYS, COLUMNS) as key:
        ws = [cache + places[key + index] for index in range(COLUMNS)]
        sums = dot_tile(k, target, [row.query for row in rows], ws, head_dim, ahead)
        for row, total in zip(rows, sums, strict=True):
            row.weights[key] = total
    return [row.weights.vector(0, KEYS) for row in rows]


def _weigh(k: Kernel, head_dim: int, row: _Row, scores: Value, key: Value) -> None:
    """Replace the scores of a row by the weights of its keys; rescale its sums if necessary."""
    sees = k.iota(KEYS) < row.limit - key
    scores = sees.choose(scores, -math.inf)
    largest = scores.intrinsic("vector.reduce.fmax", scores.lane(0).raw.type)
    with k.when(largest > row.largest.value):
        old = exp(row.largest.value - largest)
        row.total.value = row.total.value * old
        for feature in range(0, head_dim, KEYS):
            row.weighted[feature] = row.weighted.vector(feature, KEYS) * old
        row.largest.value = largest
    weights = sees.choose(exp(scores - row.largest.value), 0.0)
    row.total.value = row.total.value + weights
    row.weights[0] = weights


def _add_values(
    k: Kernel,
    features: range,
    rows: list[_Row],
    valid: Value,
    cache: Pointer,
    places: Pointer,
    ahead: Value,
) -> None:
    """Add some features of a tile's values to the sums of rows; prefetch those `ahead`."""
    sums = [[k.variable(row.weighted.vector(at, KEYS)) for at in features] for row in rows]
    with k.range(0, valid) as index:
        weights = [row.weights[index] for row in rows]
        value = cache + places[index]
        for number, feature in enumerate(features):
            (value + feature).prefetch(ahead)
            values = value.vector(feature, KEYS)
            for weight, own in zip(weights, sums, strict=True):
                own[number].value = weight.fma(values, own[number].value)
    for row, own in zip(rows, sums, strict=True):
        for total, feature in zip(own, features, strict=True):
            row.weighted[feature] = total.value
