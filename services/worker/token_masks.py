"""Bitmasks of the tokens that `allowed_token_ids` and `bad_words` leave to a row."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.messages.plan import RowExtras, pack

Bitmask = NDArray[np.int32]
"""int32 [..., ceil(vocab_size / 32)]: bit i of word w is token 32 w + i"""


class TokenBits:
    """Some tokens as bits of a mask's words."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._at = np.array(list(bits), np.int64)
        self._bits = np.array(list(bits.values()), np.uint32).view(np.int32)

    def allow(self, masks: Bitmask) -> None:
        """Set the tokens' bits in a mask, or in several."""
        masks[..., self._at] |= self._bits

    def forbid(self, masks: Bitmask) -> None:
        """Clear the tokens' bits in a mask, or in several."""
        masks[..., self._at] &= ~self._bits


class TokenMask:
    """The mask of one row, which changes with its output where a bad word has several tokens.

    The last token of a bad word is forbidden where the output ends with the word's other tokens.
    """

    def __init__(self, extras: RowExtras, output_token_ids: Iterable[int], vocab_size: int) -> None:
        """Raise ValueError for an allowed token that the model does not have."""
        allowed = extras.allowed_token_ids
        wrong = [token_id for token_id in allowed if not 0 <= token_id < vocab_size]
        if wrong:
            raise ValueError(f"allowed token {wrong[0]}; ids go up to {vocab_size - 1}")
        self._always = np.full((vocab_size + 31) // 32, 0 if allowed else -1, np.int32)
        TokenBits(allowed).allow(self._always)
        # a word with a token that the model does not have can't be generated
        words = [ids for ids in extras.bad_words if ids and 0 <= min(ids) <= max(ids) < vocab_size]
        TokenBits(ids[0] for ids in words if len(ids) == 1).forbid(self._always)
        self._words = [(pack(ids[:-1]), ids[-1]) for ids in words if len(ids) > 1]
        self._num_bytes = max((len(begin) for begin, _ in self._words), default=0)
        self._tail = b""
        """the output's last tokens, packed: as many as the longest word needs"""
        self._extend(output_token_ids)

    @property
    def follows_output(self) -> bool:
        """Whether the mask depends on the tokens drawn before."""
        return bool(self._words)

    def accept(self, token_id: int) -> None:
        """Append the token drawn for the row; -1: none could be drawn."""
        if token_id >= 0:
            self._extend([token_id])

    def bitmask(self) -> Bitmask:
        """Tokens that may be drawn next, int32 [ceil(vocab_size / 32)]; not to be changed."""
        ends = [end for begin, end in self._words if self._tail.endswith(begin)]
        if not ends:
            return self._always
        mask = self._always.copy()
        TokenBits(ends).forbid(mask)
        return mask

    def _extend(self, token_ids: Iterable[int]) -> None:
        if self._words:
            self._tail = (self._tail + pack(token_ids))[-self._num_bytes :]


def token_mask(
    extras: RowExtras, output_token_ids: Iterable[int], vocab_size: int
) -> TokenMask | None:
    """Return a row's mask, None where the row restricts nothing. Raises ValueError."""
    if not extras.allowed_token_ids and not extras.bad_words:
        return None
    return TokenMask(extras, output_token_ids, vocab_size)
