"""Attention of some heads over some keys of a sequence: one program of decode attention."""

import triton
import triton.language as tl

from penstock.kernels.attention.triton_fp8_cache import halves, scale_places
from penstock.kernels.quantize.triton_e4m3 import widen

# factor of a weight times its value's scale, which would be too small for float16; values may still
# reach 28,000
WEIGHT_FACTOR = tl.constexpr(1024.0)


@triton.jit
def attend_keys(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, block_table_ptr, slots, head, begin, end, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """Attend q [16, HEAD_DIM] over keys `begin` to `end` of a sequence.

    slots: of the first tile; head: of keys. Returns float32 [16, HEAD_DIM] and the base 2 logarithm
    of the sum of the weights, [16].
    """
    FP8: tl.constexpr = k_scale_ptr is not None
    stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    k_ptr += head * HEAD_DIM
    v_ptr += head * HEAD_DIM
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    if FP8:
        # float16 holds 8 bits and a normed query, and one instruction converts 8 bits to float16
        q = q.to(tl.float32 if q.dtype == tl.float32 else tl.float16)
        k_scale_ptr += head * BLOCK_SIZE
        v_scale_ptr += head * BLOCK_SIZE
        pairs_ptr = v_ptr.to(tl.pointer_type(tl.int16))
        pairs = tl.arange(0, HEAD_DIM // 2)
        acc = tl.zeros([16, HEAD_DIM // 2], tl.float32)
        upper_acc = tl.zeros([16, HEAD_DIM // 2], tl.float32)
    else:
        acc = tl.zeros([16, HEAD_DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        there = start + tl.arange(0, BLOCK_N) < end
        offsets = slots[:, None] * stride + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, there[:, None], 0.0)
        if FP8:
            places = scale_places(slots, NUM_KV_HEADS, BLOCK_SIZE)
            pair_offsets = slots[:, None] * (stride // 2) + pairs[None, :]
            v = tl.load(pairs_ptr + pair_offsets, there[:, None], 0)
            k_scale = tl.load(k_scale_ptr + places, there, 0.0)
            v_scale = tl.load(v_scale_ptr + places, there, 0.0)
        else:
            v = tl.load(v_ptr + offsets, there[:, None], 0.0)
        # One tile ahead; otherwise the compiler spends a pipeline stage on the slots.
        slots = slots_from(block_table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        scores = tl.dot(q, tl.trans(widen(k).to(q.dtype)), input_precision="ieee")
        scores *= (k_scale * scale_log2)[None, :] if FP8 else scale_log2
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        if FP8:
            lower, upper = halves(v, k.dtype == tl.uint8)
            lower, upper = lower.to(q.dtype), upper.to(q.dtype)
            weights = (weights * (v_scale * WEIGHT_FACTOR)[None, :]).to(q.dtype)
            acc = tl.dot(weights, lower, acc * fade[:, None], input_precision="ieee")
            upper_acc = tl.dot(weights, upper, upper_acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    if FP8:
        acc = tl.interleave(acc, upper_acc) * (1 / WEIGHT_FACTOR)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def slots_from(block_table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return slots of the keys from `start`, int64 [BLOCK_N]: block * BLOCK_SIZE + offset."""
    tokens = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
        block = tl.load(block_table_ptr + start // BLOCK_SIZE, start < end, 0).to(tl.int64)
        return block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    blocks = tl.load(block_table_ptr + tokens // BLOCK_SIZE, tokens < end, 0).to(tl.int64)
    return blocks * BLOCK_SIZE + tokens % BLOCK_SIZE
