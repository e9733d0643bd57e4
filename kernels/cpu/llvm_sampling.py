"""Sampling of a row's token, as `penstock.kernels.sampling.reference` does it in torch."""

import math

from llvmlite import ir

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel, Variable
from penstock.kernels.cpu.llvm_elementwise import LN2_HIGH, LN2_LOW
from penstock.kernels.cpu.types import SampleFields
from penstock.kernels.cpu.values import FLOAT, INT32, INT64, Pointer, Value
from penstock.kernels.layouts.sampling import RUN

QUARTER = RUN // 4
NUM_ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
LARGEST = 3.4028234663852886e38  # finite float32
# of (log(1 + x) - x + x**2 / 2) / x**3 (Cephes)
LOG_COEFFICIENTS = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
MANTISSA, HALF, SQRT_HALF = 0x007FFFFF, 0x3F000000, 0.70710678118654752


def log(x: Value) -> Value:
    """Return the natural logarithm of positive normal numbers, within 1e-7 of it."""
    bits = x.bits(INT32)
    exponent = (bits.shift_right(23) - 126).to_float()
    fraction = ((bits & MANTISSA) | HALF).bits(FLOAT)
    is_small = fraction < SQRT_HALF
    exponent = is_small.choose(exponent - 1.0, exponent)
    rest = is_small.choose(fraction + fraction, fraction) - 1.0
    square = rest * rest
    power = x.constant(LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        power = power.fma(rest, x.constant(coefficient))
    power = power * rest * square
    power = exponent.fma(x.constant(LN2_LOW), power)
    power = square.fma(x.constant(-0.5), power)
    return exponent.fma(x.constant(LN2_HIGH), rest + power)


def gumbel(word: Value) -> Value:
    """Return Gumbel noise of random words, int32."""
    uniform = (word.to_unsigned_float() + 0.5) * 2.0**-32
    most = 1 - 2.0**-24
    uniform = (uniform < most).choose(uniform, most)
    others = 1.0 - uniform
    lost = others - 1.0  # exact; its difference from -uniform is what `others` was rounded by
    is_rounded = lost.compare("!=", 0.0)
    ratio = uniform / is_rounded.choose(0.0 - lost, 1.0)
    exponential = is_rounded.choose((0.0 - log(others)) * ratio, uniform)
    return 0.0 - log(exponential)


def philox(counter: Value, position: Value, keys: tuple[Value, Value]) -> list[Value]:
    """Return four vectors of random words, int32; counter: int32 vector."""
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
    """The largest score of each lane, and its token id."""

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
        """Return the largest score, and the lowest token id that has it."""
        scores = self._score.value
        score = scores.intrinsic("vector.reduce.fmax", FLOAT)
        tokens = scores.compare("==", score).choose(self._token.value, 1 << 62)
        return score, tokens.intrinsic("vector.reduce.smin", INT64)


def emit_sample(k: Kernel, target: Target) -> None:
    """Choose a row's token.

    Arguments: logits (of the row), vocab_size, seed, position, temperature, threshold (one float32
    each; scores below the threshold are removed), token (the result; -1 without a finite maximum).
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
        scores = _Scores(k, lanes, logits, vocab_size, largest, temperature[0], threshold[0])
        token[0] = scores.draw(seed, position)


def _values(
    k: Kernel, logits: Pointer, at: Value, vocab_size: Value, lanes: int
) -> tuple[Value, Value]:
    """Return logits from `at` on, -inf after the vocabulary, and their token ids."""
    left = vocab_size - at
    values, token_ids = logits.vector(at, lanes, left), k.iota(lanes)
    return (token_ids < left).choose(values, -math.inf), token_ids + at


class _Scores:
    """Logits minus the largest, divided by the temperature."""

    def __init__(
        self,
        k: Kernel,
        lanes: int,
        logits: Pointer,
        vocab_size: Value,
        largest: Value,
        temperature: Value,
        threshold: Value,
    ) -> None:
        self.k, self.lanes, self.logits, self.vocab_size = k, lanes, logits, vocab_size
        self.largest, self.temperature, self.threshold = largest, temperature, threshold

    def draw(self, seed: Value, position: Value) -> Value:
        """Return the token with the largest sum of score and noise."""
        k, lanes = self.k, self.lanes
        best = _Best(k, lanes)
        keys = seed.truncate(), seed.shift_right(32).truncate()
        iota = k.iota(lanes)
        with k.range(0, self.vocab_size, RUN) as run:
            most = k.smaller(self.vocab_size - run, QUARTER)
            with k.range(0, most, lanes) as at:
                counter = (iota + (run // 4 + at)).truncate()
                for index, word in enumerate(philox(counter, position.truncate(), keys)):
                    begin = run + at + index * QUARTER
                    with k.when(begin < self.vocab_size):
                        self._add(best, begin, word)
        return best.result()[1]

    def _add(self, best: _Best, begin: Value, word: Value) -> None:
        values, token_ids = _values(self.k, self.logits, begin, self.vocab_size, self.lanes)
        scores = (values - self.largest) / self.temperature
        is_kept = scores.compare(">=", self.threshold)
        best.add(is_kept.choose(scores + gumbel(word), -math.inf), token_ids)


def emit_sample_rows(module: ir.Module, target: Target) -> None:
    """Emit the function `sample`, whose arguments are the SampleFields."""
    one = Kernel(module, "sample_row", "f32 int int int f32 f32 i64")
    emit_sample(one, target)
    one.end()
    k = Kernel(module, "sample", "i64", public=True)
    (fields,) = k.arguments
    at = {name: fields + index for index, name in enumerate(SampleFields._fields)}
    slots, positions, seeds, last, tokens = (
        at[name].pointer(0, "i64") for name in ("slots", "positions", "seeds", "last_token", "out")
    )
    logits, temperature, thresholds = (
        at[name].pointer(0, "f32") for name in ("logits", "temperature", "thresholds")
    )
    with k.range(0, at["num_rows"][0]) as row:
        slot = slots[row]
        with k.when(slot >= 0):
            own = logits + row * at["stride"][0]
            rest = temperature + slot, thresholds + row, tokens + row
            k.call(one, own, at["vocab_size"][0], seeds[slot], positions[row], *rest)
            token = tokens[row]
            last[slot] = (token > 0).choose(token, 0)
    k.end()
