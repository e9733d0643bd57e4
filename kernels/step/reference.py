"""Application of a plan in torch; `penstock.kernels.step.apply_plan` has the record's layout."""

import torch
from torch import Tensor

from penstock.kernels.step.forward_batch import BatchShape
from penstock.kernels.step.types import (
    APPENDED,
    HEADER,
    PARAMETERS,
    ROW,
    Slots,
    StepBuffers,
)


def apply_changes(record: Tensor, slots: Slots) -> None:
    """Store the record's blocks and parameters in `slots`."""
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


def make_rows(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
) -> None:
    """Fill `buffers` up to `shape` from the record's rows."""
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
