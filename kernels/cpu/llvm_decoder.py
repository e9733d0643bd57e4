"""The decoder's layers in one function, which each thread of a step calls.

A layer has two halves: attention or DeltaNet, then SwiGLU. Their products are added to `target`.
This is the residual stream, or zeros for a rank of a group whose results are added between halves.
Ranks that share memory store their products there, wait for one another and add the products of all
ranks. Threads share the rows or the columns of each operation and wait for one another after each
operation.

Causal attention over a paged KV cache takes one pass (FlashAttention, arXiv:2205.14135). A row is a
query head of a token. A tile has up to four query rows that fit the registers. It reads the keys of
its sequence in tiles of 16, with a running maximum and sum. Tiles begin at multiples of 16
positions, a later key has weight 0, and every row has separate sums. The bits of a row thus depend
neither on its tile, nor on the chunk of its token, nor on the batch.
"""

import math
from typing import NamedTuple

from llvmlite import ir

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.llvm_elementwise import (
    add_lanes,
    emit_embedding,
    emit_norm,
    emit_rope_store,
    emit_total,
    exp,
)
from penstock.kernels.cpu.llvm_products import (
    ADD,
    COLUMNS,
    STORE,
    SWIGLU,
    IntegerKind,
    Kind,
    dot_tile,
    element,
    emit_product,
    emit_rounding,
    name_of,
)
from penstock.kernels.cpu.shared_memory import HALVES, add_atomically, emit_barrier
from penstock.kernels.cpu.types import LAYER, STATE, DeltaShape, HeadFields, HeadShape, StepFields
from penstock.kernels.cpu.values import Kernel, Pointer, Record, Value, Variable, emitted

KEYS = 16  # keys of a tile
MAX_ROWS = 4


class _Row(NamedTuple):
    """Query head of a token."""

    query: Pointer
    out: Pointer
    limit: Value  # number of keys that the row attends to
    largest: Variable
    total: Variable
    weighted: Pointer  # running sum of values, [head_dim]
    weights: Pointer  # weights of a tile's keys


def emit_attention(k: Kernel, target: Target, shape: HeadShape) -> None:
    """Compute the attention of one KV head for tokens `begin` to `end` of one sequence.

    Arguments: q (the sequence's first token in the step, head 0), q_stride, out, out_stride,
    k_cache, v_cache (the KV head of the first block), block_stride (stride of the caches), table
    (block ids), block_size, piece (adjacent keys of a tile), first_position, begin, end, head (the
    first of the group).
    """
    begin, end = k.arguments[11:13]
    k.tiles(
        0,
        (end - begin) * shape.group,
        min(target.rows, MAX_ROWS),
        lambda first, number: _tile(k, target, shape, first, number),
    )


def _tile(k: Kernel, target: Target, shape: HeadShape, first: Value, count: int) -> None:
    (q, q_stride, out, out_stride, k_cache, v_cache, block_stride, table, block_size,
     piece, first_position, begin, _, head) = k.arguments  # fmt: skip
    rows = []
    head_dim, group, _, is_gated = shape
    for index in range(count):
        row = first + index
        token, at = begin + row // group, (head + row % group) * head_dim
        weighted = k.array(head_dim)
        for feature in range(0, head_dim, KEYS):
            weighted[feature] = k.zeros(KEYS)
        rows.append(
            _Row(
                q + (token * q_stride + at * shape.query_parts),
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
            # masked keys of a later piece are read in the last piece
            position = k.smaller(key + at, most - 1)
            place = _place(position - position % piece, head_dim, table, block_size, block_stride)
            with k.range(0, piece) as offset:
                places[at + offset] = place + offset * head_dim
        # a CPU predicts neither the next tile of this head, nor the first tile of the next head
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
            attended = own.weighted.vector(feature, KEYS) * total
            if is_gated:
                gate = own.query.vector(head_dim + feature, KEYS)
                attended = attended / (exp(0.0 - gate) + 1.0)
            own.out[feature] = attended


def _place(
    position: Value, head_dim: int, table: Pointer, block_size: Value, block_stride: Value
) -> Value:
    """Return the place of a position's key or value in the cache."""
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
    """Return the scores of each row with a tile's keys; prefetch keys `ahead` of them."""
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
    """Add some features of a tile's values to the rows' sums; prefetch values `ahead` of them."""
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


QUERY_TOKENS = 32  # tokens of a chunk that one thread processes at a time


class _Team:
    """The threads of a call."""

    def __init__(self, k: Kernel, barrier: Kernel, count: Pointer, thread: Value, size: Value):
        self._k, self._barrier, self._count = k, barrier, count
        self.thread, self.size = thread, size

    def share(self, number: Value, multiple: int = 1) -> tuple[Value, Value]:
        """Return the bounds of this thread's share of 0 to `number`, cut at multiples."""
        pieces = (number + (multiple - 1)) // multiple
        begin = pieces * self.thread // self.size * multiple
        end = pieces * (self.thread + 1) // self.size * multiple
        return begin, self._k.smaller(end, number)

    def wait(self) -> None:
        self._k.call(self._barrier, self._count, self.size)


class Kinds(NamedTuple):
    """Kinds of matrices."""

    # indexed by the numbers in a layer's fields; absent matrices have number 0
    layers: tuple[Kind, ...]
    head: Kind
    embedding: str


def build_module(
    target: Target, kinds: Kinds, shape: HeadShape, delta_shape: DeltaShape | None = None
) -> ir.Module:
    """Return the functions `embed`, `decoder` and `head`."""
    module = ir.Module("penstock")
    norm = emitted(module, "norm", "f32 f32 f32 f32 int int int", emit_norm, target)
    all_kinds = dict.fromkeys([*kinds.layers, kinds.head])
    products = {kind: _product(module, target, kind) for kind in all_kinds}
    arguments = "f32 int int f32 f32 f32 f32 f32 i64 i64 f32 f32 int int int"
    rope = emitted(module, "rope", arguments, emit_rope_store, target, shape)
    arguments = "f32 int f32 int f32 f32 int i32 int int int int int int"
    attention = emitted(module, "attention", arguments, emit_attention, target, shape)
    barrier = emitted(module, "barrier", "i64 int", emit_barrier)
    total = emitted(module, "total", "f32 f32 int int int int", emit_total, target)
    arguments = f"i64 {kinds.embedding} f32 int int"
    emitted(module, "embed", arguments, emit_embedding, target, public=True)
    parts = element(kinds.head), norm, products[kinds.head], barrier
    emitted(module, "head", "i64 int int", _emit_head, *parts, public=True)
    delta = None
    if delta_shape:
        from penstock.kernels.cpu.llvm_delta import delta_kernel

        delta = delta_shape, delta_kernel(module, target, delta_shape)
    of_layers = [(element(kind), products[kind]) for kind in kinds.layers]
    layers = of_layers, shape, norm, rope, attention, barrier, total, delta
    arguments = "i64 i64 int int int int"
    emitted(module, "decoder", arguments, lambda k: _Decoder(k, *layers).emit(), public=True)
    return module


def _product(module: ir.Module, target: Target, kind: Kind) -> Kernel:
    rounding, name = None, name_of(kind)
    if isinstance(kind, IntegerKind):
        own = emit_rounding, target, kind
        rounding = emitted(module, f"rounding_{name}", "f32 int f32", *own)
    arguments = f"int f32 {element(kind)} f32 int int int int int f32 f32"
    return emitted(module, f"product_{name}", arguments, emit_product, target, kind, rounding)


def _emit_head(k: Kernel, weight: str, norm: Kernel, product: Kernel, barrier: Kernel) -> None:
    """Multiply the norm of rows by a weight; arguments: HeadFields, thread, threads."""
    place, thread, num_threads = k.arguments
    fields = Record(place, HeadFields._fields)
    team = _Team(k, barrier, fields.at("barrier", "i64"), thread, num_threads)
    num_rows, size, columns = (fields[name] for name in ("num_rows", "size", "columns"))
    x, gain, eps, out, normed = (fields.at(name) for name in ("x", "norm", "eps", "out", "normed"))
    scratch = fields.at("scratch") + fields["scratch_size"] * thread
    k.call(norm, x, gain, eps, normed, size, *team.share(num_rows))
    team.wait()
    matrix = fields.at("weight", weight), fields.at("scale")
    bounds = team.share(columns, COLUMNS)
    k.call(product, STORE, normed, *matrix, size, columns, *bounds, num_rows, out, scratch)


class _Decoder:
    """The function `decoder`, which computes halves `begin` to `end` of the layers."""

    def __init__(
        self,
        k: Kernel,
        products: list[tuple[str, Kernel]],
        shape: HeadShape,
        norm: Kernel,
        rope: Kernel,
        attention: Kernel,
        barrier: Kernel,
        total: Kernel,
        delta: tuple[DeltaShape, Kernel] | None,
    ) -> None:
        self.total, self.delta = total, delta
        self.k, self.products, self.head, self.head_dim = k, products, shape, shape.head_dim
        self.norm, self.rope, self.attention = norm, rope, attention
        place, self.layers, self.begin, self.end, self.thread, num_threads = k.arguments
        self.fields = fields = Record(place, StepFields._fields)
        self.team = _Team(k, barrier, fields.at("barrier", "i64"), self.thread, num_threads)
        self.num_tokens, self.hidden = fields["num_tokens"], fields["hidden"]
        self.heads, self.kv_heads = fields["heads"], fields["kv_heads"]
        self.intermediate = fields["intermediate"]
        self.scratch = fields.at("scratch") + fields["scratch_size"] * self.thread
        self.residual, self.normed = fields.at("residual"), fields.at("normed")
        self.qkv, self.attended, self.inner = map(fields.at, ("qkv", "attended", "inner"))
        self.eps = fields.at("eps")
        self.num_ranks, self.part_size = fields["num_ranks"], fields["part_size"]
        self.parts = fields.at("parts")
        self.ranks = _Team(
            k, barrier, fields.at("ranks_barrier", "i64"), fields["rank"], self.num_ranks
        )

    def emit(self) -> None:
        k = self.k
        with k.range(self.begin, self.end) as half:
            layer = Record(self.layers + half // 2 * len(LAYER), LAYER)
            with k.when((half % 2).compare("==", 0)):
                is_delta = layer["conv"].compare("!=", 0)
                with k.when(is_delta.compare("==", 0)):
                    self._attention_half(layer, half)
                if self.delta:
                    with k.when(is_delta):
                        self._delta_half(layer, half, *self.delta)
            with k.when((half % 2).compare("==", 1)):
                self._mlp_half(layer, half)
            with k.when(self.thread.compare("==", 0)):
                add_atomically(k, self.fields.at("barrier", "i64") + HALVES, 1)

    def _normed(self, layer: Record, name: str) -> None:
        gain = layer.at(name)
        rows = self.team.share(self.num_tokens)
        self.k.call(self.norm, self.residual, gain, self.eps, self.normed, self.hidden, *rows)
        self.team.wait()

    def _multiply(
        self,
        mode: Value | int,
        layer: Record,
        name: str,
        x: Pointer,
        size: Value,
        columns: Value,
        out: Pointer,
    ) -> None:
        """Multiply x by a weight of the layer, and wait for the other threads."""
        scales = layer.at(f"{name}_scale")
        bounds = self.team.share(columns, COLUMNS)
        rest = size, columns, *bounds, self.num_tokens, out, self.scratch
        own = layer[f"{name}_kind"]
        for number, (elements, product) in enumerate(self.products):
            with self.k.when(own.compare("==", number)):
                matrix = layer.at(name, elements)
                self.k.call(product, mode, x, matrix, scales, *rest)
        self.team.wait()

    def _add(self, layer: Record, name: str, half: Value, x: Pointer, size: Value) -> None:
        """Add the product of x and a weight to the target.

        If ranks share memory, add the products of all ranks to the residual stream.
        """
        k, b = self.k, self.k.builder
        has_peers = self.num_ranks > 1
        turn = (self.fields["turn"] + (half - self.begin)) % 2
        parts = self.parts + turn * self.num_ranks * self.part_size
        own = parts + self.fields["rank"] * self.part_size
        out = Pointer(b, b.select(has_peers.raw, own.raw, self.fields.at("target").raw), "f32")
        mode = has_peers.choose(k.integer(STORE), ADD)
        self._multiply(mode, layer, name, x, size, self.hidden, out)
        with k.when(has_peers):
            with k.when(self.thread.compare("==", 0)):
                self.ranks.wait()
            self.team.wait()
            bounds = self.team.share(self.num_tokens * self.hidden, KEYS)
            k.call(self.total, self.residual, parts, self.part_size, self.num_ranks, *bounds)
            self.team.wait()

    def _attention_half(self, layer: Record, half: Value) -> None:
        self._normed(layer, "input_norm")
        width = (self.heads * self.head.query_parts + self.kv_heads * 2) * self.head_dim
        self._multiply(STORE, layer, "qkv", self.normed, self.hidden, width, self.qkv)
        q_norm, k_norm, k_cache, v_cache = (
            layer.at(name) for name in ("q_norm", "k_norm", "k_cache", "v_cache")
        )
        self.k.call(
            self.rope, self.qkv, self.heads, self.kv_heads, q_norm, k_norm, self.eps,
            self.fields.at("scale"), self.fields.at("rope"), self.fields.at("positions", "i64"),
            self.fields.at("slots", "i64"), k_cache, v_cache, self.fields["block_size"],
            *self.team.share(self.num_tokens),
        )  # fmt: skip
        self.team.wait()
        self._attend(k_cache, v_cache, width)
        self.team.wait()
        inputs = self.heads * self.head_dim
        self._add(layer, "o", half, self.attended, inputs)

    def _attend(self, k_cache: Pointer, v_cache: Pointer, width: Value) -> None:
        """Compute attention in items, which the threads take in turns.

        An item is some tokens of a row with one KV head.
        """
        k = self.k
        starts, lengths, tables = (
            self.fields.at(name, "i32") for name in ("starts", "lengths", "tables")
        )
        item = k.variable(k.integer(0))
        of_head = self.fields["block_size"] * self.head_dim
        stride, out_stride = self.kv_heads * of_head, self.heads * self.head_dim
        with k.range(0, self.fields["num_rows"]) as row:
            first, count = starts[row], starts[row + 1] - starts[row]
            table = tables + row * self.fields["max_blocks"]
            with k.range(0, count, QUERY_TOKENS) as begin, k.range(0, self.kv_heads) as head:
                turn = item.value % self.team.size
                item.value = item.value + 1
                with k.when(turn.compare("==", self.thread)):
                    end = k.smaller(begin + QUERY_TOKENS, count)
                    at = head * of_head
                    k.call(
                        self.attention, self.qkv + first * width, width,
                        self.attended + first * out_stride, out_stride, k_cache + at, v_cache + at,
                        stride, table, self.fields["block_size"], self.fields["piece"],
                        lengths[row] - count, begin, end, head * self.head.group,
                    )  # fmt: skip

    def _delta_half(self, layer: Record, half: Value, s: DeltaShape, delta: Kernel) -> None:
        k = self.k
        self._normed(layer, "input_norm")
        for name, out, columns in (
            ("qkv", self.qkv, s.width),
            ("ba", self.fields.at("gates"), 2 * s.value_heads),
        ):
            size = k.integer(columns)
            self._multiply(STORE, layer, name, self.normed, self.hidden, size, out)
        weights = [layer.at(name) for name in ("conv", "a_log", "dt_bias", "q_norm")]
        state = [layer.at(name) for name in STATE]
        read, written, firsts, lasts, windows = (
            self.fields.at(name, "i64") for name in ("read", "written", "first", "last", "window")
        )
        starts, lengths = self.fields.at("starts", "i32"), self.fields.at("lengths", "i32")
        with k.range(0, self.fields["num_rows"]) as row, k.range(0, s.key_heads) as head:
            start, count = starts[row], starts[row + 1] - starts[row]
            # rows of a draft follow the first row of their sequence, which computes them all
            is_alone, is_decoding = written[row] < 0, row < self.fields["num_decode"]
            begins = is_alone | (lengths[row] - count).compare("==", firsts[row])
            turn = (row * s.key_heads + head) % self.team.size
            with k.when(begins & (count > 0) & turn.compare("==", self.thread)):
                k.call(
                    delta, self.qkv + start * s.width,
                    self.fields.at("gates") + start * 2 * s.value_heads,
                    self.attended + start * s.outputs, *weights, self.eps, *state, self.scratch,
                    self.fields["state_stride"], read[row], written[row], windows[row],
                    is_alone.choose(count, lasts[row] - firsts[row]),
                    is_decoding.choose(k.integer(1), 0), head,
                )  # fmt: skip
        self.team.wait()
        self._add(layer, "o", half, self.attended, k.integer(s.outputs))

    def _mlp_half(self, layer: Record, half: Value) -> None:
        self._normed(layer, "post_norm")
        inner = self.intermediate
        self._multiply(SWIGLU, layer, "gate_up", self.normed, self.hidden, inner, self.inner)
        self._add(layer, "down", half, self.inner, inner)
