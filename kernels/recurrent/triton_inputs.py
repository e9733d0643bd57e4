"""Inputs of the gated delta rule in Triton: convolution, normalization and gates of each token.

A second group of slots holds the tokens of the windows, which the last step left in state blocks.
One formula computes all tokens, so a token's bits are the same in every kind of step.
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
RUN = 16  # tokens in one program: of a prompt, or of a window and a decoding sequence
NUM_WARPS = 4
EPSILON = tl.constexpr(1e-6)  # of the norm of queries and keys


class Inputs(NamedTuple):
    """Inputs of the delta rule in slots.

    First the slots of the step's tokens, then `STATE_WINDOW` slots for the window of each row. A
    slot without a token has any value.
    """

    # float32 [num_slots, channels]: queries and keys, normalized, then values; prompts lack
    # queries and keys
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
        columns = 2 * num_key_heads * size
        narrow = recurrent.new_empty(num_tokens, columns, dtype=torch.float16)
    num_slots = num_tokens + shape.num_rows * window
    vectors = recurrent.new_empty(num_slots, channels)
    out = Inputs(vectors, recurrent.new_empty(num_slots, num_heads, 2), narrow)
    if 2 * window > RUN:
        raise ValueError(f"window: got {window} tokens, expected at most {RUN // 2}")
    num_runs = shape.num_rows + shape.num_tiles * (shape.tile_size // RUN)
    _inputs_kernel[(2 * num_key_heads + num_heads, num_runs)](
        qkv, qkv.stride(0), gates, gates.stride(0), conv_weight, a_log, dt_bias, inputs,
        window_inputs, window_gates, *out, batch.cu_seqlens_q, batch.positions, batch.decode_lens,
        batch.tiles, step.read, step.written, step.first, step.last, step.window, step.prompt_end,
        num_tokens, shape.num_rows, shape.num_decode, num_key_heads, num_heads, size, window,
        shape.tile_size, RUN, num_warps=NUM_WARPS, enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_decode"])
def _inputs_kernel(
    qkv_ptr, qkv_stride, gates_ptr, gates_stride, weight_ptr, a_log_ptr, dt_bias_ptr, inputs_ptr,
    window_ptr, window_gates_ptr, vectors_ptr, gates_out_ptr, narrow_ptr, cu_seqlens_q_ptr,
    positions_ptr, decode_lens_ptr, tiles_ptr, read_ptr, written_ptr, first_ptr, last_ptr,
    window_lens_ptr, prompt_end_ptr, num_tokens, num_rows, num_decode,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Compute one head's queries, keys or values with gates, of a run of tokens (see `_run`)."""
    launch_dependents()
    wait()
    group, run = tl.program_id(0), tl.program_id(1)
    row, place, num, decodes = _run(
        run, num_rows, num_decode, cu_seqlens_q_ptr, positions_ptr, decode_lens_ptr, tiles_ptr,
        read_ptr, written_ptr, first_ptr, last_ptr, window_lens_ptr, TILE, RUN,
    )  # fmt: skip
    if num <= 0:
        return
    begin, end = tl.load(cu_seqlens_q_ptr + row), tl.load(cu_seqlens_q_ptr + row + 1)
    read, written = tl.load(read_ptr + row), tl.load(written_ptr + row)
    window = tl.load(window_lens_ptr + row).to(tl.int32)
    channels: tl.constexpr = (2 * KEY_HEADS + HEADS) * SIZE
    columns = group * SIZE + tl.arange(0, SIZE)[None, :]
    inputs_ptr += columns
    old_ptr, new_ptr = inputs_ptr + read * (3 * channels), inputs_ptr + written * (3 * channels)
    old_window_ptr = window_ptr + read * (WINDOW * channels) + columns
    new_window_ptr = window_ptr + (written * WINDOW - window) * channels + columns
    qkv_ptr += (begin - window).to(tl.int64) * qkv_stride + columns
    places = place + tl.arange(0, RUN)  # count from the first token of the row's window
    exists, is_new, token = places < place + num, places >= window, begin - window + places
    slot = tl.where(is_new, token, num_tokens + row * WINDOW + places).to(tl.int64)
    at, there, keeps = places[:, None], exists[:, None], written >= 0
    source = there, read, window, qkv_ptr, qkv_stride, old_ptr, old_window_ptr, channels
    x0, x1 = _input(at - 3, source), _input(at - 2, source)
    x2, x3 = _input(at - 1, source), _input(at, source)
    x = _convolve(x0, x1, x2, x3, weight_ptr + columns * 4)
    alone = exists  # tokens that are applied one by one
    if group < 2 * KEY_HEADS:
        scale = tl.where(group < KEY_HEADS, SIZE**-0.5, 1.0)
        x *= (scale / tl.sqrt(tl.sum(x * x, 1) + EPSILON))[:, None]
        if narrow_ptr is not None:
            to_ptr = narrow_ptr + slot[:, None] * (2 * KEY_HEADS * SIZE) + columns
            tl.store(to_ptr, x.to(tl.float16), there & is_new[:, None] & ~decodes)
            sampled = tl.load(positions_ptr + token, exists & is_new, 0)
            alone &= decodes | ~is_new | (sampled >= tl.load(prompt_end_ptr + row))
    else:
        _gates(
            slot, exists, is_new, places, window, read, written, keeps & decodes,
            group - 2 * KEY_HEADS, gates_ptr, gates_stride, a_log_ptr, dt_bias_ptr,
            window_gates_ptr, gates_out_ptr, HEADS, WINDOW,
        )  # fmt: skip
    tl.store(vectors_ptr + slot[:, None] * channels + columns, x, alone[:, None])
    tl.store(new_window_ptr + at * channels, x3, there & is_new[:, None] & (keeps & decodes))
    # the inputs before the state's position: before the tokens of a decoding row, or after a chunk
    keeps = there & keeps & (at == tl.where(decodes, window, window + end - begin - 1))
    kept = tl.where(decodes, x0, x1), tl.where(decodes, x1, x2), tl.where(decodes, x2, x3)
    for index in tl.static_range(3):
        tl.store(new_ptr + (at * 0 + index) * channels, kept[index], keeps)


@triton.jit
def _run(
    run, num_rows, num_decode, cu_seqlens_q_ptr, positions_ptr, decode_lens_ptr, tiles_ptr,
    read_ptr, written_ptr, first_ptr, last_ptr, window_lens_ptr, TILE: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Return a run's row, the place of its first token, its number of tokens, and whether the row
    decodes.

    A run: a row's window, with the tokens of its sequence if it decodes; or RUN tokens of a row
    that prefills.
    """
    if run < num_rows:
        row, place = run, 0
        decodes = tl.load(decode_lens_ptr + row, row < num_decode, 0) > 0
        num = tl.load(window_lens_ptr + row, tl.load(read_ptr + row) >= 0, 0).to(tl.int32)
        if decodes:
            sampled = num_decoding(
                row, positions_ptr, decode_lens_ptr, written_ptr, first_ptr, last_ptr
            )
            num = tl.where(sampled > 0, num + sampled, 0)
    else:
        run -= num_rows
        tile_ptr = tiles_ptr + run // (TILE // RUN) * 2
        row, decodes = tl.load(tile_ptr), tl.full((), False, tl.int1)
        start = tl.load(tile_ptr + 1) + run % (TILE // RUN) * RUN
        begin = tl.load(cu_seqlens_q_ptr + row, row >= 0, 0)
        end = tl.load(cu_seqlens_q_ptr + row + 1, row >= 0, 0)
        place = start + tl.load(window_lens_ptr + row, row >= 0, 0).to(tl.int32)
        num = tl.where(row < 0, 0, tl.minimum(end - begin - start, RUN))
    return row, place, num, decodes


@triton.jit
def num_decoding(row, positions_ptr, decode_lens_ptr, written_ptr, first_ptr, last_ptr):
    """Return the tokens of a sequence that decodes if `row` is its first row, otherwise 0."""
    first, is_alone = tl.load(first_ptr + row), tl.load(written_ptr + row) < 0
    leads = is_alone | (tl.load(positions_ptr + row) == first)
    num = tl.where(is_alone, 1, tl.load(last_ptr + row) - first).to(tl.int32)
    return tl.where(leads & (tl.load(decode_lens_ptr + row) > 0), num, 0)


@triton.jit
def _input(places, source):
    """Return inputs: three of the block that is read, then of the window, then of the step."""
    there, read, window, qkv_ptr, qkv_stride, old_ptr, old_window_ptr, channels = source
    of_block = there & (places < 0) & (read >= 0)
    of_window = there & (places >= 0) & (places < window)
    x = tl.load(old_ptr + (places + 3) * channels, of_block, 0)
    x += tl.load(old_window_ptr + places * channels, of_window, 0)
    step = tl.load(qkv_ptr + places * qkv_stride, there & (places >= 0) & (places >= window), 0)
    return x + step.to(tl.float32)


@triton.jit
def _convolve(x0, x1, x2, x3, weight_ptr):
    """Return SiLU of the convolution."""
    x = x0 * tl.load(weight_ptr).to(tl.float32)
    x = tl.fma(x1, tl.load(weight_ptr + 1).to(tl.float32), x)
    x = tl.fma(x2, tl.load(weight_ptr + 2).to(tl.float32), x)
    x = tl.fma(x3, tl.load(weight_ptr + 3).to(tl.float32), x)
    return x / (1 + tl.exp(-x))


@triton.jit
def _gates(
    slot, exists, is_new, places, window, read, written, keeps, head, gates_ptr, gates_stride,
    a_log_ptr, dt_bias_ptr, window_gates_ptr, out_ptr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Write beta and g of slots: of tokens of the step, to be kept, or those of the window."""
    block, place = tl.where(is_new, written, read), places - tl.where(is_new, window, 0)
    kept_ptr = window_gates_ptr + ((block * HEADS + head) * WINDOW + place) * 2
    is_old, is_new = exists & ~is_new, exists & is_new
    old_beta, old_g = tl.load(kept_ptr, is_old, 0), tl.load(kept_ptr + 1, is_old, 0)
    gates_ptr += slot * gates_stride + head
    b = tl.load(gates_ptr, is_new, 0).to(tl.float32)
    a = tl.load(gates_ptr + HEADS, is_new, 0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    # softplus, also where the exponential is lost in the sum (Kahan's log1p)
    small = tl.exp(-tl.abs(a))
    total = 1 + small
    log = tl.log(total) * (small / tl.where(total == 1, 1, total - 1))
    softplus = tl.maximum(a, 0) + tl.where(total == 1, small, log)
    beta, g = 1 / (1 + tl.exp(-b)), -tl.exp(tl.load(a_log_ptr + head)) * softplus
    tl.store(kept_ptr, beta, keeps & is_new)
    tl.store(kept_ptr + 1, g, keeps & is_new)
    out_ptr += (slot * HEADS + head) * 2
    tl.store(out_ptr, tl.where(is_new, beta, old_beta), exists)
    tl.store(out_ptr + 1, tl.where(is_new, g, old_g), exists)
