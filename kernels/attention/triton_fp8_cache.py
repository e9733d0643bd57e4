"""Reads and writes of a KV cache in 8 bits (e4m3)."""

import triton
import triton.language as tl

from penstock.kernels.quantize.triton_e4m3 import widen
from penstock.kernels.quantize.types import LARGEST, SMALLEST

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# PTX that converts two pairs (cvt, prmt): the two lower numbers, then the two upper numbers
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
    """Return offsets of head 0's scales in [num_blocks, NUM_KV_HEADS, BLOCK_SIZE]."""
    return slots + slots // BLOCK_SIZE * ((NUM_KV_HEADS - 1) * BLOCK_SIZE)


@triton.jit
def store_scales(
    scale_ptr, absmax, slot, heads, stored, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Store the scales of heads whose largest numbers are absmax; return the inverse scales."""
    absmax = tl.maximum(absmax, _SMALLEST)
    places = scale_places(slot, NUM_KV_HEADS, BLOCK_SIZE) + heads * BLOCK_SIZE
    tl.store(scale_ptr + places, absmax / _LARGEST, stored)
    return _LARGEST / absmax


@triton.jit
def halves(pairs, AS_UINT8: tl.constexpr):
    """Return the lower and the upper numbers of int16 pairs as float16, the hardware's target.

    AS_UINT8: by integer operations. A tensor core's operand is transposed in pairs; single numbers
    would be read one by one.
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
