"""A row that the logits processor handles, as the host keeps it: bias and allowed tokens."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.messages.plan import RowAdded, RowExtras, pack

NEVER = -1e30
"""bias of a forbidden token; finite, so that the token can be drawn if a grammar allows no other"""
Bitmask = NDArray[np.int32]
"""int32 [..., ceil(vocab_size / 32)]: bit i of word w is token 32 w + i"""


class ProcessedRow:
    """Parameters of a row with `RowExtras`."""

    def __init__(self, row: RowAdded, vocab_size: int) -> None:
        """Raise ValueError for a bias of an unknown token, or an unknown allowed token."""
        self.extras = extras = row.extras or RowExtras(0)
        self.token_ids = np.frombuffer(row.token_ids, "<i4").astype(np.int64)
        self.has_penalties = (
            extras.repetition_penalty,
            extras.frequency_penalty,
            extras.presence_penalty,
        ) != (1.0, 0.0, 0.0)
        self._min_length = extras.num_prompt_tokens + extras.min_tokens
        self._bias = _entries(extras.logit_bias)
        _check_known("logit_bias", extras.logit_bias, vocab_size)
        never = {token_id: NEVER for token_id in extras.end_token_ids if token_id < vocab_size}
        self._long_bias = np.concatenate([self._bias, _entries(never)], 1)
        self.mask: TokenMask | None = None
        """None: all tokens, except for a grammar"""
        if extras.allowed_token_ids or extras.bad_words:
            output = self.token_ids[extras.num_prompt_tokens :].tolist()
            self.mask = TokenMask(extras, output, vocab_size)

    @property
    def is_restricted(self) -> bool:
        return self.mask is not None or self.extras.structured_outputs is not None

    @property
    def needs_tokens(self) -> bool:
        """True if the host must know each token of the row before the next is drawn."""
        follows = self.mask is not None and self.mask.follows_output
        return follows or self.extras.structured_outputs is not None

    def bias(self, position: int) -> NDArray[np.float64]:
        """Return token ids and their bias, [2, n], for the token at `position`."""
        return self._long_bias if position < self._min_length else self._bias


class TokenBits:
    """Some tokens as bits of a mask's words."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._at = np.array(list(bits), np.int64)
        self._bits = np.array(list(bits.values()), np.uint32).view(np.int32)

    def allow(self, masks: Bitmask) -> None:
        """Set the tokens' bits in one or several masks."""
        masks[..., self._at] |= self._bits

    def forbid(self, masks: Bitmask) -> None:
        """Clear the tokens' bits in one or several masks."""
        masks[..., self._at] &= ~self._bits


class TokenMask:
    """The mask of a row with `allowed_token_ids` or `bad_words`.

    The last token of a bad word is forbidden if the output ends with the word's other tokens.
    """

    def __init__(self, extras: RowExtras, output_token_ids: Iterable[int], vocab_size: int) -> None:
        """Raise ValueError for an unknown allowed token."""
        allowed = extras.allowed_token_ids
        _check_known("allowed_token_ids", allowed, vocab_size)
        self._always = np.full((vocab_size + 31) // 32, 0 if allowed else -1, np.int32)
        TokenBits(allowed).allow(self._always)
        # a word with an unknown token can't be generated
        words = [ids for ids in extras.bad_words if ids and 0 <= min(ids) <= max(ids) < vocab_size]
        TokenBits(ids[0] for ids in words if len(ids) == 1).forbid(self._always)
        self._words = [(pack(ids[:-1]), ids[-1]) for ids in words if len(ids) > 1]
        self._num_bytes = max((len(begin) for begin, _ in self._words), default=0)
        self._tail = b""
        """the output's last tokens, packed: as many as the longest word needs"""
        self._extend(output_token_ids)

    @property
    def follows_output(self) -> bool:
        """True if the mask depends on earlier tokens."""
        return bool(self._words)

    def accept(self, token_id: int) -> None:
        """Append the row's new token, or -1 for a row without a token."""
        if token_id >= 0:
            self._extend([token_id])

    def bitmask(self) -> Bitmask:
        """Return the allowed tokens, int32 [ceil(vocab_size / 32)], which must not be changed."""
        ends = [end for begin, end in self._words if self._tail.endswith(begin)]
        if not ends:
            return self._always
        mask = self._always.copy()
        TokenBits(ends).forbid(mask)
        return mask

    def _extend(self, token_ids: Iterable[int]) -> None:
        if self._words:
            self._tail = (self._tail + pack(token_ids))[-self._num_bytes :]


def _check_known(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise ValueError(f"{name}: got token {wrong[0]}, expected 0 to {vocab_size - 1}")


def _entries(bias: dict[int, float]) -> NDArray[np.float64]:
    """Return token ids and values, [2, n]."""
    return np.array([list(bias), list(bias.values())], np.float64).reshape(2, -1)
