"""The slot table: the numbers with which a row's token is chosen, and changes to logits by slot."""

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# flags of a slot: its row has penalties, a bias or a bitmask; the largest flag defers the row to a
# second call of `process_logits`
PENALTIES, BIAS, MASK, DEFERRED = 1, 2, 4, 8


class Column(NamedTuple):
    """Number that each slot has."""

    dtype: torch.dtype  # type of the number; the table stores its bits
    neutral: float = 0  # value that changes nothing
    removes: bool = False  # True if other values remove tokens from those that may be drawn
    flags: int = 0  # flags of a row with another value


# Numbers of `SamplingParams` keep their names here.
COLUMNS = {
    "seed": Column(torch.int64),  # key of the sampling noise; the first column, for alignment
    "temperature": Column(torch.float32),  # 0: greedy
    "top_k": Column(torch.int32, removes=True),  # 0 or less: all tokens
    "top_p": Column(torch.float32, 1.0, removes=True),
    "min_p": Column(torch.float32, removes=True),
    "repetition_penalty": Column(torch.float32, 1.0, flags=PENALTIES),
    "frequency_penalty": Column(torch.float32, flags=PENALTIES),
    "presence_penalty": Column(torch.float32, flags=PENALTIES),
    # numbers that the worker derives
    "flags": Column(torch.int32),
    "num_given": Column(torch.int32),  # tokens given with the row
    "min_length": Column(torch.int32),  # the long bias applies to positions before this number
    "num_bias": Column(torch.int32),  # leading bias entries that always apply
    "num_long_bias": Column(torch.int32),  # leading entries of the long bias
}
_SIZES = [column.dtype.itemsize // 4 for column in COLUMNS.values()]
# name → index of the first int32 in a slot's words
WORD = dict(zip(COLUMNS, accumulate(_SIZES, initial=0), strict=False))
NUM_WORDS = -(-sum(_SIZES) // 16) * 16  # int32 values of a slot, rounded up to whole cache lines
_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}

MAX_BIAS = 2048  # biased tokens of a row, including its end tokens
# bias of a forbidden token; finite, so that the token can be drawn if a grammar allows no other
NEVER = -1e30

RUN = 4096  # token ids of a run, which shares 1024 counters of four words each


class SamplingTensors(NamedTuple):
    """The slot table and the last tokens."""

    parameters: Tensor  # int32 [num_slots, NUM_WORDS]: COLUMNS
    last_token: Tensor  # int64 [num_slots]; `sample` writes the new token here


class LogitsState(NamedTuple):
    """Changes to the logits of flagged slots, for one rank's shard of the vocabulary."""

    first_token: int  # token id of the shard's first logit
    parameters: Tensor  # the slot table
    # int32 [num_slots, tokens of the shard]: twice the occurrences in the output, plus 1 if the
    # prompt has the token
    occurrences: Tensor
    bias: Tensor  # int32 [num_slots, 2, MAX_BIAS]: token ids, and values as the bits of a float32
    # int32 [num_slots, ceil(vocab_size / 32)]: bit i of word w allows token 32 w + i
    bitmask: Tensor


def make_parameters(num_slots: int, device: torch.device) -> Tensor:
    """Return a slot table without rows."""
    return torch.zeros(num_slots, NUM_WORDS, dtype=torch.int32, device=device)


def column(parameters: Tensor, name: str) -> Tensor:
    """Return a view of one number of all slots, [num_slots], in the number's type."""
    begin, dtype = WORD[name], COLUMNS[name].dtype
    return parameters[:, begin : begin + dtype.itemsize // 4].view(dtype)[:, 0]


def write_numbers(words: NDArray[np.int32], numbers: Mapping[str, float]) -> None:
    """Store named numbers in the words of a slot. Raises ValueError."""
    for name, number in numbers.items():
        if name not in COLUMNS:
            raise ValueError(f"sampling: got {name}, expected {', '.join(COLUMNS)}")
        begin, dtype = WORD[name], COLUMNS[name].dtype
        bits = np.array([number], _NUMPY[dtype]).view(np.int32)
        words[begin : begin + len(bits)] = bits


NEUTRAL_WORDS: NDArray[np.int32] = np.zeros(NUM_WORDS, np.int32)  # words of a greedy row
write_numbers(NEUTRAL_WORDS, {name: column.neutral for name, column in COLUMNS.items()})


def unrestricted(parameters: Tensor) -> Tensor:
    """Return a copy of the slot table with which every row may draw any token."""
    copy = parameters.clone()
    for name, kind in COLUMNS.items():
        if kind.removes:
            column(copy, name).fill_(kind.neutral)
    return copy


def shard_size(vocab_size: int, num_ranks: int) -> int:
    """Return the number of token ids of a rank's shard of the vocabulary, a multiple of a run.

    The last shards may have fewer token ids or none.
    """
    return -(-vocab_size // (RUN * num_ranks)) * RUN


def make_logits_state(
    parameters: Tensor, vocab_size: int, first_token: int, num_tokens: int
) -> LogitsState:
    """Return a state without changes; a CPU allocates a page only when a row first writes to it."""
    num_slots = len(parameters)
    empty = partial(torch.empty, dtype=torch.int32, device=parameters.device)
    return LogitsState(
        first_token,
        parameters,
        occurrences=empty(num_slots, num_tokens),
        bias=empty(num_slots, 2, MAX_BIAS),
        bitmask=empty(num_slots, -(-vocab_size // 32)),
    )
