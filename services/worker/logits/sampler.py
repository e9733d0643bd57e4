"""Sampling with the vocabulary sharded over the ranks of a group."""

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import LogitsState
from penstock.kernels.layouts.step import Slots
from penstock.kernels.sampling.candidates import candidates, draw_candidate
from penstock.kernels.sampling.logits import process_logits
from penstock.kernels.sampling.sampling import sample
from penstock.models.qwen3 import Qwen3


class Sampler:
    """Sampler of a token for each row; each rank has the logits of its shard of the vocabulary.

    On several GPUs of a node, each rank finds the best tokens of its shard and reads the results of
    the others (`triton_sharded_sampling`). On several nodes, the ranks exchange candidates, and all
    draw from these (`penstock.kernels.sampling.candidates`); rows for which candidates do not
    suffice go through the logits processor. On CPUs of a node, rank 0 draws and broadcasts.
    """

    def __init__(
        self, model: Qwen3, slots: Slots, state: LogitsState, max_rows: int, vocab_size: int
    ) -> None:
        """Allocate symmetric memory for up to `max_rows` rows if needed. Raises GroupError.

        state: changes to this rank's logits.
        """
        self._model = model
        self._slots = slots
        self._state = state
        self._sharded = None
        if model.tp.shares_memory:
            from penstock.kernels.sampling.triton_sharded_sampling import (
                ShardedSampler,
                buffer_size,
            )

            size = buffer_size(max_rows, vocab_size, model.tp.size)
            memory = model.tp.symmetric(size, torch.float32)
            self._sharded = ShardedSampler(*memory, model.tp.rank, max_rows, vocab_size)

    def __call__(
        self, hidden_states: Tensor, slots: Tensor, positions: Tensor, newest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [num_rows], on every rank, and this rank's logits.

        slots, positions, newest: as for `process_logits`. The tokens also become the rows' last
        tokens.
        """
        tp, head = self._model.tp, self._model.head
        rows = slots, positions, self._slots.sampling()
        out = self._sharded.logits(len(slots)) if self._sharded else None
        logits = self._model.compute_logits(hidden_states, out)
        process_logits(logits, slots, positions, newest, self._state)
        if self._sharded:
            return self._sharded.sample(tp.barrier, *rows), logits
        if tp.spans_nodes:
            own = candidates(logits, head.stop - head.start, tp.rank, tp.size, *rows)
            return draw_candidate(tp.all_gather(own), logits.shape[1], *rows), logits
        joined = head.join(logits)
        tokens = slots.new_empty(len(slots)) if joined is None else sample(joined, *rows)
        self.share(tokens, slots)
        return tokens, logits

    def share(self, tokens: Tensor, slots: Tensor) -> None:
        """Broadcast rank 0's tokens, one for each row."""
        if self._model.tp.size > 1:
            # the last element takes the tokens of rows that do not sample, whose slot is -1;
            # the token -1 of a failed row is replaced, because the model can't read it
            self._slots.last_token[slots] = self._model.tp.broadcast(tokens).clamp(min=0)
