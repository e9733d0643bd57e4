"""Changes to logits by slot: those of plans, and masks that follow from the previous token."""

from typing import Any

import numpy as np
import torch

from penstock.kernels.layouts.sampling import (
    DEFERRED,
    FLAGS,
    NUM_COLUMNS,
    PENALTIES,
    make_logits_state,
)
from penstock.services.worker.logits.processed_row import Bitmask, ProcessedRow
from penstock.services.worker.step.launched_step import integers_to_device, to_device

NO_TAG = -2  # neither a token nor a failed row


class LogitsChanges:
    """The `LogitsState` of one rank's shard, which the step's CUDA graph applies."""

    def __init__(
        self, num_slots: int, vocab_size: int, start: int, stop: int, device: torch.device
    ) -> None:
        """Allocate the state; start, stop: token ids of the shard."""
        self.state = make_logits_state(num_slots, vocab_size, start, stop - start, device)
        # by slot: the slot if its row is deferred, otherwise -1; the last element: for slot -1
        self.deferred = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
        self._parameters = np.zeros((num_slots, NUM_COLUMNS), np.int32)
        self._start, self._stop, self._device = start, stop, device

    def remove(self, slots: list[int]) -> None:
        """Leave the logits of these slots as they are."""
        if self._parameters[slots, 0].any():
            self._parameters[slots, 0] = 0
            self._copy_parameters()

    def add(self, rows: dict[int, ProcessedRow]) -> None:
        """Copy the changes of new rows, slot → row, to the device."""
        where, summands = [], []
        for slot, row in rows.items():
            self._parameters[slot] = row.parameters()
            if row.bias.size:
                self.state.bias[slot, :, : row.bias.shape[1]] = to_device(row.bias, self._device)
            if row.mask is not None:
                self.state.bitmask[slot] = to_device(row.mask, self._device)
            if row.flags & PENALTIES:
                self.state.occurrences[slot].zero_()
                token_ids, some = row.occurrences()
                own = (token_ids >= self._start) & (token_ids < self._stop)
                begin = slot * (self._stop - self._start) - self._start
                where.append(token_ids[own] + begin)
                summands.append(some[own])
        if rows:
            self._copy_parameters()
        if where:
            (index,) = integers_to_device([np.concatenate(where)], self._device)
            values = to_device(np.concatenate(summands), self._device)
            self.state.occurrences.view(-1).index_add_(0, index, values)

    def _copy_parameters(self) -> None:
        self.state.parameters.copy_(to_device(self._parameters.copy(), self._device))
        is_deferred = self._parameters[:, FLAGS] & DEFERRED > 0
        slots = np.where(is_deferred, np.arange(len(is_deferred)), -1)
        self.deferred[:-1].copy_(to_device(slots, self._device))


class TokenMasks:
    """Masks and possible opening tags of deferred rows by slot, in pinned memory and on the device.

    The device's copies are written by a stream of their own while the step runs. Earlier steps must
    have ended before the masks of the next are written.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the masks on the device."""
        self._device = device
        num_words = -(-vocab_size // 32)
        # all tokens, for slots without a mask
        self.bitmask = torch.full((num_slots, num_words), -1, dtype=torch.int32, device=device)
        # a token that is kept if it was drawn, mask or not; the last element is for slot -1
        self.tags = torch.full((num_slots + 1,), NO_TAG, dtype=torch.int64, device=device)
        self._host = torch.empty(0, 0, dtype=torch.int32)
        self._new: dict[int, bool] = {}  # slots with a new row → the row has a grammar
        self._tags: dict[int, int] = {}
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def add(self, slot: int, has_grammar: bool) -> None:
        """Let a deferred row have all tokens, or with a grammar, those of the tokenizer."""
        self._new[slot] = has_grammar

    def on_host(self, num_words: int) -> Bitmask:
        """Return the masks to be written; num_words: of the tokenizer's vocabulary."""
        if not self._host.numel():
            shape = len(self.bitmask), num_words
            is_pinned = self._stream is not None
            self._host = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)
        masks: Bitmask = self._host.numpy()
        if self._new:
            masks[list(self._new)] = -1
        return masks

    def copy(self, slots: list[int], tags: dict[int, int]) -> None:
        """Copy the masks of `slots` and the possible opening tags, slot → token, to the device."""
        if self._stream is None:
            self._copy(slots, tags)
            return
        with torch.cuda.stream(self._stream):
            self._copy(slots, tags)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, slots: list[int], tags: dict[int, int]) -> None:
        width = min(self._host.shape[1], self.bitmask.shape[1])
        for slot, has_grammar in self._new.items():
            self.bitmask[slot].fill_(-1)
            if has_grammar:
                self.bitmask[slot, width:].zero_()
        self._new.clear()
        if slots:
            some = slice(min(slots), max(slots) + 1)
            self.bitmask[some, :width].copy_(self._host[some, :width], non_blocking=True)
        if tags != self._tags:
            self._tags = tags
            by_slot = np.full(len(self.tags), NO_TAG)
            by_slot[list(tags)] = list(tags.values())
            self.tags.copy_(to_device(by_slot, self._device))
