"""The rows of the logits processor: their state on the host and on the device."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.layouts.sampling import (
    BIAS,
    COLUMNS,
    DEFERRED,
    MASK,
    MAX_BIAS,
    NEVER,
    PENALTIES,
    make_logits_state,
)
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import RowAdded, RowExtras
from penstock.services.worker.launched_step import integers_to_device, to_device

Bitmask = NDArray[np.int32]  # int32 [..., num_words]: bit i of word w is token 32 w + i


class ProcessedRow:
    """The parameters of a row with `RowExtras`, and the last tokens of its output."""

    def __init__(self, row: RowAdded, vocab_size: int, is_deferred: bool = False) -> None:
        """Store a row, which rank 0 samples if `is_deferred`."""
        self.extras = extras = row.extras or RowExtras(0)
        # a row without extras may lack some, which count only by their number
        self.token_ids = np.frombuffer(bytes(4 * row.num_skipped) + row.token_ids, "<i4")
        # skip words with unknown tokens, which can't be generated
        words = [ids for ids in extras.bad_words if ids and 0 <= min(ids) <= max(ids) < vocab_size]
        self._words = [(pack(ids[:-1]), ids[-1]) for ids in words if len(ids) > 1]
        self._num_bytes = max((len(begin) for begin, _ in self._words), default=0)
        self._tail = b""  # packed last tokens of the output, for the longest word
        # the number of tokens that the host knows, and the last of them; -1: it was given
        self._num_known, self._last_id = len(self.token_ids), -1
        # (position, token) of drafts that are counted; all that may be in flight
        self._drafted: deque[tuple[int, int]] = deque(maxlen=512)
        self._extend(self.token_ids[extras.num_prompt_tokens :].tolist())
        # mask of tokens that the row's parameters allow; None: all tokens (a grammar has own masks)
        self.mask = self._mask([ids[0] for ids in words if len(ids) == 1], vocab_size)
        biased = list(extras.logit_bias.items())
        never = [token_id for token_id in extras.end_token_ids if token_id < vocab_size]
        if extras.min_tokens:
            biased += [(token_id, NEVER) for token_id in never]
        # [2, num_biased]: token ids, and float32 values as int32 bits
        self.bias = np.zeros((2, min(len(biased), MAX_BIAS)), np.int32)
        if biased:
            ids, values = zip(*biased[:MAX_BIAS], strict=True)
            self.bias[:] = ids, np.array(values, np.float32).view(np.int32)
        self.flags = BIAS * (self.bias.size > 0) | MASK * (self.mask is not None)
        for name in row.sampling:
            self.flags |= COLUMNS[name].flags
        # logprobs need the raw logits, which `process_logits` overwrites
        if is_deferred or self.needs_tokens or (self.flags and extras.num_logprobs >= 0):
            self.flags |= DEFERRED

    def _mask(self, forbidden: list[int], vocab_size: int) -> Bitmask | None:
        allowed = self.extras.allowed_token_ids
        if not allowed and not forbidden:
            return None
        masks: Bitmask = np.full((1, (vocab_size + 31) // 32), 0 if allowed else -1, np.int32)
        TokenBits(allowed).allow(masks, [0])
        TokenBits(forbidden).forbid(masks, [0])
        return masks.ravel()

    @property
    def has_bad_words(self) -> bool:
        """True if the row has bad words of several tokens."""
        return bool(self._words)

    @property
    def needs_tokens(self) -> bool:
        """True if the host must know each token of the row before the next token is sampled."""
        return self.has_bad_words or self.extras.structured_outputs is not None

    def numbers(self) -> dict[str, int]:
        """Return the row's columns in the slot table, without its sampling parameters."""
        extras = self.extras
        return {
            "flags": self.flags,
            "num_given": len(self.token_ids),
            # limit to int32, which no length reaches
            "min_length": min(extras.num_prompt_tokens + extras.min_tokens, 2**31 - 1),
            "num_bias": len(extras.logit_bias),
            "num_long_bias": self.bias.shape[1],
        }

    def occurrences(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return token ids, and the values to add for them to `LogitsState.occurrences`."""
        prompt, output = np.split(self.token_ids.astype(np.int64), [self.extras.num_prompt_tokens])
        prompt = np.flatnonzero(np.bincount(prompt))
        summands = np.repeat(np.array([1, 2], np.int32), [len(prompt), len(output)])
        return np.concatenate([prompt, output]), summands

    def follows(self, position: int, input_id: int) -> bool:
        """Return whether a step's row follows the known tokens, and no wrong draft.

        position, input_id: of the row's input token; -1 for a token that is right in any case.
        """
        is_right = input_id == self._last_id or -1 in (input_id, self._last_id)
        return position == self._num_known - 1 and is_right

    def count_draft(self, position: int, token_ids: list[int]) -> list[tuple[int, int]]:
        """Return (token, number to count) for a draft at a position, and for what it replaces.

        Tokens at and after the position were wrong. A draft of one token is counted as any token.
        """
        counts = []
        while self._drafted and self._drafted[-1][0] >= position:
            counts.append((self._drafted.pop()[1], -1))
        if len(token_ids) > 1:
            self._drafted.extend(enumerate(token_ids, position))
            counts += [(token_id, 1) for token_id in token_ids]
        return counts

    def accept(self, token_id: int) -> None:
        """Append the row's new token, or -1 for a row without a token."""
        if token_id >= 0:
            self._num_known, self._last_id = self._num_known + 1, token_id
            self._extend([token_id])

    def bad_tokens(self) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens."""
        return [end for begin, end in self._words if self._tail.endswith(begin)]

    def allows(self, token_id: int) -> bool:
        """Return whether the row's parameters, apart from a grammar, allow a token now."""
        in_mask = self.mask is None or has_token(self.mask, token_id)
        return in_mask and token_id not in self.bad_tokens()

    def _extend(self, token_ids: Iterable[int]) -> None:
        if self._words:
            self._tail = (self._tail + pack(token_ids))[-self._num_bytes :]


def has_token(mask: Bitmask, token_id: int) -> bool:
    """Return whether a mask [num_words] has a token."""
    word = token_id // 32
    return word < len(mask) and bool(mask[word] >> token_id % 32 & 1)


class TokenBits:
    """A set of tokens as bits in the words of a mask."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._at = np.array(list(bits), np.int64)
        self._bits = np.array(list(bits.values()), np.uint32).view(np.int32)

    def allow(self, masks: Bitmask, rows: list[int]) -> None:
        """Set the tokens' bits in the masks of `rows`."""
        masks[np.array(rows, np.int64)[:, None], self._at] |= self._bits

    def forbid(self, masks: Bitmask, rows: list[int]) -> None:
        """Clear the tokens' bits in the masks of `rows`."""
        masks[np.array(rows, np.int64)[:, None], self._at] &= ~self._bits

    def found(self, masks: Bitmask, rows: list[int]) -> list[int]:
        """Return the rows whose masks have any of the tokens."""
        at = np.array(rows, np.int64)
        has_one = (masks[at[:, None], self._at] & self._bits).any(axis=1)
        found: list[int] = at[has_one].tolist()
        return found


NO_TAG = -2  # equals no token id, nor the token -1 of a failed row


class LogitsChanges:
    """The `LogitsState` of a rank's shard, which the step's CUDA graph applies."""

    def __init__(self, parameters: Tensor, vocab_size: int, start: int, stop: int) -> None:
        """Allocate the state for the slot table `parameters` and the shard [start, stop)."""
        self.state = make_logits_state(parameters, vocab_size, start, stop - start)
        self._start, self._stop, self._device = start, stop, parameters.device

    def add(self, rows: dict[int, ProcessedRow]) -> None:
        """Copy the biases, masks and occurrences of new rows, slot → row, to the device."""
        where, summands = [], []
        for slot, row in rows.items():
            if row.bias.size:
                self.state.bias[slot, :, : row.bias.shape[1]] = to_device(row.bias, self._device)
            if row.mask is not None:
                self.state.bitmask[slot] = to_device(row.mask, self._device)
            if row.flags & PENALTIES:
                self.state.occurrences[slot].zero_()
                token_ids, some = row.occurrences()
                own = (token_ids >= self._start) & (token_ids < self._stop)
                where.append(token_ids[own] + slot * (self._stop - self._start) - self._start)
                summands.append(some[own])
        if where:
            (index,) = integers_to_device([np.concatenate(where)], self._device)
            values = to_device(np.concatenate(summands), self._device)
            self.state.occurrences.view(-1).index_add_(0, index, values)

    def count(self, tokens: list[tuple[int, int, int]], last_token: Tensor) -> None:
        """Count (slot, token, number): a token of the output; -1 is the slot's last token."""
        lists = list(zip(*tokens, strict=True))
        slots, token_ids, numbers = integers_to_device(lists, self._device)
        token_ids = torch.where(token_ids < 0, last_token[slots], token_ids) - self._start
        own = (token_ids >= 0) & (token_ids < self._stop - self._start)
        # tokens of other shards add 0 to the first token
        index = slots, torch.where(own, token_ids, 0)
        values = torch.where(own, 2 * numbers, 0).int()
        self.state.occurrences.index_put_(index, values, accumulate=True)


class TokenMasks:
    """The masks and allowed opening tags of a step's deferred rows, on the host and on the device.

    Host memory is pinned. A separate stream copies it to the device while the step runs. Earlier
    steps must have ended before the masks of the next step are written.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the masks of up to `num_rows` rows on the device."""
        self._device = device
        num_words = -(-vocab_size // 32)
        self.bitmask = torch.full((num_rows, num_words), -1, dtype=torch.int32, device=device)
        # a token that is kept if it was sampled, whatever the mask
        self.tags = torch.full((num_rows,), NO_TAG, dtype=torch.int64, device=device)
        self._host = torch.empty(0, 0, dtype=torch.int32)
        self._with_grammar: list[int] = []
        self._tags: dict[int, int] = {}
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_host(self, num_words: int) -> Bitmask:
        """Return the host's masks, to be written, with `num_words` words for the tokenizer."""
        if not self._host.numel():
            shape = len(self.bitmask), num_words
            is_pinned = self._stream is not None
            self._host = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)
        masks: Bitmask = self._host.numpy()
        return masks

    def copy(self, rows: slice, with_grammar: list[int], tags: dict[int, int]) -> None:
        """Copy the masks of rows, and allowed opening tags (row → token), to the device.

        Rows with a grammar allow no token that the tokenizer lacks.
        """
        if self._stream is None:
            self._copy(rows, with_grammar, tags)
            return
        with torch.cuda.stream(self._stream):
            self._copy(rows, with_grammar, tags)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, rows: slice, with_grammar: list[int], tags: dict[int, int]) -> None:
        width = min(self._host.shape[1], self.bitmask.shape[1])
        self.bitmask[rows, :width].copy_(self._host[rows, :width], non_blocking=True)
        if width < self.bitmask.shape[1] and with_grammar != self._with_grammar:
            self._with_grammar = with_grammar
            words = np.full(len(self.bitmask), -1, np.int32)
            words[with_grammar] = 0
            self.bitmask[:, width:] = to_device(words, self._device)[:, None]
        if tags != self._tags:
            self._tags = tags
            by_row = np.full(len(self.tags), NO_TAG)
            by_row[list(tags)] = list(tags.values())
            self.tags.copy_(to_device(by_row, self._device))
