"""A row that asks for more than a token, as the host keeps it."""

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.messages.plan import RowAdded, RowExtras
from penstock.services.worker.token_masks import token_mask

NEVER = -1e30
"""added to the logit of what may not be drawn: finite, so that it can be drawn where a grammar
allows nothing else"""


class ExtraRow:
    """A row that asks, as far as the host must know it."""

    def __init__(self, row: RowAdded, vocab_size: int) -> None:
        """Raise ValueError for a bias of a token that the model does not have, and for one that
        is allowed."""
        self.extras = extras = row.extras or RowExtras(0)
        self.token_ids = np.frombuffer(row.token_ids, "<i4").astype(np.int64)
        self.place = -1
        """in `Penalties`, if it has any"""
        self._min_length = extras.num_prompt_tokens + extras.min_tokens
        self._bias = _entries(extras.logit_bias)
        wrong = [token_id for token_id in extras.logit_bias if not 0 <= token_id < vocab_size]
        if wrong:
            raise ValueError(f"bias of token {wrong[0]}; ids go up to {vocab_size - 1}")
        output = self.token_ids[extras.num_prompt_tokens :].tolist()
        self.mask = token_mask(extras, output, vocab_size)
        """None: all tokens, as far as a grammar allows them"""
        never = {token_id: NEVER for token_id in extras.end_token_ids if token_id < vocab_size}
        self._long_bias = np.concatenate([self._bias, _entries(never)], 1)

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens are forbidden."""
        return self.mask is not None or self.extras.structured_outputs is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know each of its tokens before it draws the next."""
        follows = self.mask is not None and self.mask.follows_output
        return follows or self.extras.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on what it has said."""
        extras = self.extras
        penalties = extras.repetition_penalty, extras.frequency_penalty, extras.presence_penalty
        return penalties != (1.0, 0.0, 0.0)

    def bias(self, position: int) -> NDArray[np.float64]:
        """Token ids and what is added to their logits, [2, n], for the token at `position`."""
        return self._long_bias if position < self._min_length else self._bias


def _entries(bias: dict[int, float]) -> NDArray[np.float64]:
    """Token ids and values, [2, n]."""
    return np.array([list(bias), list(bias.values())], np.float64).reshape(2, -1)
