"""What rows with penalties have said: counts of tokens that stay on the device.

They grow with each token that is drawn there, so that steps need not wait for the host.
"""

import torch
from torch import Tensor

from penstock.kernels.logits import penalize
from penstock.protocol.plan import RowExtras

_LEAST_PLACES = 8


class Penalties:
    """Tables with a place for each row that asks; they double when all places are taken."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._factors = torch.zeros(0, 3, device=device)
        """repetition, frequency and presence penalty of each place"""
        self._free: list[int] = []

    def add(self, extras: RowExtras, prompt: Tensor, output: Tensor) -> int:
        """The place of a row with these tokens, int64 on the device."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self._in_prompt[place].zero_().index_fill_(0, prompt, 1)
        ones = torch.ones_like(output, dtype=torch.int32)
        self._counts[place].zero_().index_add_(0, output, ones)
        self._factors[place, 0] = extras.repetition_penalty
        self._factors[place, 1] = extras.frequency_penalty
        self._factors[place, 2] = extras.presence_penalty
        return place

    def remove(self, place: int) -> None:
        """Another row may have the place."""
        self._free.append(place)

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

    def _grow(self) -> None:
        size = len(self._counts)
        more = max(size, _LEAST_PLACES)
        self._counts = _longer(self._counts, more)
        self._in_prompt = _longer(self._in_prompt, more)
        self._factors = _longer(self._factors, more)
        self._free.extend(range(size, size + more))


def _longer(table: Tensor, more: int) -> Tensor:
    return torch.cat([table, table.new_zeros(more, table.shape[1])])
