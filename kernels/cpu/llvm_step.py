"""Application of a plan, and sampling of a row's token, with the results of the references.

See `penstock.kernels.step.reference` and `penstock.kernels.sampling.reference`.
"""

import math
from collections.abc import Callable

from llvmlite import ir

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.llvm_elementwise import log
from penstock.kernels.cpu.types import PLAN, SampleFields
from penstock.kernels.cpu.values import (
    FLOAT,
    INT64,
    Kernel,
    Pointer,
    Record,
    Value,
    Variable,
    emitted,
)
from penstock.kernels.layouts.sampling import NUM_WORDS, RUN, WORD
from penstock.kernels.layouts.step import APPENDED, PARAMETERS, ROW, StepBuffers

QUARTER = RUN // 4
NUM_ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
LARGEST = 3.4028234663852886e38  # largest finite float32


def gumbel(word: Value) -> Value:
    """Return Gumbel noise from random words, int32."""
    uniform = (word.to_unsigned_float() + 0.5) * 2.0**-32
    most = 1 - 2.0**-24
    uniform = (uniform < most).choose(uniform, most)
    others = 1.0 - uniform
    lost = others - 1.0  # exact; the difference from -uniform is the rounding error of `others`
    is_rounded = lost.compare("!=", 0.0)
    ratio = uniform / is_rounded.choose(0.0 - lost, 1.0)
    exponential = is_rounded.choose((0.0 - log(others)) * ratio, uniform)
    return 0.0 - log(exponential)


def philox(counter: Value, position: Value, keys: tuple[Value, Value]) -> list[Value]:
    """Return four vectors of random words, int32; counter: vector of int32."""
    zero = counter.constant(0)
    words = [counter, counter.splat(position), zero, zero]
    key_0, key_1 = (counter.splat(key) for key in keys)
    for _ in range(NUM_ROUNDS):
        high_0, low_0 = words[0].multiply_wide(MULTIPLIERS[0])
        high_1, low_1 = words[2].multiply_wide(MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ key_0, low_1, high_0 ^ words[3] ^ key_1, low_0]
        key_0, key_1 = key_0 + KEY_STEPS[0], key_1 + KEY_STEPS[1]
    return words


class _Best:
    """Largest score of each lane, and its token id."""

    def __init__(self, k: Kernel, lanes: int) -> None:
        self._score: Variable = k.variable(k.zeros(lanes).constant(-math.inf))
        self._token: Variable = k.variable(k.iota(lanes))

    def add(self, scores: Value, token_ids: Value) -> None:
        best, best_ids = self._score.value, self._token.value
        is_equal = scores.compare("==", best) & (token_ids < best_ids)
        is_better = (scores > best) | is_equal
        self._score.value = is_better.choose(scores, best)
        self._token.value = is_better.choose(token_ids, best_ids)

    def result(self) -> tuple[Value, Value]:
        """Return the largest score, and the lowest token id with this score."""
        scores = self._score.value
        score = scores.intrinsic("vector.reduce.fmax", FLOAT)
        tokens = scores.compare("==", score).choose(self._token.value, 1 << 62)
        return score, tokens.intrinsic("vector.reduce.smin", INT64)


def emit_sample(k: Kernel, target: Target) -> None:
    """Choose a row's token.

    Arguments: logits (the row's), vocab_size, seed, position, temperature, threshold, token.
    Temperature and threshold are one float32 each; scores below the threshold are removed. token is
    the result, or -1 without a finite maximum.
    """
    logits, vocab_size, seed, position, temperature, threshold, token = k.arguments
    lanes = target.lanes
    greedy, wrong = _Best(k, lanes), k.variable(k.zeros(lanes))
    with k.range(0, vocab_size, lanes) as at:
        values, token_ids = _values(k, logits, at, vocab_size, lanes)
        greedy.add(values, token_ids)
        is_valid = values.compare("<=", LARGEST)
        wrong.value = is_valid.choose(wrong.value, 1.0)
    largest, best = greedy.result()
    is_wrong = wrong.value.intrinsic("vector.reduce.fmax", FLOAT) > 0.0
    is_wrong = is_wrong | (largest < -LARGEST)
    token[0] = is_wrong.choose(k.integer(-1), best)
    with k.when((temperature[0] > 0.0) & (is_wrong.compare("==", 0))):
        divisor, lowest = temperature[0], threshold[0]

        def scores_from(begin: Value) -> tuple[Value, Value, Value]:
            """Return scores, -inf where removed; their token ids; whether any score is left."""
            values, token_ids = _values(k, logits, begin, vocab_size, lanes)
            scores = (values - largest) / divisor
            is_kept = scores.compare(">=", lowest) & scores.compare(">", -math.inf)
            is_any = is_kept.intrinsic("vector.reduce.or", ir.IntType(1))
            return is_kept.choose(scores, -math.inf), token_ids, is_any

        token[0] = _draw(k, lanes, vocab_size, scores_from, seed, position)


def _values(
    k: Kernel, logits: Pointer, at: Value, vocab_size: Value, lanes: int
) -> tuple[Value, Value]:
    """Return logits from `at`, with -inf after the vocabulary, and their token ids."""
    left = vocab_size - at
    values, token_ids = logits.vector(at, lanes, left), k.iota(lanes)
    return (token_ids < left).choose(values, -math.inf), token_ids + at


def _draw(
    k: Kernel,
    lanes: int,
    vocab_size: Value,
    scores_from: Callable[[Value], tuple[Value, Value, Value]],
    seed: Value,
    position: Value,
) -> Value:
    """Return the token with the largest sum of score and noise."""
    best, iota = _Best(k, lanes), k.iota(lanes)
    keys = seed.truncate(), seed.shift_right(32).truncate()
    with k.range(0, vocab_size, RUN) as run:
        most = k.smaller(vocab_size - run, QUARTER)
        with k.range(0, most, lanes) as at:
            begins = [run + at + index * QUARTER for index in range(4)]
            is_any = [scores_from(begin)[2] for begin in begins]
            with k.when(is_any[0] | is_any[1] | is_any[2] | is_any[3]):
                counter = (iota + (run // 4 + at)).truncate()
                words = philox(counter, position.truncate(), keys)
                for begin, word, is_some in zip(begins, words, is_any, strict=True):
                    with k.when(is_some):
                        scores, token_ids, _ = scores_from(begin)
                        best.add(scores + gumbel(word), token_ids)
    return best.result()[1]


def emit_sample_rows(k: Kernel, sampler: Kernel) -> None:
    """Sample all rows. Argument: the address of SampleFields."""
    fields = Record(k.arguments[0], SampleFields._fields)
    slots, positions, last, tokens = (
        fields.at(name, "i64") for name in ("slots", "positions", "last_token", "out")
    )
    logits, numbers, thresholds = map(fields.at, ("logits", "parameters", "thresholds"))
    seeds = fields.at("parameters", "i64")
    with k.range(0, fields["num_rows"]) as row:
        slot = slots[row]
        with k.when(slot >= 0):
            own = logits + row * fields["stride"]
            temperature = numbers + (slot * NUM_WORDS + WORD["temperature"])
            seed = seeds[slot * (NUM_WORDS // 2) + WORD["seed"] // 2]
            rest = temperature, thresholds + row, tokens + row
            k.call(sampler, own, fields["vocab_size"], seed, positions[row], *rest)
            token = tokens[row]
            last[slot] = (token > 0).choose(token, 0)


# buffers of int64; other buffers are int32
LONGS = {"input_ids", "positions", "slot_mapping", "slots", "last_tokens", "next_positions"}


def build_step(target: Target) -> ir.Module:
    """Return the functions `apply_plan` and `sample`."""
    module = ir.Module("step")
    sampler = emitted(module, "sample_row", "f32 int int int f32 f32 i64", emit_sample, target)
    emitted(module, "sample", "i64", emit_sample_rows, sampler, public=True)
    emitted(module, "apply_plan", "i64", lambda k: _Plan(k).emit(), public=True)
    return module


class _Plan:
    """The function `apply_plan`; `penstock.kernels.step.apply_plan` describes its record."""

    def __init__(self, k: Kernel) -> None:
        self.k, self.fields = k, Record(k.arguments[0], PLAN)
        self.record = self.fields.at("record", "i32")
        self.block_size, self.max_blocks = self.fields["block_size"], self.fields["max_blocks"]
        self.tables = self.fields.at("slot_block_tables", "i32")
        self.last_token = self.fields.at("slot_last_token", "i64")
        self.out = {
            name: self.fields.at(name, "i64" if name in LONGS else "i32")
            for name in StepBuffers._fields
        }

    def emit(self) -> None:
        k, record = self.k, self.record
        with k.range(0, record[1]) as index:
            entry = record + (record[4] + index * APPENDED)
            self.tables[entry[0] * self.max_blocks + entry[1]] = entry[2]
        with k.range(0, record[2]) as index:
            self._set_parameters(record + (record[5] + index * PARAMETERS))
        num_tokens, num_keys = k.variable(k.integer(0)), k.variable(k.integer(0))
        num_tiles = k.variable(k.integer(0))
        with k.range(0, record[0]) as index:
            row = record + (record[3] + index * ROW)
            length = row[1] + row[2]
            self._tokens(row)
            self._row(index, row, length)
            num_tokens.value = num_tokens.value + row[2]
            num_keys.value = num_keys.value + length
            with k.when(row[4] >= 0):
                self._tiles(index, row[2], num_tiles.value)
                num_tiles.value = num_tiles.value + self._num_tiles(row[2])
        self._pad(record[0], num_tokens.value, num_keys.value, num_tiles.value)

    def _set_parameters(self, entry: Pointer) -> None:
        words = self.fields.at("slot_parameters", "i32") + entry[0] * NUM_WORDS
        with self.k.range(0, NUM_WORDS) as word:
            words[word] = entry[word + 1]

    def _tokens(self, row: Pointer) -> None:
        k, out = self.k, self.out
        slot, start, count, first, token_index = (row[index] for index in range(5))
        table = self.tables + slot * self.max_blocks
        source = (token_index < 0).choose(-2 - token_index, token_index) + self.record[6]
        follows = token_index.compare("==", -1)
        with k.range(0, count) as token:
            position, at = start + token, first + token
            out["positions"][at] = position
            block = table[position // self.block_size]
            out["slot_mapping"][at] = block * self.block_size + position % self.block_size
            token_id = self.record[follows.choose(k.integer(0), source + token)]
            out["input_ids"][at] = follows.choose(self.last_token[slot], token_id)

    def _row(self, index: Value, row: Pointer, length: Value) -> None:
        k, out = self.k, self.out
        out["context_lens"][index] = out["next_positions"][index] = length
        out["decode_lens"][index] = (row[4] < 0).choose(length, 0)
        out["cu_seqlens_q"][index], out["cu_seqlens_k"][index] = row[3], row[5]
        out["slots"][index], out["states"][index] = row[6], row[7]
        out["prompt_ends"][index] = row[8]
        out["last_tokens"][index] = row[3] + row[2] - 1
        source = self.tables + row[0] * self.max_blocks
        to = out["block_tables"] + index * self.max_blocks
        with k.range(0, self.max_blocks) as column:
            to[column] = source[column]

    def _pad(self, rows: Value, tokens: Value, keys: Value, tiles: Value) -> None:
        """Pad rows, tokens and tiles after the record's, up to the shape."""
        k, out = self.k, self.out
        num_rows, num_tokens = self.fields["num_rows"], self.fields["num_tokens"]
        minus_one, zero = k.integer(-1), k.integer(0)
        with k.range(rows, num_rows) as row:
            for name in ("context_lens", "decode_lens", "next_positions", "states", "prompt_ends"):
                out[name][row] = zero
            out["slots"][row] = minus_one
            token = k.smaller(tokens + (row - rows), num_tokens)
            out["cu_seqlens_q"][row], out["cu_seqlens_k"][row] = token, keys
            out["last_tokens"][row] = k.smaller(token, num_tokens - 1)
        out["cu_seqlens_q"][num_rows] = k.smaller(tokens + (num_rows - rows), num_tokens)
        out["cu_seqlens_k"][num_rows] = keys
        with k.range(tokens, num_tokens) as token:
            out["input_ids"][token] = out["positions"][token] = zero
            out["slot_mapping"][token] = minus_one
        with k.range(tiles * 2, self.fields["num_tiles"] * 2) as at:
            out["tiles"][at] = minus_one

    def _num_tiles(self, count: Value) -> Value:
        size = self.fields["tile_size"]
        return (count + size - 1) // size

    def _tiles(self, index: Value, count: Value, before: Value) -> None:
        """Store the tiles of a chunk, ordered from the tile with most keys."""
        number, size = self._num_tiles(count), self.fields["tile_size"]
        with self.k.range(0, number) as tile:
            place = self.out["tiles"] + (before + tile) * 2
            place[0], place[1] = index, (number - 1 - tile) * size
