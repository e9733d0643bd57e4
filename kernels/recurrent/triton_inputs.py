"""Inputs of the gated delta rule in Triton: convolution, normalization and gates of each token.

A second group of slots holds the tokens of the windows, which the last step left in state blocks.
One loop computes all tokens, so a token's bits are the same in every kind of step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.argument_checks import check_tensor
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.states import StateStep
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

TAPS = 4  # inputs of the convolution
MIN_SIZE = 16  # of a head, for tensor cores
RUN = 16  # tokens of a chunk of prefill in one program; at least TAPS - 1, and the window
UNROLLED = tl.constexpr(4)  # tokens of such a run whose computations overlap
EPSILON = tl.constexpr(1e-6)  # of the norm of queries and keys


class Inputs(NamedTuple):
    """Inputs of the delta rule in slots.

    First the slots of the step's tokens, then `STATE_WINDOW` slots for the window of each row. A
    slot without a token has any value.
    """

    # float32 [num_slots, channels]: queries and keys, normalized, then values; any queries and keys
    # of the prompts' tokens
    vectors: Tensor
    gates: Tensor  # float32 [num_slots, heads, 2]: beta and g, the logarithm of the decay
    # float16 [num_tokens, 2 * key_heads * size]: queries and keys of the tokens that prefill
    narrow: Tensor | None


def prepare(
    qkv: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    batch: ForwardBatch,
    step: StateStep,
    state: Sequence[Tensor],
) -> Inputs:
    """Return the inputs of the step's tokens and windows; keep what the next step needs of them.

    Writes all of a layer's state but its first tensor. Arguments are as in `gated_delta_rule`.
    Raises ValueError unless keys have the size of values, a power of two from 16, and the
    convolution has TAPS inputs.
    """
    recurrent, inputs, window_inputs, window_gates = state
    _, num_heads, _, size = recurrent.shape
    window, channels = window_inputs.shape[1:]
    check_tensor("recurrent state", recurrent, (-1, num_heads, size, size))
    if size < MIN_SIZE or size & (size - 1):
        raise ValueError(f"head size: got {size}, expected a power of 2, {MIN_SIZE} or more")
    check_tensor("conv_weight", conv_weight, (channels, TAPS), qkv.dtype)
    shape, num_tokens, narrow = batch.shape, len(qkv), None
    if shape.num_tiles:
        narrow = recurrent.new_empty(num_tokens, 2 * num_key_heads * size, dtype=torch.float16)
    num_slots = num_tokens + shape.num_rows * window
    vectors = recurrent.new_empty(num_slots, channels)
    out = Inputs(vectors, recurrent.new_empty(num_slots, num_heads, 2), narrow)
    num_runs = shape.num_decode + shape.num_tiles * (shape.tile_size // RUN)
    _inputs_kernel[(2 * num_key_heads + num_heads, num_runs)](
        qkv, qkv.stride(0), gates, gates.stride(0), conv_weight, a_log, dt_bias, inputs,
        window_inputs, window_gates, recurrent.stride(0), *out, batch.cu_seqlens_q,
        batch.positions, batch.decode_lens, batch.tiles, step.read, step.written, step.first,
        step.last, step.window, step.prompt_end, num_tokens, shape.num_decode, num_key_heads,
        num_heads, size, window, shape.tile_size, RUN,
        num_warps=1, enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_decode"])
def _inputs_kernel(
    qkv_ptr, qkv_stride, gates_ptr, gates_stride, weight_ptr, a_log_ptr, dt_bias_ptr, inputs_ptr,
    window_ptr, window_gates_ptr, block_stride, vectors_ptr, gates_out_ptr, narrow_ptr,
    cu_seqlens_q_ptr, positions_ptr, decode_lens_ptr, tiles_ptr, read_ptr, written_ptr, first_ptr,
    last_ptr, window_lens_ptr, prompt_end_ptr, num_tokens, num_decode,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Compute one head's queries, keys, or values with gates, of a run (`_tokens_of`)."""
    launch_dependents()
    group, run = tl.program_id(0), tl.program_id(1)
    row, start, begin, num, num_chunked, is_last = _tokens_of(
        run, num_decode, cu_seqlens_q_ptr, positions_ptr, decode_lens_ptr, tiles_ptr, written_ptr,
        first_ptr, last_ptr, prompt_end_ptr, TILE, RUN,
    )  # fmt: skip
    if num <= 0:
        wait()
        return
    read, written = tl.load(read_ptr + row), tl.load(written_ptr + row)
    window = tl.where(start > 0, 0, tl.load(window_lens_ptr + row).to(tl.int32))
    channels: tl.constexpr = (2 * KEY_HEADS + HEADS) * SIZE
    columns = group * SIZE + tl.arange(0, SIZE)
    read_at, written_at = read * block_stride, written * block_stride
    old_ptr, new_ptr = inputs_ptr + read_at + columns, inputs_ptr + written_at + columns
    old_window_ptr = window_ptr + read_at + columns
    qkv_ptr += (begin - window).to(tl.int64) * qkv_stride + columns
    decodes, keeps, head = run < num_decode, written >= 0, tl.maximum(group - 2 * KEY_HEADS, 0)
    is_key, scale = group < 2 * KEY_HEADS, tl.where(group < KEY_HEADS, SIZE**-0.5, 1.0)
    # weights, plan and state are older: see `penstock.kernels.triton_elementwise.embedding`
    w0, w1, w2, w3 = _taps(weight_ptr + columns * 4)
    rate, bias = -tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head)
    x0, x1, x2 = _add_three(0.0, 0.0, 0.0, old_ptr, channels, (start == 0) & (read >= 0))
    wait()
    x0, x1, x2 = _add_three(x0, x1, x2, qkv_ptr - 3 * qkv_stride, qkv_stride, start > 0)
    last = window + num - 1
    x3, x4, x5, x6 = _first_inputs(last, window, qkv_ptr, qkv_stride, old_window_ptr, channels)
    if not is_key:
        _gates(
            begin, window, last, num_tokens + row * WINDOW, head, read_at, written_at,
            keeps & decodes, gates_ptr, gates_stride, rate, bias, window_gates_ptr, gates_out_ptr,
            HEADS, WINDOW, 2 * RUN,
        )  # fmt: skip
    for index in tl.range(window + num, loop_unroll_factor=1 if narrow_ptr is None else UNROLLED):
        x7 = _input(index + 4, last, window, qkv_ptr, qkv_stride, old_window_ptr, channels)
        is_new = index >= window
        slot = (tl.where(is_new, begin - window, num_tokens + row * WINDOW) + index).to(tl.int64)
        x = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
        x /= 1 + tl.exp(-x)
        if is_key:
            x *= 1 / tl.sqrt(tl.sum(x * x) + EPSILON) * scale
        is_read = ~(is_key & is_new & (index < window + num_chunked))
        tl.store(vectors_ptr + slot * channels + columns, x, is_read)
        if narrow_ptr is not None:
            to_ptr = narrow_ptr + slot * (2 * KEY_HEADS * SIZE) + columns
            tl.store(to_ptr, x.to(tl.float16), is_key & is_new & ~decodes)
        kept_ptr = window_ptr + written_at + (index - window) * channels + columns
        tl.store(kept_ptr, x3, keeps & decodes & is_new)
        _keep(new_ptr, x0, x1, x2, channels, keeps & decodes & (index == window))
        x0, x1, x2, x3, x4, x5, x6 = x1, x2, x3, x4, x5, x6, x7
    _keep(new_ptr, x0, x1, x2, channels, keeps & is_last)


@triton.jit
def _tokens_of(
    run, num_decode, cu_seqlens_q_ptr, positions_ptr, decode_lens_ptr, tiles_ptr, written_ptr,
    first_ptr, last_ptr, prompt_end_ptr, TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return a run's row, place in the row, first token, numbers of tokens, and whether it is last.

    The second number is of tokens that are computed in chunks, also of those after the run. Last: a
    run that ends a chunk of prefill.

    A run: window and tokens of a sequence that decodes, or RUN tokens of a chunk after its window.
    """
    if run < num_decode:
        num = num_decoding(run, positions_ptr, decode_lens_ptr, written_ptr, first_ptr, last_ptr)
        row, start, begin, is_last = run, 0, run, False
        num_chunked = tl.zeros_like(num)
    else:
        tile_ptr = tiles_ptr + (run - num_decode) // (TILE // RUN) * 2
        row = tl.load(tile_ptr)
        start = tl.load(tile_ptr + 1) + (run - num_decode) % (TILE // RUN) * RUN
        begin = tl.load(cu_seqlens_q_ptr + row, row >= 0, 0)
        end = tl.load(cu_seqlens_q_ptr + row + 1, row >= 0, 0)
        begin += start
        num = tl.where(row < 0, 0, tl.minimum(end - begin, RUN))
        is_last = begin + num == end
        position = tl.load(positions_ptr + begin, num > 0, 0)
        num_chunked = (tl.load(prompt_end_ptr + row, num > 0, 0) - position).to(tl.int32)
    return row, start, begin, num, num_chunked, is_last


@triton.jit
def num_decoding(row, positions_ptr, decode_lens_ptr, written_ptr, first_ptr, last_ptr):
    """Return the tokens of a sequence that decodes if `row` is its first row, otherwise 0."""
    first, is_alone = tl.load(first_ptr + row), tl.load(written_ptr + row) < 0
    leads = is_alone | (tl.load(positions_ptr + row) == first)
    num = tl.where(is_alone, 1, tl.load(last_ptr + row) - first).to(tl.int32)
    return tl.where(leads & (tl.load(decode_lens_ptr + row) > 0), num, 0)


@triton.jit
def _taps(ptr):
    """Return the weights of the convolution, from the oldest input's."""
    w0, w1 = tl.load(ptr).to(tl.float32), tl.load(ptr + 1).to(tl.float32)
    return w0, w1, tl.load(ptr + 2).to(tl.float32), tl.load(ptr + 3).to(tl.float32)


@triton.jit
def _add_three(x0, x1, x2, ptr, stride, exist):
    """Add three inputs, from the oldest, if they exist."""
    x0 += tl.load(ptr, exist, 0).to(tl.float32)
    x1 += tl.load(ptr + stride, exist, 0).to(tl.float32)
    return x0, x1, x2 + tl.load(ptr + 2 * stride, exist, 0).to(tl.float32)


@triton.jit
def _first_inputs(last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS: tl.constexpr):
    """Return the first four inputs of a run."""
    x0 = _input(0, last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS)
    x1 = _input(1, last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS)
    x2 = _input(2, last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS)
    return x0, x1, x2, _input(3, last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS)


@triton.jit
def _input(index, last, window, qkv_ptr, qkv_stride, old_window_ptr, CHANNELS: tl.constexpr):
    """Return the input of a token of the window or, after it, of the step; at most the last one."""
    index = tl.minimum(index, last)
    x = tl.load(old_window_ptr + index * CHANNELS, index < window, 0)
    return x + tl.load(qkv_ptr + index * qkv_stride, index >= window, 0).to(tl.float32)


@triton.jit
def _keep(to_ptr, x0, x1, x2, CHANNELS: tl.constexpr, keeps):
    """Store the inputs before a state's position."""
    tl.store(to_ptr, x0, keeps)
    tl.store(to_ptr + CHANNELS, x1, keeps)
    tl.store(to_ptr + 2 * CHANNELS, x2, keeps)


@triton.jit
def _gates(
    begin, window, last, window_slot, head, read_at, written_at, keeps, gates_ptr, gates_stride,
    rate, bias, window_gates_ptr, out_ptr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Write beta and g of a run's slots: of tokens of the step, to be kept, and of the window."""
    index = tl.arange(0, SLOTS)
    is_old, is_new = index < window, (index >= window) & (index <= last)
    slot = (tl.where(is_new, begin - window, window_slot) + index).to(tl.int64)
    place = index - tl.where(is_new, window, 0)
    kept_ptr = window_gates_ptr + tl.where(is_new, written_at, read_at)
    kept_ptr += (head * WINDOW + place) * 2
    beta, g = tl.load(kept_ptr, is_old, 0), tl.load(kept_ptr + 1, is_old, 0)
    gates_ptr += slot * gates_stride + head
    b = tl.load(gates_ptr, is_new, 0).to(tl.float32)
    a = tl.load(gates_ptr + HEADS, is_new, 0).to(tl.float32) + bias
    # softplus, also where the exponential is lost in the sum (Kahan's log1p)
    small = tl.exp(-tl.abs(a))
    total = 1 + small
    log = tl.log(total) * (small / tl.where(total == 1, 1, total - 1))
    softplus = tl.maximum(a, 0) + tl.where(total == 1, small, log)
    beta = tl.where(is_new, 1 / (1 + tl.exp(-b)), beta)
    g = tl.where(is_new, rate * softplus, g)
    tl.store(kept_ptr, beta, keeps & is_new)
    tl.store(kept_ptr + 1, g, keeps & is_new)
    out_ptr += (slot * HEADS + head) * 2
    tl.store(out_ptr, beta, is_new | is_old)
    tl.store(out_ptr + 1, g, is_new | is_old)
