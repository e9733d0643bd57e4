"""What rows with penalties have said: counts of tokens that stay on the device.

They grow with each token that is drawn there, so that steps need not wait for the host.
"""

import torch
from torch import Tensor

from penstock.kernels.sampling.penalties import penalize
from penstock.protocol.messages.plan import RowExtras


class Penalties:
    """Tables with a place for each slot, made once: what requests ask for takes no more memory."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # pages of a CPU are used only where rows ask
        self._counts = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.empty(num_slots, vocab_size, dtype=torch.bool, device=device)
        self._factors = torch.empty(num_slots, 3, dtype=torch.float32, device=device)
        """repetition, frequency and presence penalty of each slot"""

    def add(self, slot: int, extras: RowExtras, prompt: Tensor, output: Tensor) -> None:
        """A row enters with these tokens, int64 on the device."""
        self._in_prompt[slot].zero_().index_fill_(0, prompt, 1)
        ones = torch.ones_like(output, dtype=torch.int32)
        self._counts[slot].zero_().index_add_(0, output, ones)
        self._factors[slot, 0] = extras.repetition_penalty
        self._factors[slot, 1] = extras.frequency_penalty
        self._factors[slot, 2] = extras.presence_penalty

    def apply(self, logits: Tensor, places: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size] of the rows at `places`, penalized."""
        repetition, frequency, presence = self._factors[places].unbind(1)
        return penalize(
            logits,
            self._counts[places],
            self._in_prompt[places],
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )

    def count(self, places: Tensor, token_ids: Tensor) -> None:
        """The rows at `places` have said these tokens, int64 [num_rows]."""
        one = torch.ones_like(places, dtype=torch.int32)
        self._counts.index_put_((places, token_ids), one, accumulate=True)
