"""The recurrent state of sequences, in state blocks.

A state block holds the state of one sequence in all layers. A step reads a row's block and writes
another, so a whole state always remains: of the last step, or of the step before. Which blocks a
row reads and writes comes with the plan; the blocks of a row that decodes alternate.

Late commit: a row that decodes, with drafts or without, writes the state *before* its tokens and
keeps what its tokens would add, their window. The next step first adds the tokens of the window
that it follows: those were right. So a wrong draft needs no roll-back. A chunk of prefill writes
the state after its tokens, which are certain.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_STATE_BLOCKS = (1 << 15) - 2
_BITS = 16  # of each block in a packed pair


def pack_states(read: Any, written: Any) -> Any:
    """Return integers, or arrays of them, with the blocks that rows read and write; -1: none."""
    return (read + 1) << _BITS | (written + 1)


class StateStep(NamedTuple):
    """The state blocks of a step's rows. Rows of one draft have the same blocks."""

    layers: list[list[Tensor]]  # as in `States`
    read: Tensor  # int64 [num_rows]: block that each row reads; -1: the state is zero
    # int64 [num_rows]: block that each row writes; -1: a padded row, or a row of a step that only
    # measures memory, where each row is a sequence of its own and keeps nothing
    written: Tensor
    first: Tensor  # int64 [num_rows]: position of the first token of the row's sequence in the step
    last: Tensor  # int64 [num_rows]: position after the last token of the row's sequence
    # int64 [num_rows]: tokens of the window in the block that is read that precede `first`: the
    # layer adds them to the state first
    window: Tensor
    # int64 [num_rows]: position after the last token of the sequence's prompt, for a row that does
    # not decode; later tokens were sampled, and are computed again in the order of decoding
    prompt_end: Tensor


class States(NamedTuple):
    """State blocks of a rank. The last block takes the writes of padded rows."""

    # int32 [num_blocks + 1, 2]: positions after which a sequence can continue from a block, first
    # and last, each plus 1; 0: the block is being written, or was never written
    positions: Tensor
    layers: list[list[Tensor]]  # by layer with state: float32 tensors [num_blocks + 1, ...]

    def begin(
        self, packed: Tensor, cu_seqlens_q: Tensor, ends: Tensor, prompt_ends: Tensor
    ) -> StateStep:
        """Begin a step: mark the blocks that rows write as incomplete.

        packed: int32 [num_rows], from `pack_states`. cu_seqlens_q: int32 [num_rows + 1], index of
        each row's first token in the step. ends: int32 [num_rows], position after each row's last
        token. prompt_ends: [num_rows], see `StateStep`.
        """
        if packed.is_cuda:
            from penstock.kernels import triton_states

            rows = packed, _BITS, cu_seqlens_q, ends, prompt_ends
            return StateStep(self.layers, *triton_states.begin(*rows, self.positions).unbind())
        blocks = packed.long()
        read, written = (blocks >> _BITS) - 1, (blocks & ((1 << _BITS) - 1)) - 1
        of_block = written % len(self.positions)
        bounds, starts = self.positions[:, 0].long(), ends - cu_seqlens_q.diff()
        first = torch.full_like(bounds, 1 << 31).scatter_reduce(0, of_block, starts.long(), "amin")
        last = torch.zeros_like(bounds).scatter_reduce(0, of_block, ends.long(), "amax")
        window = torch.where(read < 0, 0, first[of_block] - (bounds[read] - 1))
        self.positions.index_fill_(0, of_block, 0)  # `[of_block] = 0` copies to the GPU
        places = first[of_block], last[of_block], window, prompt_ends.long()
        return StateStep(self.layers, read, written, *places)

    def end(self, step: StateStep, decode_lens: Tensor) -> None:
        """End a step: mark the blocks that rows have written as complete.

        decode_lens: int32 [num_rows], not 0 for rows that decode, whose tokens are in the window.
        """
        if decode_lens.is_cuda:
            from penstock.kernels import triton_states

            triton_states.end(step.written, step.first, step.last, decode_lens, self.positions)
            return
        first = torch.where(decode_lens > 0, step.first, step.last)
        self.positions[step.written] = torch.stack([first, step.last], 1).int() + 1
