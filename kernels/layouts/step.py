"""The persistent batch on the device, and the buffers of a step's tensors."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape, ForwardBatch
from penstock.kernels.layouts.sampling import NUM_WORDS, SamplingTensors, make_parameters

# int32 values of the parts of a record; see `penstock.kernels.step.apply_plan`
HEADER, ROW, APPENDED, PARAMETERS = 8, 9, 3, 1 + NUM_WORDS
TOKENS = 6  # in the header: where the token ids begin
# columns of a record's rows
SLOT, START, COUNT, FIRST, TOKEN_INDEX, FIRST_KEY, SAMPLING_SLOT, STATES, PROMPT_END = range(ROW)


class Slots(NamedTuple):
    """Persistent batch on the device, by slot."""

    block_tables: Tensor  # int32 [num_slots, max_blocks]
    # int64 [num_slots + 1]: last sampled tokens; the last element receives writes for slot -1
    last_token: Tensor
    parameters: Tensor  # the slot table: int32 [num_slots, NUM_WORDS]

    def sampling(self) -> SamplingTensors:
        """Return the arguments that `sample` reads by slot."""
        return SamplingTensors(self.parameters, self.last_token[:-1])


class StepBuffers(NamedTuple):
    """Memory of a step's tensors: a `ForwardBatch` of maximum size, and tensors for the sampler."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor  # int64 [max_tokens]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor  # int32 [num_slots + 1]
    context_lens: Tensor
    decode_lens: Tensor  # int32 [num_slots]
    tiles: Tensor  # int32 [max_tiles, 2]
    block_tables: Tensor  # int32 [num_slots, max_blocks]
    slots: Tensor  # int64 [num_slots]: slots of sampling rows; -1 for other rows
    last_tokens: Tensor  # int64 [num_slots]: index in the step of each row's last token
    next_positions: Tensor  # int64 [num_slots]: index of each row's next token in its sequence
    states: Tensor  # int32 [num_slots]: packed state blocks, see `penstock.kernels.layouts.states`
    prompt_ends: Tensor  # int32 [num_slots]: `StateStep.prompt_end`

    def forward_batch(self, shape: BatchShape) -> ForwardBatch:
        """Return the leading parts of the buffers in this shape."""
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        return ForwardBatch(
            shape,
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            cu_seqlens_q=self.cu_seqlens_q[: num_rows + 1],
            cu_seqlens_k=self.cu_seqlens_k[: num_rows + 1],
            context_lens=self.context_lens[:num_rows],
            decode_lens=self.decode_lens[: shape.num_decode],
            tiles=self.tiles[: shape.num_tiles],
            block_tables=self.block_tables[:num_rows],
        )


def make_slots(num_slots: int, max_blocks: int, device: torch.device) -> Slots:
    """Return an empty persistent batch."""
    zeros = partial(torch.zeros, device=device)
    return Slots(
        block_tables=zeros((num_slots, max_blocks), dtype=torch.int32),
        last_token=zeros(num_slots + 1, dtype=torch.int64),
        parameters=make_parameters(num_slots, device),
    )


def make_step_buffers(
    num_slots: int, max_blocks: int, max_tokens: int, device: torch.device
) -> StepBuffers:
    """Return buffers for steps of up to `max_tokens` tokens."""
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    longs = partial(torch.zeros, dtype=torch.int64, device=device)
    return StepBuffers(
        input_ids=longs(max_tokens),
        positions=longs(max_tokens),
        slot_mapping=longs(max_tokens),
        cu_seqlens_q=ints(num_slots + 1),
        cu_seqlens_k=ints(num_slots + 1),
        context_lens=ints(num_slots),
        decode_lens=ints(num_slots),
        tiles=ints((max_tokens // SMALL_TILE + num_slots, 2)),
        block_tables=ints((num_slots, max_blocks)),
        slots=longs(num_slots),
        last_tokens=longs(num_slots),
        next_positions=longs(num_slots),
        states=ints(num_slots),
        prompt_ends=ints(num_slots),
    )
