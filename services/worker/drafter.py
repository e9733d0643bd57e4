"""Drafts of multi-token prediction, made on the device at the end of a step.

The layer has keys and values at each token, like a layer of the model, and its input at a token is
also the next token. So it runs when the tokens of the step are sampled:

1. `read` applies the layer to all tokens of the step. Where no draft is asked for, `store` keeps
   their keys and values, and computes nothing else.
2. `propose` drafts the token after the next, for the last right row of each sequence. A row is
   right if the row before it sampled its input token.
3. `continue_` applies the layer to the draft, at the next position, and `propose` drafts again.

No function waits for the device or depends on its numbers, so each can be a CUDA graph. All rows of
a sequence compute the same in `propose` and `continue_`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.models.model import Model


class Rows(NamedTuple):
    """Rows in `propose` and `continue_`; each stands for the last right row of its sequence."""

    hidden: Tensor  # [num_slots, hidden_size]: residual stream of multi-token prediction
    token_ids: Tensor  # int64 [num_slots]: the newest draft
    positions: Tensor  # int64 [num_slots]: position of the token before the newest draft
    rooms: Tensor  # int64 [num_slots]: positions for which the sequence has blocks; 0: no sequence
    block_tables: Tensor  # int32 [num_slots, max_blocks]


class DraftPasses(NamedTuple):
    """Functions of a drafter for a step, or CUDA graphs of them."""

    store: Callable[[], None]
    read: Callable[[], None]
    propose: Callable[[], None]
    continue_: Callable[[], None]


class Drafter:
    """The maker of up to `most` drafts for each row of a step."""

    def __init__(
        self,
        model: Model,
        slots: Slots,
        buffers: StepBuffers,
        kv_caches: list[KVCache],
        block_size: int,
        most: int,
    ) -> None:
        """Allocate buffers of all rows."""
        self._model, self._slots, self._buffers = model, slots, buffers
        self._kv_caches, self._block_size = kv_caches, block_size
        num_slots, device = len(slots.block_tables), slots.block_tables.device
        longs = partial(torch.zeros, dtype=torch.int64, device=device)
        # of the step's rows: the token after the row, -1 if it is sampled; and the room
        self._followers = torch.zeros(num_slots, 2, dtype=torch.int32, device=device)
        self._drafts = longs(num_slots, most)
        self._number = longs(1)  # of drafts made in this step
        joined = model.mtp.fc.weight
        self._rows = Rows(
            joined.new_zeros(num_slots, len(joined)),
            longs(num_slots),
            longs(num_slots),
            longs(num_slots),
            torch.zeros_like(slots.block_tables),
        )

    def run(
        self, passes: DraftPasses, followers: Tensor, num_rows: int, num_drafts: int
    ) -> Tensor | None:
        """Make drafts after a step. Return them, int64 [num_rows, num_drafts], unless it is 0.

        The layer's keys and values are stored in any case. followers: int32 [num_rows, 2], from
        `PersistentBatch.followers`. The result is valid until the next step.
        """
        self._followers[: len(followers)].copy_(followers, non_blocking=True)
        first = passes.read if num_drafts else passes.store
        first()
        for number in range(num_drafts):
            if number:
                passes.continue_()
            passes.propose()
        return self._drafts[:num_rows, :num_drafts] if num_drafts else None

    def passes(self, tokens: Tensor, hidden_states: Tensor, shape: BatchShape) -> DraftPasses:
        """Return the functions for a step; the arguments are those of `read`."""
        step = tokens, hidden_states, shape
        return DraftPasses(
            partial(self.read, *step, only_keys=True),
            partial(self.read, *step),
            partial(self.propose, shape.num_rows),
            partial(self.continue_, shape.num_rows),
        )

    def read(
        self, tokens: Tensor, hidden_states: Tensor, shape: BatchShape, only_keys: bool = False
    ) -> None:
        """Apply the layer to a step with sampled tokens [num_rows], and choose each row's row.

        only_keys: keep the layer's keys and values, and compute nothing else.
        """
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        batch = self._buffers.forward_batch(shape)
        sampling, at = self._buffers.slots[:num_rows], self._buffers.last_tokens[:num_rows]
        following, rooms = self._followers[:num_rows].long().unbind(1)
        tokens = tokens.clamp(0, self._model.head.vocab_size - 1)  # -1: a row has failed
        next_ids = batch.input_ids.new_zeros(num_tokens + 1)
        next_ids[: num_tokens - 1] = batch.input_ids[1:]
        # the last element takes the writes of padded rows
        ends = torch.where(batch.context_lens > 0, at, num_tokens)
        next_ids[ends] = torch.where(following < 0, tokens, following)
        inputs = hidden_states, self._model.model.norm, next_ids[:num_tokens], batch
        residual = self._model.predict(*inputs, self._kv_caches, only_keys)
        if only_keys:
            return
        last = last_right_rows(sampling, tokens, batch.input_ids[at])
        rows, of_slot = self._rows, sampling.clamp(min=0)
        rows.hidden[:num_rows] = residual[at[last]]
        rows.positions[:num_rows] = batch.context_lens[last] - 1
        rows.rooms[:num_rows] = torch.where(sampling < 0, 0, rooms)
        rows.block_tables[:num_rows] = self._slots.block_tables[of_slot]
        self._number.zero_()

    def propose(self, num_rows: int) -> None:
        """Draft the likeliest token after the next one of each row."""
        model, rows = self._model, self._rows
        drafts = likeliest(model, model.compute_logits(rows.hidden[:num_rows], norm=model.mtp.norm))
        rows.token_ids[:num_rows] = drafts
        self._drafts[:num_rows].index_copy_(1, self._number, drafts[:, None])
        self._number += 1

    def continue_(self, num_rows: int) -> None:
        """Apply the layer to the newest drafts.

        Nothing is stored for a sequence without room; its next drafts are of no use.
        """
        rows, size = self._rows, self._block_size
        rows.positions[:num_rows] += 1
        tables, positions = rows.block_tables[:num_rows], rows.positions[:num_rows]
        fits = positions < rows.rooms[:num_rows]
        positions = torch.where(fits, positions, 0)
        block_ids = tables.gather(1, (positions // size)[:, None])[:, 0].long()
        ends = (positions + 1).int()
        first = torch.arange(num_rows + 1, dtype=torch.int32, device=ends.device)
        longest = tables.shape[1] * size
        batch = ForwardBatch(
            BatchShape(num_rows, num_rows, num_rows, 0, SMALL_TILE, 1, longest),
            input_ids=rows.token_ids[:num_rows],
            positions=positions,
            slot_mapping=torch.where(fits, block_ids * size + positions % size, -1),
            cu_seqlens_q=first,
            cu_seqlens_k=torch.cat([first[:1], ends.cumsum(0, dtype=torch.int32)]),
            context_lens=ends,
            decode_lens=ends,
            tiles=self._buffers.tiles[:0],
            block_tables=tables,
        )
        model = self._model
        model.attention.begin(batch)
        rows.hidden[:num_rows] = model.predict(
            rows.hidden[:num_rows], model.mtp.norm, batch.input_ids, batch, self._kv_caches
        )


def last_right_rows(slots: Tensor, tokens: Tensor, input_ids: Tensor) -> Tensor:
    """Return the index of the last right row of each row's sequence.

    slots: int64 [num_rows]; rows of a sequence are adjacent, and all after the first are drafts.
    tokens: sampled tokens. input_ids: last input token of each row.
    """
    begins = torch.ones_like(slots, dtype=torch.bool)
    begins[1:] = slots[1:] != slots[:-1]
    wrong = torch.zeros_like(slots)
    wrong[1:] = ~begins[1:] & (tokens[:-1] != input_ids[1:])
    num_wrong = wrong.cumsum(0)
    before = torch.where(begins, num_wrong, 0).cummax(0).values  # at the sequence's first row
    sequence = begins.cumsum(0) - 1
    num_right = torch.zeros_like(slots).index_add_(0, sequence, (num_wrong == before).long())
    index = torch.arange(len(slots), device=slots.device)
    first = torch.where(begins, index, 0).cummax(0).values
    return first + num_right[sequence] - 1


def likeliest(model: Model, logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, on all ranks; logits: this rank's shard."""
    head, tp = model.head, model.tp
    logits[:, head.stop - head.start :] = -torch.inf  # after the end of the vocabulary
    values, ids = logits.max(1)
    ids += head.start
    if tp.size == 1:
        return ids
    # float32 has all ids of tokens
    parts = torch.stack(tp.all_gather(torch.stack([values, ids.float()])))
    best = parts[:, 0].argmax(0, keepdim=True)
    return parts[:, 1].gather(0, best)[0].long()
