"""Changes to logits by slot, as plans change them; the step's CUDA graph applies them."""

import numpy as np
import torch

from penstock.kernels.layouts.sampling import (
    DEFERRED,
    FLAGS,
    NUM_COLUMNS,
    PENALTIES,
    make_logits_state,
)
from penstock.services.worker.launched_step import integers_to_device, to_device
from penstock.services.worker.processed_row import ProcessedRow


class LogitsChanges:
    """The `LogitsState` of one rank's shard of the vocabulary."""

    def __init__(
        self, num_slots: int, vocab_size: int, start: int, stop: int, device: torch.device
    ) -> None:
        """Allocate the state; start, stop: token ids of the shard."""
        self.state = make_logits_state(num_slots, vocab_size, start, stop - start, device)
        self.deferred = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
        """by slot: the slot if its row is deferred, otherwise -1; the last element: for slot -1"""
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
