"""The gated delta rule over the chunks of prompts, in Triton.

The WY form of Yang et al. 2024 (https://arxiv.org/abs/2412.06464, section 3.3). Within a chunk with
queries Q, keys K, values V, decays accumulated to `G`, and `D[i, j] = exp(G[i] - G[j])` for j <= i:

    T = inverse(I + strictly_lower(diag(beta) K K^T * D))
    U = T diag(beta) V;  W = T diag(beta) diag(exp(G)) K;  N = U - W S
    out = diag(exp(G)) Q S + (Q K^T * D) N;  S' = exp(G[-1]) S + K^T diag(exp(G[-1] - G)) N

One kernel computes all chunks' U, W and weights `Q K^T * D`; a second one walks over the chunks.
Tensor cores multiply in float16, which has the 11 bits of TF32, and add in float32. Q, K, T, W and
the weights are at most 1, since no token makes a state larger along its key. U, N and the state
have the range of values: they stay in float32, and are divided by RANGE for products.

A chunk begins at a multiple of CHUNK from the sequence's start, or where the step begins. Its bits
do not depend on other rows, nor on how a prompt is divided into steps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.device import this_device
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.states import StateStep
from penstock.kernels.recurrent.triton_inputs import Inputs
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

CHUNK = tl.constexpr(64)
BASE = tl.constexpr(16)  # rows of the blocks that are inverted by substitution
RANGE = tl.constexpr(16.0)  # values up to 2**20 do not overflow


class ChunkTuning(NamedTuple):
    """Launch parameters, which change only the speed."""

    num_stages: int = 2  # chunks that are loaded at the same time
    values: int = 64  # values of a head in a program that walks over the chunks
    num_warps: int = 4
    chunk_warps: int = 4  # of a program for one chunk

    def shared_bytes(self, size: int) -> int:
        """Return the bytes of shared memory for heads of `size`."""
        chunk: int = CHUNK.value
        loaded = 3 * size * 2 + chunk * 2 + self.values * 4
        products = (size + chunk) * self.values * 2
        return self.num_stages * chunk * loaded + products


TUNINGS = ChunkTuning(), ChunkTuning(num_stages=1, num_warps=8)


def apply_chunks(
    inputs: Inputs,
    batch: ForwardBatch,
    step: StateStep,
    recurrent: Tensor,
    out: Tensor,
    tuning: ChunkTuning | None = None,
) -> None:
    """Apply the prompt's tokens of the rows that prefill; write their outputs and the states.

    Such a row follows no window.
    """
    tiles, tile_size = batch.tiles, batch.shape.tile_size
    num_tokens, num_heads, size = out.shape
    tuning = tuning or this_device().fitting(TUNINGS, lambda tuning: tuning.shared_bytes(size))
    w = recurrent.new_empty(num_tokens, num_heads, size, dtype=torch.float16)
    u = recurrent.new_empty(num_tokens, num_heads, size)
    weights = recurrent.new_empty(num_tokens, num_heads, CHUNK.value, dtype=torch.float16)
    sums = recurrent.new_empty(num_tokens, num_heads)
    rows = batch.cu_seqlens_q, batch.positions, step.prompt_end
    sizes = (inputs.vectors.shape[1] // size - num_heads) // 2, num_heads, size
    _chunk_kernel[(num_heads, len(tiles) * (tile_size // CHUNK.value))](
        inputs.vectors, inputs.narrow, inputs.gates, w, u, weights, sums, tiles, *rows, *sizes,
        tile_size, num_warps=tuning.chunk_warps, num_stages=1, **LAUNCH,
    )  # fmt: skip
    values = min(tuning.values, size)
    _walk_kernel[(size // values, num_heads, len(step.read))](
        inputs.narrow, w, u, weights, sums, recurrent, recurrent.stride(0), out, *rows,
        batch.context_lens, batch.decode_lens, step.read, step.written, batch.shape.num_decode,
        *sizes, values, num_warps=tuning.num_warps, num_stages=tuning.num_stages, **LAUNCH,
    )  # fmt: skip


@triton.jit
def _prompt(row, cu_seqlens_q_ptr, positions_ptr, prompt_end_ptr):
    """Return a row's first token, its number of tokens, how many of them belong to the prompt, and
    the first one's place in its chunk."""
    begin = tl.load(cu_seqlens_q_ptr + row)
    count = tl.load(cu_seqlens_q_ptr + row + 1) - begin
    position = tl.load(positions_ptr + begin, count > 0, 0)
    num = tl.maximum(tl.load(prompt_end_ptr + row) - position, 0)
    return begin, count, tl.minimum(num, count).to(tl.int32), (position % CHUNK).to(tl.int32)


@triton.jit
def _bounds(chunk, offset, num):
    """Return the first of a row's tokens in a chunk, and the end of them."""
    begin = -offset + chunk * CHUNK
    return tl.maximum(begin, 0), tl.minimum(begin + CHUNK, num)


@triton.jit
def _chunk_kernel(
    vectors_ptr, narrow_ptr, gates_ptr, w_ptr, u_ptr, weights_ptr, sums_ptr,
    tiles_ptr, cu_seqlens_q_ptr, positions_ptr, prompt_end_ptr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute W, U, the weights and accumulated decays of one chunk and head in each program.

    A row whose first token is not the first of a chunk has one chunk more than it has tiles; the
    last tile's program computes it.
    """
    launch_dependents()
    wait()
    head, place = tl.program_id(0), tl.program_id(1)
    per_tile: tl.constexpr = TILE // CHUNK
    row = tl.load(tiles_ptr + place // per_tile * 2)
    if row < 0:
        return
    tile_begin = tl.load(tiles_ptr + place // per_tile * 2 + 1)
    begin, count, num, offset = _prompt(row, cu_seqlens_q_ptr, positions_ptr, prompt_end_ptr)
    chunk = tile_begin // CHUNK + place % per_tile
    end = tl.where(num > 0, tl.cdiv(offset + num, CHUNK), 0)
    is_last = (tile_begin + TILE >= count) & (place % per_tile == per_tile - 1)
    end = tl.where(is_last, end, tl.minimum(end, chunk + 1))
    stride: tl.constexpr = 2 * KEY_HEADS * SIZE + HEADS * SIZE
    key_head = head // (HEADS // KEY_HEADS)
    row_of, keys, values = tl.arange(0, CHUNK), tl.arange(0, SIZE), tl.arange(0, SIZE)
    within, column, keys, values = row_of[:, None], row_of[None, :], keys[None, :], values[None, :]
    q_ptr = narrow_ptr + key_head * SIZE + within * (2 * KEY_HEADS * SIZE) + keys
    v_ptr = vectors_ptr + 2 * KEY_HEADS * SIZE + head * SIZE + within * stride + values
    w_ptr += head * SIZE + within * (HEADS * SIZE) + keys
    u_ptr += head * SIZE + within * (HEADS * SIZE) + values
    weights_ptr += head * CHUNK + within * (HEADS * CHUNK) + column
    for index in tl.range(chunk, end, num_stages=1):
        start, stop = _bounds(index, offset, num)
        token = (begin + start).to(tl.int64)
        there = start + row_of < stop
        at = (token + row_of) * HEADS + head
        beta, g = tl.load(gates_ptr + at * 2, there, 0), tl.load(gates_ptr + at * 2 + 1, there, 0)
        g = tl.cumsum(g, 0)
        tl.store(sums_ptr + at, g, there)
        decay = tl.exp(tl.where(within >= column, g[:, None] - g[None, :], float("-inf")))
        there = there[:, None]
        from_ptr = q_ptr + token * (2 * KEY_HEADS * SIZE)
        q, k = tl.load(from_ptr, there, 0), tl.load(from_ptr + KEY_HEADS * SIZE, there, 0)
        weights = (tl.dot(q, tl.trans(k)) * decay).to(tl.float16)
        tl.store(weights_ptr + token * (HEADS * CHUNK), weights, there)
        a = tl.dot(k, tl.trans(k)) * beta[:, None] * decay
        t = _inverse(tl.where(within > column, a, 0)).to(tl.float16)
        w = tl.dot(t, (k * (beta * tl.exp(g))[:, None]).to(tl.float16)).to(tl.float16)
        tl.store(w_ptr + token * (HEADS * SIZE), w, there)
        v = tl.load(v_ptr + token * stride, there, 0)
        u = tl.dot(t, _narrow(v * (beta / RANGE)[:, None]))
        tl.store(u_ptr + token * (HEADS * SIZE), u, there)


@triton.jit
def _narrow(x):
    """Return x in float16; numbers beyond its range become its largest ones."""
    return tl.clamp(x, -65504.0, 65504.0).to(tl.float16)


@triton.jit
def _inverse(a):
    """Return the inverse of I + a; a: [CHUNK, CHUNK], strictly lower triangular.

    Blocks of BASE rows on the diagonal by substitution, then twice as many rows at a time:
    inverse([[x, 0], [y, z]]) = [[x', 0], [-z' y x', z']].
    """
    BLOCKS: tl.constexpr = CHUNK // BASE
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    t = tl.where(row // BASE == column // BASE, -a, 0)
    t = tl.sum(tl.reshape(t, (CHUNK, BLOCKS, BASE)), 1)
    t = tl.reshape(t, (BLOCKS, BASE, BASE))
    within = tl.arange(0, BASE)[None, :, None]
    for index in range(2, BASE):
        x = tl.sum(tl.where(within == index, t, 0), 1)
        x += tl.sum(x[:, :, None] * t, 1)
        t = tl.where(within == index, x[:, None, :], t)
    t = tl.broadcast_to(tl.reshape(t, (CHUNK, 1, BASE)), (CHUNK, BLOCKS, BASE))
    t = tl.where(row // BASE == column // BASE, tl.reshape(t, (CHUNK, CHUNK)), 0)
    t = tl.where(row == column, 1.0, t)
    return _join(_join(t, a, BASE), a, 2 * BASE)


@triton.jit
def _join(t, a, SIZE: tl.constexpr):
    """Return the inverse of blocks of 2 * SIZE rows of I + a, from that of blocks of SIZE rows."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE > column // SIZE)
    half = t.to(tl.float16)
    y = tl.dot(half, tl.where(below, a, 0).to(tl.float16))
    return t - tl.dot(y.to(tl.float16), half)


@triton.jit(do_not_specialize=["num_decode"])
def _walk_kernel(
    narrow_ptr, w_ptr, u_ptr, weights_ptr, sums_ptr, state_ptr, block_stride, out_ptr,
    cu_seqlens_q_ptr, positions_ptr, prompt_end_ptr, context_lens_ptr, decode_lens_ptr,
    read_ptr, written_ptr, num_decode,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Apply a row's chunks one after another to VALUES values of one head in each program."""
    launch_dependents()
    wait()
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    decodes = tl.load(decode_lens_ptr + row, row < num_decode, 0) > 0
    begin, _, num, offset = _prompt(row, cu_seqlens_q_ptr, positions_ptr, prompt_end_ptr)
    if decodes | (tl.load(context_lens_ptr + row) == 0) | (num == 0):
        return
    read, written = tl.load(read_ptr + row), tl.load(written_ptr + row)
    keys, values = tl.arange(0, SIZE), part * VALUES + tl.arange(0, VALUES)[None, :]
    offsets = head * (SIZE * SIZE) + keys[:, None] * SIZE + values
    block = tl.maximum(read, 0) * block_stride
    s = tl.load(state_ptr + block + offsets, read >= 0, 0) / RANGE
    row_of, keys = tl.arange(0, CHUNK), keys[None, :]
    within = row_of[:, None]
    q_ptr = narrow_ptr + head // (HEADS // KEY_HEADS) * SIZE
    q_ptr += within * (2 * KEY_HEADS * SIZE) + keys
    w_ptr += head * SIZE + within * (HEADS * SIZE) + keys
    u_ptr += head * SIZE + within * (HEADS * SIZE) + values
    out_ptr += head * SIZE + within * (HEADS * SIZE) + values
    weights_ptr += head * CHUNK + within * (HEADS * CHUNK) + row_of[None, :]
    sums_ptr += head + row_of * HEADS
    for index in range(tl.cdiv(offset + num, CHUNK)):
        start, end = _bounds(index, offset, num)
        there, token = start + within < end, (begin + start).to(tl.int64)
        w = tl.load(w_ptr + token * (HEADS * SIZE), there, 0)
        u = tl.load(u_ptr + token * (HEADS * SIZE), there, 0)
        q = tl.load(q_ptr + token * (2 * KEY_HEADS * SIZE), there, 0)
        k = tl.load(q_ptr + (token * 2 + 1) * (KEY_HEADS * SIZE), there, 0)
        weights = tl.load(weights_ptr + token * (HEADS * CHUNK), there, 0)
        g = tl.load(sums_ptr + token * HEADS, start + row_of < end, 0)
        last = tl.sum(tl.where(start + row_of == end - 1, g, 0))
        half = _narrow(s)
        u -= tl.dot(w, half)
        answer = tl.dot(q, half) * tl.exp(g)[:, None]
        answer = tl.dot(weights, _narrow(u), answer) * RANGE
        answer = answer.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (HEADS * SIZE), answer, there)
        u *= tl.exp(tl.where(start + row_of < end, last - g, 0))[:, None]
        s = tl.dot(tl.trans(k), _narrow(u), s * tl.exp(last))
    if written >= 0:
        tl.store(state_ptr + written * block_stride + offsets, s * RANGE)
