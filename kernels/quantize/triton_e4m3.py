"""Conversions of e4m3 by integer operations, for GPUs without instructions for it (sm_80, sm_86).

Kernels for these GPUs read and write e4m3 as uint8: Triton has no such type there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import this_device
from penstock.kernels.quantize.types import FP8, LARGEST

_LARGEST = tl.constexpr(LARGEST)
_SUBNORMAL = tl.constexpr(2**-6)  # lower bound of e4m3's normal numbers
_STEPS = tl.constexpr(16384.0)  # float32 has steps of 2**-9 here, as subnormal numbers of e4m3 have
_STEPS_BITS = tl.constexpr(0x46800000)


def as_operand(values: Tensor) -> Tensor:
    """Return the values as kernels take them: e4m3 as uint8 where the GPU can't convert it."""
    if values.dtype == FP8 and not this_device().has_fp8:
        return values.view(torch.uint8)
    return values


@triton.jit
def widen(tile):
    """Return e4m3 in uint8 as float16, which holds all its numbers; other types as they are."""
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        magnitude = bits & 127
        nan = ((magnitude + 1) & 128) * 248  # float16's largest exponent for 127, otherwise 0
        half = ((bits & 128) << 8) | (magnitude << 7) | nan
        return half.to(tl.float16, bitcast=True) * 256.0  # the exponents' biases differ by 8
    else:
        return tile


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return x in dtype; uint8: float32 as e4m3, to nearest even, of up to 448 or NaN."""
    if dtype == tl.uint8:
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 128
        magnitude = tl.minimum(tl.abs(x), _LARGEST)
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # biases differ by 120
        subnormal = (magnitude + _STEPS).to(tl.uint32, bitcast=True) - _STEPS_BITS
        code = tl.where(magnitude < _SUBNORMAL, subnormal, normal)
        return (sign | tl.where(x == x, code, 127)).to(tl.uint8)
    else:
        return x.to(dtype)
