"""Scores and their Gumbel noise in Triton, in units of log 2.

This unit saves a multiplication, and the winner is the same.
`penstock.kernels.sampling.reference.gumbel_noise` describes the mapping of words to tokens.
"""

import triton
import triton.language as tl

from penstock.kernels.layouts import sampling as layout

RUN = tl.constexpr(4096)
QUARTER = tl.constexpr(1024)
LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
SEED, TEMPERATURE = tl.constexpr(layout.WORD["seed"]), tl.constexpr(layout.WORD["temperature"])
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_2 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def load_float(pointer):
    """Load an int32, and return the float32 with the same bits."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def load_seed(slot_ptr):
    """Load the seed of a slot, whose words begin at the pointer."""
    low = tl.load(slot_ptr + SEED).to(tl.uint32, bitcast=True).to(tl.int64)
    return (tl.load(slot_ptr + (SEED + 1)).to(tl.int64) << 32) | low


@triton.jit
def words(seed, counters, position):
    """Return four random words for each counter: `penstock.kernels.sampling.reference.philox`.

    In contrast, `tl.philox` multiplies twice for the two halves of each product.
    """
    c0 = counters.to(tl.uint32, bitcast=True)
    c1 = c0 * 0 + position.to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * _MULTIPLIER_0
        product_2 = c2.to(tl.uint64) * _MULTIPLIER_2
        c0 = (product_2 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c1 = product_2.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c3 = product_0.to(tl.uint32)
        key_0 = tl.add(key_0, _KEY_STEP_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _log2(x):
    """Compute log2 to within 2**-22 near 1; the exact function takes twenty instructions."""
    if _COMPILED:
        x = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.log2(x)
    return x


@triton.jit
def noise(word):
    """Return Gumbel noise divided by log 2, plus a constant that is equal for all tokens."""
    u = word.to(tl.float32) * 2.0**-32 + 2.0**-33
    # -log(1 - u). The winner is among the smallest values, for which the series is needed.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    logarithm = _log2(tl.maximum(1 - u, 2.0**-24)) * -_LN_2
    return -_log2(tl.where(u < 2.0**-6, series, logarithm))


@triton.jit
def noise_of(ids, seed, position):
    """Return the noise of arbitrary tokens; only one word in four is used."""
    w0, w1, w2, w3 = words(seed, ids // RUN * QUARTER + ids % QUARTER, position)
    quarter = ids // QUARTER % 4
    low, high = tl.where(quarter == 0, w0, w1), tl.where(quarter == 2, w2, w3)
    return noise(tl.where(quarter < 2, low, high))


@triton.jit
def best(scores, ids):
    """Return the largest score and the lowest id with this score."""
    top = tl.max(scores)
    return top, tl.min(tl.where(scores == top, ids, 2**31 - 1))


@triton.jit
def weight(logits, largest, scale):
    """Return the probability relative to the likeliest token."""
    return tl.exp2((logits - largest) * scale)
