"""Application of a plan on a CPU; `penstock.kernels.step.apply_plan` describes the record."""

from typing import Any

import numpy as np
from torch import Tensor

from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.step import APPENDED, HEADER, PARAMETERS, ROW, Slots, StepBuffers


def apply_changes(record: Tensor, slots: Slots) -> None:
    """Store the record's blocks and parameters in `slots`."""
    data = record.numpy()
    _, num_appended, num_added, _, appended_at, parameters_at, _, _ = data[:HEADER].tolist()
    if num_appended:
        appended = data[appended_at : appended_at + num_appended * APPENDED].reshape(-1, APPENDED)
        slots.block_tables.numpy()[appended[:, 0], appended[:, 1]] = appended[:, 2]
    if num_added:
        end = parameters_at + num_added * PARAMETERS
        entries = data[parameters_at:end].reshape(-1, PARAMETERS)
        slots.parameters.numpy()[entries[:, 0]] = entries[:, 1:]


def make_rows(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
) -> None:
    """Fill `buffers` up to `shape` from the record's rows."""
    data, tables, last_token = (
        tensor.numpy() for tensor in (record, slots.block_tables, slots.last_token)
    )
    num_rows, _, _, rows_at, _, _, prefill_at, _ = data[:HEADER].tolist()
    rows = data[rows_at : rows_at + num_rows * ROW].reshape(-1, ROW)
    slot, start, count, first, token_index, first_key, sampled, states, prompt_end = rows.T
    lengths = start + count
    num_tokens = int(count.sum())
    arrays: list[Any] = [tensor.numpy() for tensor in buffers]
    out: Any = StepBuffers(*arrays)
    row = np.repeat(np.arange(num_rows), count)
    offsets = np.arange(num_tokens) - first[row]
    positions = start[row] + offsets
    out.positions[:num_tokens] = positions
    blocks = tables[slot[row], positions // block_size].astype(np.int64)
    out.slot_mapping[:num_tokens] = blocks * block_size + positions % block_size
    follows = token_index[row] == -1
    at = prefill_at + np.where(token_index < 0, -2 - token_index, token_index)[row] + offsets
    out.input_ids[:num_tokens] = np.where(
        follows, last_token[slot[row]], data[np.where(follows, 0, at)]
    )
    out.context_lens[:num_rows] = out.next_positions[:num_rows] = lengths
    out.decode_lens[:num_rows] = np.where(token_index < 0, lengths, 0)
    out.cu_seqlens_q[:num_rows], out.cu_seqlens_k[:num_rows] = first, first_key
    out.slots[:num_rows] = sampled
    out.states[:num_rows], out.prompt_ends[:num_rows] = states, prompt_end
    out.last_tokens[:num_rows] = first + count - 1
    out.block_tables[:num_rows] = tables[slot]
    _pad(out, shape, num_rows, num_tokens, int(lengths.sum()))
    if shape.num_tiles:
        tiles = [
            (index, token)
            for index in np.flatnonzero(token_index >= 0).tolist()
            for token in reversed(range(0, int(count[index]), shape.tile_size))
        ]
        out.tiles[: len(tiles)] = tiles
        out.tiles[len(tiles) : shape.num_tiles] = -1


def _pad(out: Any, shape: BatchShape, num_rows: int, num_tokens: int, num_keys: int) -> None:
    """Pad the rows and tokens after the record's, up to the shape."""
    padding = slice(num_rows, shape.num_rows)
    tokens = num_tokens + np.arange(shape.num_rows - num_rows)
    empties = out.context_lens, out.decode_lens, out.next_positions, out.states, out.prompt_ends
    for empty in empties:
        empty[padding] = 0
    out.cu_seqlens_q[padding] = np.minimum(tokens, shape.num_tokens)
    out.last_tokens[padding] = np.minimum(tokens, shape.num_tokens - 1)
    out.slots[padding] = -1
    out.cu_seqlens_k[num_rows : shape.num_rows + 1] = num_keys
    end = min(num_tokens + shape.num_rows - num_rows, shape.num_tokens)
    out.cu_seqlens_q[shape.num_rows] = end
    out.input_ids[num_tokens : shape.num_tokens] = 0
    out.positions[num_tokens : shape.num_tokens] = 0
    out.slot_mapping[num_tokens : shape.num_tokens] = -1
