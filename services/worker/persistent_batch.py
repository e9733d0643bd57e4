"""The persistent batch: for every slot its sequence, kept from step to step.

Lengths are known on the host, without asking the device: each step adds a known number of tokens
to a row. What the model and the sampler read (block tables, last tokens, sampling parameters) lies
in tensors by slot.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.models.qwen3 import Step
from penstock.protocol.plan import BLOCK_BITS, MAX_BLOCKS, BatchPlan, RowAdded

Integers = NDArray[np.int64]


class Sampled(NamedTuple):
    """The rows that sample in a step; all int64 [num_sampled]."""

    slots: Tensor
    """ascending"""
    last_tokens: Tensor
    """index in the step of each row's last token"""
    positions: Tensor
    """index of the new token in its sequence"""


class PersistentBatch:
    """Rows by slot. Changed by plans only, and by the tokens sampled into `last_token`."""

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, num_blocks: int, vocab_size: int
    ) -> None:
        """max_blocks: most blocks of one row; num_blocks: blocks in the KV cache."""
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64)
        self.temperature = torch.zeros(num_slots)
        self.top_k = torch.zeros(num_slots, dtype=torch.int32)
        self.top_p = torch.zeros(num_slots)
        self.min_p = torch.zeros(num_slots)
        self._active = np.zeros(num_slots, np.bool_)
        self._num_row_blocks = np.zeros(num_slots, np.int64)
        self._num_given = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int64)
        self._given: dict[int, Tensor] = {}
        """given tokens of the rows that have not computed them all"""

    def clear(self) -> None:
        """Removes every row."""
        self._active[:] = False
        self._given.clear()

    def apply(self, plan: BatchPlan) -> None:
        """Rows leave, rows enter, rows get blocks. Raises ValueError for what can't be."""
        removed = _integers(plan.removed)
        self._check_active(removed)
        self._active[removed] = False
        for row in plan.added:
            self._add(row)
        appended = _integers(plan.appended)
        self._append(appended >> BLOCK_BITS, appended & (MAX_BLOCKS - 1))

    def advance(self, chunks: bytes) -> tuple[Step, Sampled] | None:
        """The next step, None if no row has anything to compute; the rows count as computed.

        chunks: as in `BatchPlan`.
        """
        num_new = self._num_new_tokens(*_pairs(chunks))
        slots = np.flatnonzero(num_new)
        if not slots.size:
            return None
        counts, starts = num_new[slots], self._num_computed[slots]
        ends = starts + counts
        self._check_room(slots, ends)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        step = self._step(slots, starts, counts, bounds)
        self._num_computed[slots] = ends
        samples = ends >= self._num_given[slots]
        last_tokens = (bounds[1:] - 1)[samples]
        return step, Sampled(*map(torch.from_numpy, (slots[samples], last_tokens, ends[samples])))

    def _add(self, row: RowAdded) -> None:
        slot, token_ids, block_ids = row.slot, _integers(row.token_ids), _integers(row.block_ids)
        if not 0 <= slot < len(self._active) or self._active[slot]:
            raise ValueError(f"slot {slot} is taken, or none of the {len(self._active)} there are")
        if not 0 <= row.num_computed_tokens < len(token_ids) <= len(block_ids) * self.block_size:
            raise ValueError(
                f"slot {slot}: {row.num_computed_tokens} of {len(token_ids)} tokens computed, in "
                f"{len(block_ids)} blocks of {self.block_size}"
            )
        _check_range(f"token id of slot {slot}", token_ids, self.vocab_size)
        self._active[slot] = True
        self._num_given[slot] = len(token_ids)
        self._num_computed[slot] = row.num_computed_tokens
        self._num_row_blocks[slot] = 0
        self._given[slot] = torch.from_numpy(token_ids)
        self._append(np.full(len(block_ids), slot), block_ids)
        self.temperature[slot] = row.temperature
        self.top_k[slot] = row.top_k
        self.top_p[slot] = row.top_p
        self.min_p[slot] = row.min_p
        self.seeds[slot] = row.seed

    def _append(self, slots: Integers, block_ids: Integers) -> None:
        """Blocks at the end of their rows' tables, in the order given."""
        self._check_active(slots)
        _check_range("block id", block_ids, self.num_blocks)
        order = np.argsort(slots, kind="stable")
        slots, block_ids = slots[order], block_ids[order]
        num_before = np.arange(len(slots)) - np.searchsorted(slots, slots)  # of the same row
        columns = self._num_row_blocks[slots] + num_before
        _check_range("block of a row", columns, self.block_tables.shape[1])
        np.add.at(self._num_row_blocks, slots, 1)
        places = torch.from_numpy(slots), torch.from_numpy(columns)
        self.block_tables[places] = torch.from_numpy(block_ids.astype(np.int32))

    def _num_new_tokens(self, slots: Integers, lengths: Integers) -> Integers:
        """Tokens that each slot computes next, [num_slots]; the arguments are the chunks."""
        self._check_active(slots)
        num_left = self._num_given - self._num_computed
        wrong = (lengths < 1) | (lengths > num_left[slots])
        if wrong.any():
            slot, length = slots[wrong][0], lengths[wrong][0]
            raise ValueError(f"slot {slot}: chunk of {length} of {num_left[slot]} tokens left")
        num_new = np.where(self._active & (num_left <= 0), 1, 0)
        num_new[slots] = lengths
        return num_new

    def _step(self, slots: Integers, starts: Integers, counts: Integers, bounds: Integers) -> Step:
        """starts: index of each row's first new token in its sequence; bounds: in the step."""
        ends = starts + counts
        token_slots = torch.from_numpy(np.repeat(slots, counts))
        positions = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
        columns = torch.from_numpy(positions // self.block_size)
        offsets = torch.from_numpy(positions % self.block_size)
        input_ids = self.last_token[token_slots]
        for row in np.flatnonzero(starts < self._num_given[slots]).tolist():
            chunk = slice(int(starts[row]), int(ends[row]))
            input_ids[bounds[row] : bounds[row + 1]] = self._take_given(int(slots[row]), chunk)
        num_columns = -(-int(ends.max()) // self.block_size)
        return Step(
            input_ids=input_ids,
            positions=torch.from_numpy(positions),
            slot_mapping=self.block_tables[token_slots, columns] * self.block_size + offsets,
            cu_seqlens_q=torch.from_numpy(bounds.astype(np.int32)),
            max_seqlen_q=int(counts.max()),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=self.block_tables[torch.from_numpy(slots), :num_columns],
        )

    def _take_given(self, slot: int, chunk: slice) -> Tensor:
        given = self._given[slot]
        if chunk.stop == len(given):
            del self._given[slot]
        return given[chunk]

    def _check_active(self, slots: Integers) -> None:
        _check_range("slot", slots, len(self._active))
        if not self._active[slots].all():
            raise ValueError(f"slot {slots[~self._active[slots]][0]} holds no row")

    def _check_room(self, slots: Integers, ends: Integers) -> None:
        room = self._num_row_blocks[slots] * self.block_size
        if (ends > room).any():
            row = int((ends > room).argmax())
            raise ValueError(f"slot {slots[row]}: blocks for {room[row]} tokens of {ends[row]}")


def _integers(data: bytes) -> Integers:
    """What `plan.pack` packed, as int64."""
    return np.frombuffer(data, "<i4").astype(np.int64)


def _pairs(data: bytes) -> tuple[Integers, Integers]:
    """Packed pairs: the first of each, the second of each."""
    first, second = _integers(data).reshape(-1, 2).T
    return first, second


def _check_range(name: str, values: Integers, limit: int) -> None:
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        raise ValueError(f"{name} {values[wrong][0]} is not between 0 and {limit - 1}")
