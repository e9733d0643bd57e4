"""A persistent batch with the tensors that its records change."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.step import make_slots, make_step_buffers
from penstock.kernels.step.apply_plan import apply_plan
from penstock.protocol.messages.plan import BatchPlan
from penstock.services.worker.persistent_batch import PersistentBatch


class Sampled(NamedTuple):
    """The rows that sample, in ascending order of slot."""

    slots: list[int]
    last_tokens: list[int]
    positions: list[int]


class Batch(PersistentBatch):
    """With the tensors that its records change."""

    def __init__(self) -> None:
        super().__init__(8, max_blocks=4, block_size=4, num_blocks=20, vocab_size=100)
        self.slots = make_slots(8, 4, torch.device("cpu"))
        self.buffers = make_step_buffers(8, 4, 32, torch.device("cpu"))

    @property
    def last_token(self) -> Tensor:
        return self.slots.last_token

    def step(self, chunks: bytes, drafts: bytes = b"") -> tuple[ForwardBatch, Sampled] | None:
        rows = self.advance(chunks, drafts)
        if rows is None:
            return None
        record = torch.from_numpy(rows.record)
        apply_plan(record, self.slots, self.buffers, rows.shape, block_size=4)
        step = self.buffers.forward_batch(rows.shape)
        of_rows = self.buffers.slots, self.buffers.last_tokens, self.buffers.next_positions
        return step, Sampled(*(tensor[rows.sampled].tolist() for tensor in of_rows))


def run(batch: Batch, step_plan: BatchPlan) -> tuple[ForwardBatch, Sampled]:
    """Apply a plan that has something to compute."""
    batch.apply(step_plan)
    rows = batch.step(step_plan.chunks, step_plan.drafts)
    assert rows is not None
    return rows
