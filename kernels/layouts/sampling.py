"""Sampling parameters and changes to logits on the device, by slot."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

# flags of a slot: its row has penalties, a bias, or a bitmask; or the row is left to a second call
# of `process_logits`
PENALTIES, BIAS, MASK, DEFERRED = 1, 2, 4, 8
NUM_COLUMNS = 8
FLAGS, REPETITION, FREQUENCY, PRESENCE = range(4)
# columns of `LogitsState.parameters`; penalties as the bits of a float32
NUM_GIVEN, MIN_LENGTH, NUM_BIAS, NUM_LONG_BIAS = range(4, NUM_COLUMNS)
MAX_BIAS = 2048  # biased tokens of a row, including its end tokens
# bias of a forbidden token; finite, so that the token can be drawn if a grammar allows no other
NEVER = -1e30

RUN = 4096  # token ids that share a run of 1024 counters of four words each


class SamplingTensors(NamedTuple):
    """Sampling parameters and last tokens by slot, each [num_slots]."""

    seeds: Tensor  # int64
    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0 or less: all tokens
    top_p: Tensor  # float32; 1: all tokens
    min_p: Tensor  # float32; 0: all tokens
    last_token: Tensor  # int64: `sample` writes the new token here


class LogitsState(NamedTuple):
    """Changes to logits by slot, for one rank's shard of the vocabulary. Only flagged slots count.

    The first `NUM_BIAS` entries of a bias apply always. Further ones, up to `NUM_LONG_BIAS`, apply
    at positions before `MIN_LENGTH`.
    """

    first_token: int  # token id of the shard's first logit
    parameters: Tensor  # int32 [num_slots, NUM_COLUMNS]: the columns above
    # int32 [num_slots, tokens of the shard]: twice the occurrences in the output, plus 1 if the
    # prompt has the token
    occurrences: Tensor
    bias: Tensor  # int32 [num_slots, 2, MAX_BIAS]: token ids, and values as the bits of a float32
    # int32 [num_slots, ceil(vocab_size / 32)]: bit i of word w allows token 32 w + i
    bitmask: Tensor


def shard_size(vocab_size: int, num_ranks: int) -> int:
    """Return the token ids of each rank's shard of the vocabulary, a multiple of a run.

    The last shards may have fewer token ids, or none.
    """
    return -(-vocab_size // (RUN * num_ranks)) * RUN


def make_logits_state(
    num_slots: int, vocab_size: int, first_token: int, num_tokens: int, device: torch.device
) -> LogitsState:
    """Return a state without changes; a CPU allocates a page when a row first writes to it."""
    empty = partial(torch.empty, dtype=torch.int32, device=device)
    return LogitsState(
        first_token,
        parameters=torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int32, device=device),
        occurrences=empty(num_slots, num_tokens),
        bias=empty(num_slots, 2, MAX_BIAS),
        bitmask=empty(num_slots, -(-vocab_size // 32)),
    )
