"""The state blocks of a step's rows, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

BLOCK = 128  # rows that are compared at a time
_LARGEST = tl.constexpr(2**31 - 1)


def begin(
    packed: Tensor,
    bits: int,
    cu_seqlens_q: Tensor,
    ends: Tensor,
    prompt_ends: Tensor,
    positions: Tensor,
) -> Tensor:
    """Compute `penstock.kernels.layouts.states.States.begin`, all but the first field."""
    num_rows = len(packed)
    stride = triton.cdiv(num_rows, 2) * 2  # Triton compiles kernels again for unaligned pointers
    out = torch.empty(6, stride, dtype=torch.int64, device=packed.device)
    _begin[(num_rows,)](
        packed, cu_seqlens_q, ends, prompt_ends, positions, out, stride, num_rows, len(positions),
        bits, BLOCK, num_warps=1, **LAUNCH,
    )  # fmt: skip
    return out[:, :num_rows]


@triton.jit(do_not_specialize=["stride", "num_rows"])
def _begin(
    packed_ptr, cu_seqlens_q_ptr, ends_ptr, prompt_ends_ptr, positions_ptr, out_ptr, stride,
    num_rows, num_blocks, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the bounds of a row's sequence among all rows, in each program."""
    launch_dependents()
    wait()
    row, mask = tl.program_id(0), (1 << BITS) - 1
    packed = tl.load(packed_ptr + row)
    read, written = (packed >> BITS) - 1, (packed & mask) - 1
    firsts, lasts = tl.full((BLOCK,), _LARGEST, tl.int32), tl.zeros((BLOCK,), tl.int32)
    for some in tl.range(0, num_rows, BLOCK):
        other = some + tl.arange(0, BLOCK)
        exists = other < num_rows
        is_same = exists & ((tl.load(packed_ptr + other, exists, 0) & mask) - 1 == written)
        at, ends = cu_seqlens_q_ptr + other, tl.load(ends_ptr + other, is_same, 0)
        starts = ends - (tl.load(at + 1, is_same, 0) - tl.load(at, is_same, 0))
        firsts = tl.minimum(firsts, tl.where(is_same, starts, _LARGEST))
        lasts = tl.maximum(lasts, ends)
    first = tl.min(firsts, 0)
    bound = tl.load(positions_ptr + read * 2, read >= 0, 0)
    out_ptr += row
    tl.store(out_ptr, read)
    tl.store(out_ptr + stride, written)
    tl.store(out_ptr + 2 * stride, first)
    tl.store(out_ptr + 3 * stride, tl.max(lasts, 0))
    tl.store(out_ptr + 4 * stride, tl.where(read < 0, 0, first - (bound - 1)))
    tl.store(out_ptr + 5 * stride, tl.load(prompt_ends_ptr + row))
    block = tl.where(written < 0, num_blocks - 1, written)
    tl.store(positions_ptr + block * 2, 0)
    tl.store(positions_ptr + block * 2 + 1, 0)


def end(
    written: Tensor, first: Tensor, last: Tensor, decode_lens: Tensor, positions: Tensor
) -> None:
    """Compute `penstock.kernels.layouts.states.States.end`."""
    rows = written, first, last, decode_lens, positions, len(written), len(positions)
    _end[(triton.cdiv(len(written), BLOCK),)](*rows, BLOCK, num_warps=1, **LAUNCH)


@triton.jit(do_not_specialize=["num_rows"])
def _end(
    written_ptr, first_ptr, last_ptr, decode_lens_ptr, positions_ptr, num_rows, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the blocks of BLOCK rows in each program."""
    launch_dependents()
    wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    written, last = tl.load(written_ptr + row, exists, -1), tl.load(last_ptr + row, exists, 0)
    decodes = tl.load(decode_lens_ptr + row, exists, 0) > 0
    first = tl.where(decodes, tl.load(first_ptr + row, exists, 0), last)
    positions_ptr += tl.where(written < 0, num_blocks - 1, written) * 2
    tl.store(positions_ptr, first + 1, exists)
    tl.store(positions_ptr + 1, last + 1, exists)
