"""Exponential, logarithm, SwiGLU's activation, RMSNorm, and RoPE with the store of keys."""

import math
from functools import partial

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.types import HeadShape
from penstock.kernels.cpu.values import FLOAT, INT32, Kernel, Pointer, Value

LOG2_E = 1.4426950408889634
# their sum is log(2); the first has few bits, which makes its product with an integer exact
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# 1.5 * 2**23: adding it to a small float32 leaves the nearest integer in the low bits
ROUND = 12582912.0
COEFFICIENTS = 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0
MAX_EXPONENT = 80.0  # far from values where float32 loses bits
# coefficients of (log(1 + x) - x + x**2 / 2) / x**3 (Cephes)
LOG_COEFFICIENTS = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
MANTISSA, HALF, SQRT_HALF = 0x007FFFFF, 0x3F000000, 0.70710678118654752


def add_lanes(vectors: list[Value], lanes: int) -> Value:
    """Return the sum of each vector's lanes: halves are added until one lane is left."""
    length = lanes  # lanes that belong to the same sum

    def halves(size: int) -> tuple[list[int], list[int]]:
        first = [lane for lane in range(size) if lane % length < length // 2]
        return first, [lane + length // 2 for lane in first]

    while len(vectors) > 1:
        low, high = halves(2 * lanes)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a.lanes(low, b) + a.lanes(high, b) for a, b in pairs]
        length //= 2
    total, size = vectors[0], lanes
    while length > 1:
        low, high = halves(size)
        total = total.lanes(low) + total.lanes(high)
        length, size = length // 2, size // 2
    return total


def exp(x: Value) -> Value:
    """Return e**x with an error of up to 2e-7, for x clamped to ±80; exp(0) is 1; NaN stays NaN."""
    x = (x > MAX_EXPONENT).choose(x.constant(MAX_EXPONENT), x)
    x = (x < -MAX_EXPONENT).choose(x.constant(-MAX_EXPONENT), x)
    shifted = x.fma(x.constant(LOG2_E), x.constant(ROUND))
    whole = shifted - ROUND
    rest = whole.fma(x.constant(-LN2_HIGH), x)
    rest = whole.fma(x.constant(-LN2_LOW), rest)
    power = x.constant(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        power = power.fma(rest, x.constant(coefficient))
    scale = (shifted.bits(INT32).shift_left(23) + (127 << 23)).bits(FLOAT)
    return power * scale


def log(x: Value) -> Value:
    """Return the natural logarithm of positive normal numbers, with an error of up to 1e-7."""
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


def silu(gate: Value) -> Value:
    """Return gate * sigmoid(gate)."""
    return gate / (exp(0.0 - gate) + 1.0)


def inverse_rms(k: Kernel, target: Target, x: Pointer, size: Value, eps: Value) -> Value:
    """Return 1 / sqrt(mean(x**2) + eps) of `size` elements."""
    lanes = target.lanes
    total = k.variable(k.zeros(lanes))
    whole = size - size % lanes

    def accumulate(at: Value, count: Value | None = None) -> None:
        values = x.vector(at, lanes, count)
        total.value = values.fma(values, total.value)

    with k.range(0, whole, lanes) as at:
        accumulate(at)
    with k.when(whole < size):
        accumulate(whole, size - whole)
    mean = add_lanes([total.value], lanes) / size.to_float()
    return 1.0 / (mean + eps).intrinsic("sqrt").lane(0)


def emit_embedding(k: Kernel, target: Target) -> None:
    """Widen rows of a weight. Arguments: row ids, weight, out, number of ids, size."""
    token_ids, weight, out, number, size = k.arguments
    lanes = target.lanes
    whole = size - size % lanes
    with k.range(0, number) as index:
        source, to = weight + token_ids[index] * size, out + index * size
        with k.range(0, whole, lanes) as at:
            to[at] = source.vector(at, lanes)
        with k.range(whole, size) as at:
            to[at] = source.vector(at, 1).lane(0)


def emit_norm(k: Kernel, target: Target) -> None:
    """Write the RMSNorm of rows `begin` to `end`.

    Arguments: x, weight, eps (one float32), out, size, begin, end.
    """
    x, weight, eps, out, size, begin, end = k.arguments
    lanes = target.lanes
    whole = size - size % lanes
    with k.range(begin, end) as row:
        source, to = x + row * size, out + row * size
        factor = inverse_rms(k, target, source, size, eps[0])
        with k.range(0, whole, lanes) as at:
            to[at] = source.vector(at, lanes) * factor * weight.vector(at, lanes)
        with k.range(whole, size) as at:
            to[at] = source[at] * factor * weight[at]


def emit_total(k: Kernel, target: Target) -> None:
    """Add the parts of all ranks to elements `begin` to `end` of x, in the order of the ranks.

    Arguments: x, parts, elements between two parts, number of parts, begin, end.
    """
    x, parts, size, number, begin, end = k.arguments
    lanes = target.lanes

    def add(at: Value, width: int) -> None:
        total = k.variable(parts.vector(at, width))
        with k.range(1, number) as part:
            total.value = total.value + (parts + part * size).vector(at, width)
        x[at] = x.vector(at, width) + total.value

    rest = (end - begin) % lanes
    with k.range(begin, end - rest, lanes) as at:
        add(at, lanes)
    with k.range(end - rest, end) as at:
        add(at, 1)


def emit_rope_store(k: Kernel, target: Target, shape: HeadShape) -> None:
    """Norm and rotate the query and key heads of tokens `begin` to `end`; store keys and values.

    Queries stay in qkv, multiplied with `scale`; a gate may follow each of them. Arguments: qkv,
    heads, kv_heads, q_norm, k_norm, eps, scale (one float32 each), rope, positions, slots, k_cache,
    v_cache, block_size, begin, end.
    """
    (qkv, heads, kv_heads, q_norm, k_norm, eps, scale, rope, positions, slots,
     k_cache, v_cache, block_size, begin, end) = k.arguments  # fmt: skip
    head_dim, unit = shape.head_dim, k.real(1.0)
    before = heads * shape.query_parts  # query heads and gates
    with k.range(begin, end) as token:
        row = qkv + token * ((before + kv_heads * 2) * head_dim)
        angles = rope + positions[token] * shape.rotated
        rotate = partial(_rotate, k, target, shape, angles, eps[0])
        with k.range(0, heads) as head:
            at = row + head * (shape.query_parts * head_dim)
            rotate(at, q_norm, scale[0], at)
        with k.when(slots[token] >= 0), k.range(0, kv_heads) as head:
            block, offset = slots[token] // block_size, slots[token] % block_size
            place = ((block * kv_heads + head) * block_size + offset) * head_dim
            key = row + (before + head) * head_dim
            rotate(key, k_norm, unit, k_cache + place)
            value = row + (before + kv_heads + head) * head_dim
            for at in range(0, head_dim, 16):
                v_cache[place + at] = value.vector(at, 16)


def _rotate(
    k: Kernel,
    target: Target,
    shape: HeadShape,
    angles: Pointer,
    eps: Value,
    head: Pointer,
    weight: Pointer,
    scale: Value,
    to: Pointer,
) -> None:
    """Write the norm of a head, rotated by its token's angles and multiplied with `scale`."""
    half, head_dim = shape.rotated // 2, shape.head_dim
    width = math.gcd(target.lanes, half)
    factor = inverse_rms(k, target, head, k.integer(head_dim), eps)
    for at in range(0, half, width):
        first = head.vector(at, width) * factor * weight.vector(at, width)
        second = head.vector(at + half, width) * factor * weight.vector(at + half, width)
        cos, sin = angles.vector(at, width), angles.vector(at + half, width)
        to[at] = (first * cos - second * sin) * scale
        to[at + half] = (second * cos + first * sin) * scale
    for at in range(2 * half, head_dim, width):
        to[at] = head.vector(at, width) * factor * weight.vector(at, width) * scale
