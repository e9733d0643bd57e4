"""Penalties, bitmasks and logprobs in torch, for rows that request them.

The host does not wait for the device. Logits are float32 [num_rows, vocab_size].
"""

import math

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_tensor


def penalize(
    logits: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Return logits with penalties on earlier tokens; the penalties are float32 [num_rows].

    counts: int32 [num_rows, vocab_size], occurrences of each token in the output. in_prompt: bool,
    with the same shape. For tokens in prompt or output, positive logits are divided by
    `repetition`, other logits are multiplied by it (CTRL, Keskar et al. 2019, arXiv:1909.05858).
    Then `frequency` is subtracted for each occurrence in the output, and `presence` once if the
    token occurs in the output.
    """
    check_tensor("logits", logits, (-1, -1), torch.float32)
    check_tensor("counts", counts, tuple(logits.shape), torch.int32)
    check_tensor("in_prompt", in_prompt, tuple(logits.shape), torch.bool)
    in_output = counts > 0
    factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * in_output


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Return the logits of allowed tokens, and -inf for other tokens.

    bitmask: int32 [num_rows, ceil(vocab_size / 32)]: bit i of word w allows token 32 w + i.
    """
    num_rows, vocab_size = logits.shape
    check_tensor("bitmask", bitmask, (num_rows, -(-vocab_size // 32)), torch.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (bitmask[:, :, None] >> shifts) & 1
    return logits.masked_fill(bits.flatten(1)[:, :vocab_size] == 0, -math.inf)


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_likeliest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and logprobs of a given token of each row, then of the row's likeliest tokens.

    token_ids: int64 [num_rows]. Returns int64 and float32 [num_rows, 1 + num_likeliest], with up to
    vocab_size likeliest tokens, and the given token's rank, int64 [num_rows]. The rank is the
    number of tokens that are at least as likely, including the token itself.
    """
    check_tensor("token_ids", token_ids, (logits.shape[0],), torch.int64)
    likeliest = logits.topk(min(num_likeliest, logits.shape[1]))
    ids = torch.cat([token_ids[:, None], likeliest.indices], 1)
    found = logits.gather(1, ids)
    as_likely = logits.numpy() >= found[:, :1].numpy()
    ranks = torch.tensor([np.count_nonzero(row) for row in as_likely])  # fast, unlike torch's sum
    return ids, found - logits.logsumexp(-1, keepdim=True), ranks
