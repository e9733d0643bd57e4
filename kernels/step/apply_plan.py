"""The plan kernel: applies a plan to the persistent batch and makes the tensors of a step.

What changes from step to step is one record of int32 that the host fills and copies; what stays
(block tables, last tokens, sampling parameters) lies on the device by slot. The record:

- header: number of rows, of appended blocks, of parameter sets; where rows, appended blocks,
  parameter sets and given tokens begin;
- rows [num_rows, 8]: slot, first new position, number of new tokens, where they begin in the step,
  where they begin among the given tokens, where the row's context begins in `cu_seqlens_k`, slot
  again if the row samples (else -1), 0. For a row that decodes -1, the token sampled last, stands
  for the place among the given tokens, or -2 - place;
- appended [num_appended, 3]: slot, column of its block table, block id;
- parameters [num_added, 8]: slot, temperature, top_k, top_p, min_p, seed (low, high word), 0; the
  bits of float32 where they are fractions;
- given token ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.checks import check_tensor
from penstock.kernels.step.forward_batch import SMALL_TILE, Shape, Step

HEADER = 8
ROW = 8
APPENDED = 3
PARAMETERS = 8


class Slots(NamedTuple):
    """The persistent batch on the device, by slot."""

    block_tables: Tensor
    """int32 [num_slots, max_blocks]"""
    last_token: Tensor
    """int64 [num_slots + 1]: sampled last; the last element takes what no slot wants"""
    seeds: Tensor
    """int64 [num_slots]"""
    temperature: Tensor
    """float32 [num_slots]"""
    top_k: Tensor
    """int32 [num_slots]"""
    top_p: Tensor
    """float32 [num_slots]"""
    min_p: Tensor
    """float32 [num_slots]"""


class StepBuffers(NamedTuple):
    """Where the tensors of a step are made; a step takes the front of each."""

    input_ids: Tensor
    """int64 [max_tokens]"""
    positions: Tensor
    """int64 [max_tokens]"""
    slot_mapping: Tensor
    """int64 [max_tokens]"""
    cu_seqlens_q: Tensor
    """int32 [num_slots + 1]"""
    cu_seqlens_k: Tensor
    """int32 [num_slots + 1]"""
    context_lens: Tensor
    """int32 [num_slots]"""
    decode_lens: Tensor
    """int32 [num_slots]"""
    tiles: Tensor
    """int32 [max_tiles, 2]"""
    block_tables: Tensor
    """int32 [num_slots, max_blocks]"""
    slots: Tensor
    """int64 [num_slots]: of the rows that sample; -1 for others"""
    last_tokens: Tensor
    """int64 [num_slots]: index in the step of each row's last token"""
    next_positions: Tensor
    """int64 [num_slots]: index of each row's next token in its sequence"""

    def step(self, shape: Shape) -> Step:
        """The front of the buffers."""
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        return Step(
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
    """An empty persistent batch."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Slots(
        block_tables=zeros(num_slots, max_blocks, dtype=torch.int32),
        last_token=zeros(num_slots + 1, dtype=torch.int64),
        seeds=zeros(num_slots, dtype=torch.int64),
        temperature=zeros(num_slots, dtype=torch.float32),
        top_k=zeros(num_slots, dtype=torch.int32),
        top_p=zeros(num_slots, dtype=torch.float32),
        min_p=zeros(num_slots, dtype=torch.float32),
    )


def make_step_buffers(
    num_slots: int, max_blocks: int, max_tokens: int, device: torch.device
) -> StepBuffers:
    """Buffers for steps of at most `max_tokens` tokens."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepBuffers(
        input_ids=zeros(max_tokens, dtype=torch.int64),
        positions=zeros(max_tokens, dtype=torch.int64),
        slot_mapping=zeros(max_tokens, dtype=torch.int64),
        cu_seqlens_q=zeros(num_slots + 1, dtype=torch.int32),
        cu_seqlens_k=zeros(num_slots + 1, dtype=torch.int32),
        context_lens=zeros(num_slots, dtype=torch.int32),
        decode_lens=zeros(num_slots, dtype=torch.int32),
        tiles=zeros(max_tokens // SMALL_TILE + num_slots, 2, dtype=torch.int32),
        block_tables=zeros(num_slots, max_blocks, dtype=torch.int32),
        slots=zeros(num_slots, dtype=torch.int64),
        last_tokens=zeros(num_slots, dtype=torch.int64),
        next_positions=zeros(num_slots, dtype=torch.int64),
    )


def apply_plan(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: Shape, block_size: int
) -> None:
    """Takes the record's blocks and parameters into `slots`, and fills `buffers` up to `shape`.

    record int32, as above. Rows, tokens and tiles beyond the record's are padding.
    """
    check_tensor("record", record, (-1,), torch.int32)
    for name, number, least, most in (
        ("rows", shape.num_rows, 1, buffers.slots.shape[0]),
        ("tokens", shape.num_tokens, 1, buffers.input_ids.shape[0]),
        ("tiles", shape.num_tiles, 0, buffers.tiles.shape[0]),
    ):
        if not least <= number <= most:
            raise ValueError(f"{number} {name}; {least} to {most} fit")
    if record.is_cuda:
        from penstock.kernels.step.triton_apply_plan import apply_plan as on_gpu

        on_gpu(record, slots, buffers, shape, block_size)
    else:
        _apply_reference(record, slots)
        _make_rows_reference(record, slots, buffers, shape, block_size)


def _apply_reference(record: Tensor, slots: Slots) -> None:
    _, num_appended, num_added, _, appended_at, parameters_at, _, _ = record[:HEADER].tolist()
    appended = record[appended_at : appended_at + num_appended * APPENDED].view(-1, APPENDED)
    slots.block_tables[appended[:, 0].long(), appended[:, 1].long()] = appended[:, 2]
    end = parameters_at + num_added * PARAMETERS
    parameters = record[parameters_at:end].view(-1, PARAMETERS)
    which = parameters[:, 0].long()
    slots.temperature[which] = parameters[:, 1].contiguous().view(torch.float32)
    slots.top_k[which] = parameters[:, 2]
    slots.top_p[which] = parameters[:, 3].contiguous().view(torch.float32)
    slots.min_p[which] = parameters[:, 4].contiguous().view(torch.float32)
    slots.seeds[which] = parameters[:, 5:7].clone().view(torch.int64).squeeze(1)


def _make_rows_reference(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: Shape, block_size: int
) -> None:
    num_real, _, _, rows_at, _, _, given_at, _ = record[:HEADER].tolist()
    rows = record[rows_at : rows_at + num_real * ROW].view(-1, ROW).tolist()
    num_tokens = num_keys = 0
    tiles: list[tuple[int, int]] = []
    for index, (slot, start, count, first, given, first_key, sampled, _) in enumerate(rows):
        tokens = slice(first, first + count)
        positions = torch.arange(start, start + count)
        blocks = slots.block_tables[slot, positions // block_size].long()
        buffers.positions[tokens] = positions
        buffers.slot_mapping[tokens] = blocks * block_size + positions % block_size
        if given == -1:
            buffers.input_ids[tokens] = slots.last_token[slot]
        else:
            at = given_at + (given if given >= 0 else -2 - given)
            buffers.input_ids[tokens] = record[at : at + count].long()
        if given >= 0:
            tiles += [(index, token) for token in reversed(range(0, count, shape.tile_size))]
        num_tokens, num_keys = first + count, first_key + start + count
        buffers.decode_lens[index] = start + count if given < 0 else 0
        _fill_row(buffers, index, start + count, first, first_key, sampled, num_tokens - 1)
        buffers.block_tables[index] = slots.block_tables[slot]
    for index in range(num_real, shape.num_rows):
        token = num_tokens + index - num_real
        buffers.decode_lens[index] = 0
        _fill_row(
            buffers, index, 0, min(token, shape.num_tokens), num_keys, -1,
            min(token, shape.num_tokens - 1),
        )  # fmt: skip
    end = min(num_tokens + shape.num_rows - num_real, shape.num_tokens)
    buffers.cu_seqlens_q[shape.num_rows] = end
    buffers.cu_seqlens_k[shape.num_rows] = num_keys
    padding = slice(num_tokens, shape.num_tokens)
    buffers.input_ids[padding] = buffers.positions[padding] = 0
    buffers.slot_mapping[padding] = -1
    tiles += [(-1, -1)] * (shape.num_tiles - len(tiles))
    buffers.tiles[: shape.num_tiles] = torch.tensor(tiles).view(-1, 2)


def _fill_row(
    buffers: StepBuffers,
    index: int,
    context_len: int,
    first: int,
    first_key: int,
    sampled: int,
    last_token: int,
) -> None:
    buffers.context_lens[index] = context_len
    buffers.cu_seqlens_q[index] = first
    buffers.cu_seqlens_k[index] = first_key
    buffers.slots[index] = sampled
    buffers.last_tokens[index] = last_token
    buffers.next_positions[index] = context_len
