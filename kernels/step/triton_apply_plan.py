"""Application of a plan in Triton; `penstock.kernels.step.apply_plan` describes the record."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import NUM_WORDS
from penstock.kernels.layouts.step import ROW, Slots, StepBuffers
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

NUM_PROGRAMS = 16  # programs of `_apply_changes`
BLOCK = 256
_NUM_WORDS = tl.constexpr(NUM_WORDS)
_ROW = tl.constexpr(ROW)


@triton.jit
def _append_blocks(record, block_tables, max_blocks, BLOCK: tl.constexpr):
    num_appended, appended_at = tl.load(record + 1), tl.load(record + 4)
    stride = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, num_appended, stride):
        entry = begin + tl.arange(0, BLOCK)
        exists = entry < num_appended
        source = record + appended_at + entry * 3
        slot = tl.load(source, exists, 0)
        column = tl.load(source + 1, exists, 0)
        block_id = tl.load(source + 2, exists, 0)
        tl.store(block_tables + slot.to(tl.int64) * max_blocks + column, block_id, exists)


@triton.jit
def _set_parameters(record, parameters, BLOCK: tl.constexpr):
    num_words, parameters_at = tl.load(record + 2) * _NUM_WORDS, tl.load(record + 5)
    stride = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, num_words, stride):
        index = begin + tl.arange(0, BLOCK)
        exists = index < num_words
        word = index % _NUM_WORDS
        source = record + parameters_at + index // _NUM_WORDS * (1 + _NUM_WORDS)
        slot = tl.load(source, exists, 0).to(tl.int64)
        value = tl.load(source + 1 + word, exists, 0)
        tl.store(parameters + slot * _NUM_WORDS + word, value, exists)


@triton.jit
def _apply_changes(record, block_tables, parameters, max_blocks, BLOCK: tl.constexpr):
    launch_dependents()
    wait()
    _append_blocks(record, block_tables, max_blocks, BLOCK)
    _set_parameters(record, parameters, BLOCK)


@triton.jit
def _make_tokens(
    record, source, block_tables, last_token, input_ids, positions, slot_mapping,
    max_blocks, block_size, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, start, count = tl.load(source), tl.load(source + 1), tl.load(source + 2)
    first, token_index = tl.load(source + 3), tl.load(source + 4)
    prefill_at = tl.load(record + 6)
    table = block_tables + slot.to(tl.int64) * max_blocks
    for begin in range(0, count, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        exists = token < count
        position = start + token
        block_id = tl.load(table + position // block_size, exists, 0).to(tl.int64)
        if token_index == -1:
            ids = tl.load(last_token + slot + token * 0, exists, 0)
        else:
            at = prefill_at + tl.where(token_index < 0, -2 - token_index, token_index)
            ids = tl.load(record + at + token, exists, 0).to(tl.int64)
        tl.store(input_ids + first + token, ids, exists)
        tl.store(positions + first + token, position.to(tl.int64), exists)
        slots = block_id * block_size + position % block_size
        tl.store(slot_mapping + first + token, slots, exists)


@triton.jit
def _copy_table(source, target, num_blocks, BLOCK: tl.constexpr):
    for begin in range(0, num_blocks, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        exists = column < num_blocks
        tl.store(target + column, tl.load(source + column, exists, 0), exists)


@triton.jit
def _num_tiles(rows, num_rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of tiles of the first `num_rows` rows; decoding rows have no tile."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        exists = row < num_rows
        count, token_index = (
            tl.load(rows + row * _ROW + 2, exists, 0),
            tl.load(rows + row * _ROW + 4, exists, -1),
        )
        total += tl.where(token_index < 0, 0, tl.cdiv(count, TILE))
    return tl.sum(total)


@triton.jit
def _make_tiles(rows, tiles, row, count, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row's tiles, ordered from the tile with most keys, which takes longest."""
    at = tiles + _num_tiles(rows, row, TILE, BLOCK) * 2
    number = tl.cdiv(count, TILE)
    for begin in range(0, number, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        exists = tile < number
        tl.store(at + tile * 2, row + tile * 0, exists)
        tl.store(at + tile * 2 + 1, (number - 1 - tile) * TILE, exists)


@triton.jit
def _pad(
    rows, num_real, num_tokens, input_ids, positions, slot_mapping, tiles, max_tokens, max_tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for begin in range(num_tokens, max_tokens, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        exists = token < max_tokens
        tl.store(input_ids + token, token * 0, exists)
        tl.store(positions + token, token * 0, exists)
        tl.store(slot_mapping + token, token * 0 - 1, exists)
    for begin in range(_num_tiles(rows, num_real, TILE, BLOCK), max_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        exists = tile < max_tiles
        tl.store(tiles + tile * 2, tile * 0 - 1, exists)
        tl.store(tiles + tile * 2 + 1, tile * 0 - 1, exists)


@triton.jit(do_not_specialize=["num_rows", "max_tokens", "max_tiles"])
def _make_rows(
    record, slot_tables, last_token, input_ids, positions, slot_mapping, cu_seqlens_q,
    cu_seqlens_k, context_lens, decode_lens, tiles, block_tables, slots, last_tokens,
    next_positions, states, prompt_ends, max_blocks, block_size, num_rows, max_tokens, max_tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    wait()
    row = tl.program_id(0)
    num_real, rows = tl.load(record), record + tl.load(record + 3)
    num_tokens = 0
    num_keys = 0
    if num_real > 0:
        final = rows + (num_real - 1) * _ROW
        num_tokens = tl.load(final + 3) + tl.load(final + 2)
        num_keys = tl.load(final + 5) + tl.load(final + 1) + tl.load(final + 2)
    # A padded row of a decode step has one token, after the record's tokens.
    first = tl.minimum(num_tokens + row - num_real, max_tokens)
    first_key = num_keys
    context_len = 0
    decode_len = 0
    last = tl.minimum(first, max_tokens - 1)
    sampled = -1
    packed_states, prompt_end = 0, 0
    if row < num_real:
        source = rows + row * _ROW
        slot, start, count = tl.load(source), tl.load(source + 1), tl.load(source + 2)
        first, token_index = tl.load(source + 3), tl.load(source + 4)
        first_key, sampled = tl.load(source + 5), tl.load(source + 6)
        packed_states, prompt_end = tl.load(source + 7), tl.load(source + 8)
        context_len = start + count
        last = first + count - 1
        if token_index < 0:
            decode_len = context_len
        else:
            _make_tiles(rows, tiles, row, count, TILE, BLOCK)
        _make_tokens(
            record, source, slot_tables, last_token, input_ids, positions, slot_mapping,
            max_blocks, block_size, BLOCK,
        )  # fmt: skip
        used = tl.cdiv(context_len, block_size)
        table = slot_tables + slot.to(tl.int64) * max_blocks
        _copy_table(table, block_tables + row.to(tl.int64) * max_blocks, used, BLOCK)
    tl.store(context_lens + row, context_len)
    tl.store(decode_lens + row, decode_len)
    tl.store(cu_seqlens_q + row, first)
    tl.store(cu_seqlens_k + row, first_key)
    tl.store(slots + row, sampled)
    tl.store(last_tokens + row, last)
    tl.store(next_positions + row, context_len)
    tl.store(states + row, packed_states)
    tl.store(prompt_ends + row, prompt_end)
    if row == num_rows - 1:
        end = tl.minimum(num_tokens + num_rows - num_real, max_tokens)
        tl.store(cu_seqlens_q + num_rows, end)
        tl.store(cu_seqlens_k + num_rows, num_keys)
        _pad(
            rows, num_real, num_tokens, input_ids, positions, slot_mapping, tiles, max_tokens,
            max_tiles, TILE, BLOCK,
        )  # fmt: skip


def apply_plan(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
) -> None:
    """Compute `penstock.kernels.step.apply_plan.apply_plan` in two launches."""
    max_blocks = slots.block_tables.shape[1]
    _apply_changes[(NUM_PROGRAMS,)](
        record, slots.block_tables, slots.parameters, max_blocks, BLOCK=BLOCK, num_warps=2, **LAUNCH
    )
    _make_rows[(shape.num_rows,)](
        record, slots.block_tables, slots.last_token, *buffers, max_blocks, block_size,
        shape.num_rows, shape.num_tokens, shape.num_tiles, TILE=shape.tile_size, BLOCK=BLOCK,
        num_warps=2, **LAUNCH,
    )  # fmt: skip
