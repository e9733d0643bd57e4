"""The gated delta rule in Triton: the recurrent form, and the steps of a layer.

Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464). A decoding row's state is read
once and written once, whatever the number of drafts (`penstock.kernels.layouts.states`).

A token's bits depend neither on the window nor on the other rows: one loop applies the tokens of
the window and of the step, each warp adds its products in one order, and no multiplication is
contracted with an addition unless the code says so.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.states import StateStep
from penstock.kernels.recurrent.triton_chunks import apply_chunks
from penstock.kernels.recurrent.triton_inputs import Inputs, num_decoding, prepare
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

# A program is one warp: other numbers of warps were slower, and would add in another order.
LANES, PER_LANE, VALUES = 32, 4, 32  # threads; values of a key in a thread, and in a program
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def gated_delta_rule(
    qkv: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    batch: ForwardBatch,
    state: Sequence[Tensor],
) -> Tensor:
    """Compute `penstock.kernels.recurrent.delta_rule.gated_delta_rule` on a GPU.

    A row that prefills tokens of its prompt follows no window.
    """
    step, (recurrent, *_) = batch.states, state
    if step is None:
        raise ValueError("batch.states: got None, expected the state blocks of the rows")
    inputs = prepare(
        qkv, gates, conv_weight, a_log, dt_bias,
        num_key_heads=num_key_heads, batch=batch, step=step, state=state,
    )  # fmt: skip
    out = qkv.new_empty(len(qkv), recurrent.shape[1], recurrent.shape[3])
    if batch.shape.num_decode:
        apply_tokens(inputs, batch, step, recurrent, out)
    if batch.shape.num_tiles:
        apply_chunks(inputs, batch, step, recurrent, out)
        apply_tokens(inputs, batch, step, recurrent, out, tail=True)
    return out


def apply_tokens(
    inputs: Inputs,
    batch: ForwardBatch,
    step: StateStep,
    recurrent: Tensor,
    out: Tensor,
    *,
    tail: bool = False,
) -> None:
    """Apply tokens one after another, and write their outputs and the states.

    tail: apply the sampled tokens of rows that prefill, instead of the rows that decode.
    """
    (num_tokens, num_heads, size), shape = out.shape, batch.shape
    rows = shape.num_rows if tail else shape.num_decode
    values = min(VALUES, size)
    keys = LANES * PER_LANE // values
    channels = inputs.vectors.shape[1]
    window = (len(inputs.vectors) - num_tokens) // shape.num_rows
    _recurrent_kernel[(size // values, num_heads, rows)](
        inputs.vectors, inputs.gates, recurrent, recurrent.stride(0), out, batch.cu_seqlens_q,
        batch.positions, batch.context_lens, batch.decode_lens, step.read, step.written,
        step.first, step.last, step.window, step.prompt_end, num_tokens, shape.num_decode,
        (channels // size - num_heads) // 2, num_heads, size, window, values, keys, tail,
        num_warps=1, enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_decode"])
def _recurrent_kernel(
    vectors_ptr, gates_ptr, state_ptr, block_stride, out_ptr, cu_seqlens_q_ptr, positions_ptr,
    context_lens_ptr, decode_lens_ptr, read_ptr, written_ptr, first_ptr, last_ptr, window_ptr,
    prompt_end_ptr, num_tokens, num_decode,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Apply the tokens of one sequence to VALUES values of one head in each program."""
    launch_dependents()
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if TAIL:
        wait()  # for the chunks, whose state is read
        begin, num, read, window = _tail(
            row, num_decode, written_ptr, cu_seqlens_q_ptr, positions_ptr, context_lens_ptr,
            decode_lens_ptr, read_ptr, window_ptr, prompt_end_ptr,
        )  # fmt: skip
    else:
        begin, read, window = row, tl.load(read_ptr + row), tl.load(window_ptr + row).to(tl.int32)
        num = num_decoding(row, positions_ptr, decode_lens_ptr, written_ptr, first_ptr, last_ptr)
    if num == 0:
        wait()
        return
    written = tl.load(written_ptr + row)
    # [SIZE / KEYS, KEYS, VALUES]: a thread adds the first dimension, the warp the second
    keys = tl.arange(0, SIZE // KEYS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    values = part * VALUES + tl.arange(0, VALUES)
    offsets = keys[:, :, None] * SIZE + values[None, None, :] + head * (SIZE * SIZE)
    s = tl.load(state_ptr + tl.maximum(read, 0) * block_stride + offsets, read >= 0, 0)
    new_ptr = state_ptr + tl.maximum(written, 0) * block_stride + offsets
    if not TAIL:
        wait()
    end = window + num
    slots, begin = num_tokens + row * WINDOW, begin - window  # of the window, and before the tokens
    slot = tl.where(window > 0, slots, begin)
    q, k, v, beta, g = _token(
        slot, vectors_ptr, gates_ptr, head, keys, values, KEY_HEADS, HEADS, SIZE
    )
    for index in range(window):
        slot = tl.where(index + 1 < window, slots, begin) + index + 1
        after = _token(slot, vectors_ptr, gates_ptr, head, keys, values, KEY_HEADS, HEADS, SIZE)
        decay = tl.exp(g)
        delta = tl.fma(-_product(s, k), decay, v) * beta
        s = tl.fma(k[:, :, None], delta[None, None, :], s * decay)
        q, k, v, beta, g = after
    if not TAIL:
        tl.store(new_ptr, s, written >= 0)
    for index in range(window, end):
        slot = begin + tl.minimum(index + 1, end - 1)
        after = _token(slot, vectors_ptr, gates_ptr, head, keys, values, KEY_HEADS, HEADS, SIZE)
        decay = tl.exp(g)
        delta = tl.fma(-_product(s, k), decay, v) * beta
        answer = tl.fma(delta, tl.sum(tl.sum(q * k, 0), 0), _product(s, q) * decay)
        to_ptr = out_ptr + ((begin + index).to(tl.int64) * HEADS + head) * SIZE + values
        tl.store(to_ptr, answer.to(out_ptr.dtype.element_ty))
        if TAIL or index + 1 < end:
            s = tl.fma(k[:, :, None], delta[None, None, :], s * decay)
        q, k, v, beta, g = after
    if TAIL:
        tl.store(new_ptr, s, written >= 0)


@triton.jit
def _token(
    slot, vectors_ptr, gates_ptr, head, keys, values,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return a slot's query, key, values, beta and g."""
    q_ptr = vectors_ptr + slot.to(tl.int64) * ((2 * KEY_HEADS + HEADS) * SIZE)
    v_ptr = q_ptr + (2 * KEY_HEADS + head) * SIZE + values
    q_ptr += head // (HEADS // KEY_HEADS) * SIZE + keys
    gates_ptr += (slot.to(tl.int64) * HEADS + head) * 2
    q, k = tl.load(q_ptr), tl.load(q_ptr + KEY_HEADS * SIZE)
    return q, k, tl.load(v_ptr), tl.load(gates_ptr), tl.load(gates_ptr + 1)


@triton.jit
def _tail(
    row, num_decode, written_ptr, cu_seqlens_q_ptr, positions_ptr, context_lens_ptr,
    decode_lens_ptr, read_ptr, window_ptr, prompt_end_ptr,
):  # fmt: skip
    """Return a row's first sampled token, the number of them, and the block and window to read.

    The number is 0 for a row that decodes. After tokens of the prompt, the written block is read.
    """
    begin = tl.load(cu_seqlens_q_ptr + row)
    count = tl.load(cu_seqlens_q_ptr + row + 1) - begin
    decodes = tl.load(decode_lens_ptr + row, row < num_decode, 0) > 0
    count = tl.where(decodes | (tl.load(context_lens_ptr + row) == 0), 0, count)
    prompt = tl.load(prompt_end_ptr + row) - tl.load(positions_ptr + begin, count > 0, 0)
    prompt = tl.minimum(tl.maximum(prompt, 0), count).to(tl.int32)
    read = tl.where(prompt > 0, tl.load(written_ptr + row), tl.load(read_ptr + row))
    window = tl.where(prompt > 0, 0, tl.load(window_ptr + row).to(tl.int32))
    return begin + prompt, count - prompt, read, window


@triton.jit
def _product(s, vector):
    """Return the product of the state and a vector of keys: float32 [VALUES]."""
    vector = vector[:, :, None]
    if INTERPRETED:  # which is slow at reductions that it does not know
        return tl.sum(tl.sum(s * vector, 0), 0)
    else:
        sums, _ = tl.reduce((s, tl.broadcast_to(vector, s.shape)), 0, _add_product)
        return tl.sum(sums, 0)


@triton.jit
def _add_product(a, b, c, d):
    """Return a * b + c * d and 1: the compiler sees that b is 1, except for the first time."""
    return tl.fma(c, d, a * b), tl.full((), 1.0, tl.float32)
