"""RMSNorm, SwiGLU's activation, embedding lookup and quantization to 8 bits in Triton.

GPUs without instructions for e4m3 (sm_80, sm_86) convert it by integer operations. Their kernels
read and write e4m3 as uint8, since Triton has no such type on these GPUs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import this_device
from penstock.kernels.matrices import FP8, LARGEST, SMALLEST
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)
_SUBNORMAL = tl.constexpr(2**-6)  # lower bound of e4m3's normal numbers
_STEPS = tl.constexpr(16384.0)  # float32 has steps of 2**-9 here, like subnormal numbers of e4m3
_STEPS_BITS = tl.constexpr(0x46800000)


def as_operand(values: Tensor) -> Tensor:
    """Return the values in the kernels' type: e4m3 as uint8 if the GPU can't convert it."""
    if values.dtype == FP8 and not this_device().has_fp8:
        return values.view(torch.uint8)
    return values


@triton.jit
def widen(tile):
    """Convert e4m3 in uint8 to float16, which is exact; return other types unchanged."""
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
    """Convert x to dtype; uint8: float32 up to 448 or NaN as e4m3, rounded to nearest even."""
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


NORM_MAX_SIZE = 16384  # columns of a row, which one program holds in registers
NORM_TILE = 1024  # minimum elements per program, which processes several short rows
NORM_ELEMENTS_PER_WARP = 256  # 16 bytes of bfloat16 for each thread
COLUMNS = 1024  # columns of one token per program of the activation or the embedding
NUM_WARPS = 4  # each thread reads 16 bytes of bfloat16 from gate and from up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x, contiguous [num_rows, size]. Raises ValueError for size > NORM_MAX_SIZE."""
    num_rows, size = x.shape
    if size > NORM_MAX_SIZE:
        raise ValueError(f"x: got {size} columns, expected at most {NORM_MAX_SIZE}")
    out = torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(size)
        rows = max(1, NORM_TILE // block)
        num_warps = min(16, rows * block // NORM_ELEMENTS_PER_WARP)
        grid = (triton.cdiv(num_rows, rows),)
        _rms_norm_kernel[grid](
            x, weight, out, num_rows, eps, size, block, rows, num_warps=num_warps, **LAUNCH
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of SIZE columns, padded to BLOCK, in each program."""
    launch_dependents()
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, columns < SIZE, 0).to(tl.float32)
    wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = rows.to(tl.int64) * SIZE + columns
    mask = (rows < num_rows) & (columns < SIZE)
    x = tl.load(x_ptr + offsets, mask, 0).to(tl.float32)
    mean_square = tl.sum(x * x, 1, keep_dims=True) / SIZE
    # rounded before the multiplication by the weight, as Qwen3's own implementation does
    normed = (x * tl.rsqrt(mean_square + eps)).to(weight_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offsets, (normed * weight).to(out_ptr.dtype.element_ty), mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute [num_tokens, size] from x, contiguous [num_tokens, 2 * size]."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, size)
    num_programs = num_tokens * triton.cdiv(size, COLUMNS)
    if num_programs:
        _silu_and_mul_kernel[(num_programs,)](x, out, size, COLUMNS, num_warps=NUM_WARPS, **LAUNCH)
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one token in each program."""
    launch_dependents()
    wait()
    programs_per_token: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // programs_per_token).to(tl.int64)
    columns = tl.program_id(0) % programs_per_token * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * 2 * SIZE + columns, mask, 0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * SIZE + SIZE + columns, mask, 0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask)


def sigmoid_and_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Compute `sigmoid(gate) * x`; x: contiguous [num_tokens, heads, size].

    gate: the same shape, with any strides of tokens and heads.
    """
    num_tokens, heads, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    rows = max(1, COLUMNS // block)
    if num_tokens:
        _sigmoid_and_mul_kernel[(triton.cdiv(num_tokens * heads, rows),)](
            gate, *gate.stride()[:2], x, out, num_tokens * heads, heads, size, block, rows,
            num_warps=NUM_WARPS, **LAUNCH,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _sigmoid_and_mul_kernel(
    gate_ptr, token_stride, head_stride, x_ptr, out_ptr, num_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS heads of SIZE values, padded to BLOCK, in each program."""
    launch_dependents()
    wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (columns < SIZE)
    gate_at = row // HEADS * token_stride + row % HEADS * head_stride + columns
    gate = tl.load(gate_ptr + gate_at, mask, 0).to(tl.float32)
    x = tl.load(x_ptr + row * SIZE + columns, mask, 0).to(tl.float32)
    result = x / (1 + tl.exp(-gate))
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask)


def add_gated(
    out: Tensor, x: Tensor, gate_input: Tensor, norm_weight: Tensor, eps: float, gate_weight: Tensor
) -> None:
    """Compute `penstock.kernels.elementwise.add_gated`, a token in each program."""
    num_tokens, size = out.shape
    if num_tokens:
        _add_gated_kernel[(num_tokens,)](
            out, x, gate_input, norm_weight, gate_weight, eps, size, triton.next_power_of_2(size),
            num_warps=8, **LAUNCH,
        )  # fmt: skip


@triton.jit
def _add_gated_kernel(
    out_ptr, x_ptr, input_ptr, norm_ptr, weight_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask, 0).to(tl.float32)
    weight *= tl.load(norm_ptr + columns, mask, 0).to(tl.float32)
    wait()
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    gate_input = tl.load(input_ptr + at, mask, 0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(gate_input * gate_input, 0) / SIZE + eps)
    gate = tl.sum(gate_input * weight, 0) * factor
    x = tl.load(x_ptr + at, mask, 0).to(tl.float32) / (1 + tl.exp(-gate))
    result = tl.load(out_ptr + at, mask, 0).to(tl.float32) + x
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask)


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[input_ids] in 2 µs for 16 rows; torch's lookup takes 13 µs.

    The launch is without programmatic dependent launch: all later kernels then see the results of
    `apply_plan`, the state blocks of the rows, and the states of the last step, even before they
    wait (see `penstock.kernels.triton_pdl`).
    """
    num_tokens, size = input_ids.shape[0], weight.shape[1]
    out = weight.new_empty(num_tokens, size)
    _embedding_kernel[(num_tokens, triton.cdiv(size, COLUMNS))](
        input_ids, weight, out, SIZE=size, BLOCK=COLUMNS, num_warps=4
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embedding_kernel(ids_ptr, weight_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    values = tl.load(weight_ptr + row * SIZE + columns, columns < SIZE)
    tl.store(out_ptr + token * SIZE + columns, values, columns < SIZE)


MAX_SIZE = 32768  # columns of a row, which one program holds in registers
ELEMENTS_PER_WARP = 512


def quantize(
    x: Tensor, norm_weight: Tensor | None, eps: float, swiglu: bool
) -> tuple[Tensor, Tensor]:
    """Return values float8_e4m3fn [num_rows, size] and scales float32 [num_rows].

    x: contiguous [num_rows, size], with swiglu [num_rows, 2 * size]. Raises ValueError if size is
    above MAX_SIZE.
    """
    num_rows, size = x.shape[0], x.shape[1] // (2 if swiglu else 1)
    if size > MAX_SIZE:
        raise ValueError(f"x: got {size} columns, expected at most {MAX_SIZE}")
    values = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        num_warps = min(32, max(1, block // ELEMENTS_PER_WARP))
        _quantize_kernel[(num_rows,)](
            x, norm_weight, as_operand(values), scale, eps, size, block, swiglu,
            num_warps=num_warps, **LAUNCH,
        )  # fmt: skip
    return values, scale


@triton.jit
def _quantize_kernel(
    x, norm_weight, values, scale, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Quantize one row in each program."""
    launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    factor = 1.0
    if norm_weight is not None:
        factor = tl.load(norm_weight + columns, inside, 0).to(tl.float32)
    wait()
    row = tl.program_id(0).to(tl.int64)
    at = x + row * (2 * SIZE if SWIGLU else SIZE) + columns
    result = tl.load(at, inside, 0).to(tl.float32)
    if SWIGLU:
        result = result / (1 + tl.exp(-result)) * tl.load(at + SIZE, inside, 0).to(tl.float32)
    if norm_weight is not None:
        result *= tl.rsqrt(tl.sum(result * result) / SIZE + eps)
        # rounded before the multiplication by the weight, as Qwen3's own implementation does
        result = result.to(norm_weight.dtype.element_ty).to(tl.float32) * factor
    row_scale = tl.maximum(tl.max(tl.abs(result)), _SMALLEST) / _LARGEST
    stored = narrow(result / row_scale, values.dtype.element_ty)
    tl.store(values + row * SIZE + columns, stored, inside)
    tl.store(scale + row, row_scale)
