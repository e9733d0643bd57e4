"""RMSNorm per head, RoPE and the store into the paged KV cache, in one Triton kernel.

An 8-bit KV cache (e4m3) has scales; these functions locate, store and read them.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.matrices import LARGEST, SMALLEST
from penstock.kernels.triton_elementwise import as_operand, narrow, widen
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# PTX that converts two pairs of numbers (cvt, prmt): first both lower numbers, then both upper
# numbers
_HALVES = tl.constexpr("""{
    .reg .b16 first, second;
    .reg .b32 x, y;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 x, first;
    cvt.rn.f16x2.e4m3x2 y, second;
    prmt.b32 $0, x, y, 0x5410;
    prmt.b32 $1, x, y, 0x7632;
}""")


@triton.jit
def scale_places(slots, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offsets of head 0's scales in [num_blocks, NUM_KV_HEADS, BLOCK_SIZE]."""
    return slots + slots // BLOCK_SIZE * ((NUM_KV_HEADS - 1) * BLOCK_SIZE)


@triton.jit
def store_scales(
    scale_ptr, absmax, slot, heads, stored, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Store the scales of heads with the absolute maxima `absmax`; return the inverse scales."""
    absmax = tl.maximum(absmax, _SMALLEST)
    places = scale_places(slot, NUM_KV_HEADS, BLOCK_SIZE) + heads * BLOCK_SIZE
    tl.store(scale_ptr + places, absmax / _LARGEST, stored)
    return _LARGEST / absmax


@triton.jit
def halves(pairs, AS_UINT8: tl.constexpr):
    """Return the lower and the upper numbers of int16 pairs as float16.

    The hardware converts to float16 only.

    AS_UINT8: convert by integer operations. A tensor core's operand is transposed in pairs; single
    numbers would be read individually.
    """
    if AS_UINT8:
        return widen((pairs & 255).to(tl.uint8)), widen(((pairs >> 8) & 255).to(tl.uint8))
    elif _INTERPRETED:
        return _number(pairs), _number(pairs >> 8)
    else:
        return tl.inline_asm_elementwise(
            _HALVES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _number(bits):
    return (bits & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


HEADS = 8  # heads of one kind per program
MIN_HEAD_DIM = 16


def qk_norm_rope_store(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor],
    rope: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: KVCache,
    eps: float,
    gated: bool = False,
) -> Tensor:
    """Compute `penstock.kernels.attention.rope.qk_norm_rope_store`.

    weights: norm weights of queries and of keys. Raises ValueError if head_dim is not a power of
    two, or below MIN_HEAD_DIM.
    """
    block_size, num_kv_heads, head_dim = kv_cache.k.shape[1:]
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim: got {head_dim}, expected a power of 2, {MIN_HEAD_DIM} or more")
    num_tokens = qkv.shape[0]
    query_parts = 2 if gated else 1
    num_heads = (qkv.shape[1] // head_dim - 2 * num_kv_heads) // query_parts
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    groups = triton.cdiv(num_heads, HEADS) + 2 * triton.cdiv(num_kv_heads, HEADS)
    if num_tokens:
        _qk_norm_rope_store_kernel[(num_tokens * groups,)](
            qkv, q, as_operand(kv_cache.k), as_operand(kv_cache.v),
            *(kv_cache.scales or (None, None)), *weights, rope, positions, slot_mapping, eps,
            num_heads, num_kv_heads, head_dim, query_parts, rope.shape[1], block_size, HEADS,
            num_warps=max(1, HEADS * head_dim // 512),  # each thread loads 16 bytes of each half
            **LAUNCH,
        )  # fmt: skip
    return q


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, q_weight_ptr, k_weight_ptr,
    rope_ptr, positions_ptr, slot_mapping_ptr, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERY_PARTS: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of one token, all queries, keys or values, in each program.

    QUERY_PARTS: multiples of HEAD_DIM between query heads. ROTATED: features that are rotated.
    """
    launch_dependents()
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    groups: tl.constexpr = q_groups + 2 * kv_groups
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    q_row = qkv_ptr + token * (NUM_HEADS * QUERY_PARTS + 2 * NUM_KV_HEADS) * HEAD_DIM
    k_row = q_row + NUM_HEADS * QUERY_PARTS * HEAD_DIM
    v_row = k_row + NUM_KV_HEADS * HEAD_DIM
    rope_row = rope_ptr + tl.load(positions_ptr + token) * ROTATED
    slot = tl.load(slot_mapping_ptr + token)
    slot_offset = slot * NUM_KV_HEADS * HEAD_DIM
    num_stored = tl.where(slot >= 0, NUM_KV_HEADS, 0)
    if group < q_groups:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        out_row = q_ptr + token * NUM_HEADS * HEAD_DIM
        stored = heads < NUM_HEADS
        a, b = _norm_and_rotate(
            q_row, q_weight_ptr, rope_row, eps, heads, stored, HEAD_DIM, QUERY_PARTS, ROTATED
        )
        _store_halves(out_row, a, b, heads, stored, HEAD_DIM)
    elif group < q_groups + kv_groups:
        heads = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        out_row = k_cache_ptr + slot_offset
        stored = heads < num_stored
        a, b = _norm_and_rotate(
            k_row, k_weight_ptr, rope_row, eps, heads, stored, HEAD_DIM, 1, ROTATED
        )
        if k_scale_ptr is not None:
            top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1, keep_dims=True)
            inverse = store_scales(k_scale_ptr, top, slot, heads, stored, NUM_KV_HEADS, BLOCK_SIZE)
            a, b = a * inverse, b * inverse
        _store_halves(out_row, a, b, heads, stored, HEAD_DIM)
    else:
        heads = (group - q_groups - kv_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        offsets = heads * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        wait()
        stored = heads < num_stored
        v = tl.load(v_row + offsets, stored)
        if v_scale_ptr is not None:
            v = v.to(tl.float32)
            top = tl.max(tl.abs(v), 1, keep_dims=True)
            v *= store_scales(v_scale_ptr, top, slot, heads, stored, NUM_KV_HEADS, BLOCK_SIZE)
        v = narrow(v, v_cache_ptr.dtype.element_ty)
        tl.store(v_cache_ptr + slot_offset + offsets, v, stored)


@triton.jit
def _norm_and_rotate(
    in_row, weight_ptr, rope_row, eps, heads, stored,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Return the float32 halves of some heads of one token; heads, stored: [number of heads, 1].

    PARTS: multiples of HEAD_DIM between heads.
    """
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, half)[None, :]
    offsets = heads * (HEAD_DIM * PARTS) + columns
    first_weight, second_weight = (
        tl.load(weight_ptr + columns),
        tl.load(weight_ptr + half + columns),
    )
    # the pairs lie in both halves of the head, or all in the first half
    turn: tl.constexpr = ROTATED // 2
    is_first, is_turned = columns < turn, columns < ROTATED
    pair = columns if ROTATED == HEAD_DIM else columns % turn
    cos, sin = tl.load(rope_row + pair), tl.load(rope_row + turn + pair)
    wait()
    first = tl.load(in_row + offsets, stored, 0).to(tl.float32)
    second = tl.load(in_row + half + offsets, stored, 0).to(tl.float32)
    square = tl.sum(first * first + second * second, 1, keep_dims=True)
    scale = tl.rsqrt(square / HEAD_DIM + eps)
    dtype: tl.constexpr = in_row.dtype.element_ty
    first = _scaled(first, scale, first_weight, dtype)
    second = _scaled(second, scale, second_weight, dtype)
    if ROTATED == HEAD_DIM:
        return first * cos - second * sin, second * cos + first * sin
    else:
        other = tl.where(is_first, columns + turn, columns - turn)
        weight = tl.load(weight_ptr + other, is_turned, 0)
        x = tl.load(in_row + heads * (HEAD_DIM * PARTS) + other, stored & is_turned, 0)
        x = _scaled(x.to(tl.float32), scale, weight, dtype)
        turned = tl.where(is_first, first * cos - x * sin, first * cos + x * sin)
        return tl.where(is_turned, turned, first), second


@triton.jit
def _store_halves(out_row, first, second, heads, stored, HEAD_DIM: tl.constexpr):
    half: tl.constexpr = HEAD_DIM // 2
    offsets = heads * HEAD_DIM + tl.arange(0, half)[None, :]
    dtype: tl.constexpr = out_row.dtype.element_ty
    tl.store(out_row + offsets, narrow(first, dtype), stored)
    tl.store(out_row + half + offsets, narrow(second, dtype), stored)


@triton.jit
def _scaled(x, scale, weight, dtype: tl.constexpr):
    """Return float32 x * scale, rounded to the weight's type, * weight, rounded to `dtype`."""
    normed = (x * scale).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)
