"""How every rank comes to know the tokens that a step draws."""

import torch
from torch import Tensor

from penstock.kernels.sampling.candidates import candidates, draw_candidate
from penstock.kernels.sampling.sampling import sample
from penstock.kernels.step.types import Slots
from penstock.models.qwen3 import Qwen3


class Sampler:
    """Draws a token for each row. Each rank has the logits of its run of the vocabulary.

    On several GPUs of a node each rank finds the best of its own run, and reads what the others
    have found (`triton_sharded_sampling`). On several nodes the ranks exchange their candidates,
    and all draw from these (`penstock.kernels.sampling.candidates`); rows for which that is not
    enough take part in the second pass. On CPUs of a node rank 0 draws and tells the others.
    """

    def __init__(self, model: Qwen3, slots: Slots, max_rows: int, vocab_size: int) -> None:
        """max_rows: most rows of a step. Raises GroupError."""
        self._model = model
        self._slots = slots
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
        self, hidden_states: Tensor, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens, int64 [num_rows], on every rank, and this rank's logits.

        slots, positions: as for `sample`; the tokens are the rows' last ones from here on.
        """
        if self._sharded:
            logits = self._model.compute_logits(hidden_states, self._sharded.logits(len(slots)))
            by_slot = self._slots.sampling()
            return self._sharded.sample(self._model.tp.barrier, slots, positions, by_slot), logits
        logits = self._model.compute_logits(hidden_states)
        if self._model.tp.spans_nodes:
            return self._draw_candidate(logits, slots, positions), logits
        joined = self._model.head.join(logits)
        tokens = slots.new_empty(len(slots))
        if joined is not None:
            tokens = draw(joined, self._slots, slots, positions)
        self.share(tokens, slots)
        return tokens, logits

    def _draw_candidate(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        tp, head = self._model.tp, self._model.head
        rows = slots, positions, self._slots.sampling()
        own = candidates(logits, head.stop - head.start, tp.rank, tp.size, *rows)
        return draw_candidate(tp.all_gather(own), logits.shape[1], *rows)

    def share(self, tokens: Tensor, slots: Tensor) -> None:
        """Brings rank 0's tokens, one for each row, to all ranks."""
        if self._model.tp.size > 1:
            # the last element takes the tokens of the rows that do not sample: their slot is -1
            # and -1, for want of a token, is none that the model could read
            self._slots.last_token[slots] = self._model.tp.broadcast(tokens).clamp(min=0)


def draw(logits: Tensor, batch: Slots, slots: Tensor, positions: Tensor) -> Tensor:
    """`sample` with the parameters of the persistent batch."""
    return sample(logits, slots, positions, batch.sampling())
