"""Changes to logits before sampling: penalties, bias, bitmasks; and logprobs.

The host does not wait for the device. Logits are float32.
"""

import math

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.layouts.sampling import (
    BIAS,
    DEFERRED,
    MASK,
    PENALTIES,
    WORD,
    LogitsState,
    column,
)


def process_logits(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    newest: Tensor,
    state: LogitsState,
    *,
    deferred: bool = False,
) -> None:
    """Apply penalties, bias and bitmask of each row's slot in place, in this order.

    deferred: also process rows of deferred slots; otherwise only rows of other slots. The newest
    token of a processed row is counted first, unless it was given. Adjacent rows with the same slot
    are those of a draft: their newest tokens are counted already, and each row ignores those of the
    rows after it.

    logits: [num_rows, at least the shard's tokens], with any row stride. slots: int64 [num_rows],
    -1 for a row that stays unchanged. positions: int64 [num_rows], index of the token to be
    sampled. newest: int64 [num_rows], the previous token. Raises ValueError.
    """
    num_rows, num_tokens = len(slots), state.occurrences.shape[1]
    check_tensor("logits", logits, (num_rows, -1), torch.float32)
    if logits.stride(1) != 1 or logits.shape[1] < num_tokens:
        raise ValueError(f"logits: got shape {list(logits.shape)}, strides {logits.stride()}")
    for name, values in (("slots", slots), ("positions", positions), ("newest", newest)):
        check_tensor(name, values, (num_rows,), torch.int64)
        check_contiguous(name, values)
    if not logits.is_cuda:
        _process(logits[:, :num_tokens], slots, positions, newest, state, deferred)
    elif num_rows and num_tokens:
        from penstock.kernels.sampling import triton_logits

        triton_logits.process(logits, slots, positions, newest, state, deferred)


def apply_bitmask(logits: Tensor, bitmask: Tensor, slots: Tensor) -> None:
    """Set logits to -inf, in place, for tokens that the bitmask of the row's slot forbids.

    bitmask: int32 [num_slots, num_words]: bit i of word w allows token 32 w + i. slots: int64
    [num_rows], -1 for a row that stays unchanged. Raises ValueError.
    """
    check_tensor("bitmask", bitmask, (-1, -(-logits.shape[1] // 32)), torch.int32)
    check_contiguous("bitmask", bitmask)
    check_tensor("slots", slots, (len(logits),), torch.int64)
    if logits.is_cuda:
        from penstock.kernels.sampling import triton_logits

        triton_logits.mask(logits, bitmask, slots)
        return
    rows = (slots >= 0).nonzero().squeeze(1)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (bitmask[slots[rows], :, None] >> shifts) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]] > 0
    logits[rows] = logits[rows].masked_fill(~is_allowed, -math.inf)


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_likeliest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and logprobs of a given token of each row, then of the row's likeliest tokens.

    logits: with any row stride. token_ids: int64 [num_rows]. Returns int64 and float32 [num_rows, 1
    + num_likeliest], with up to vocab_size likeliest tokens, and the given token's rank, int64
    [num_rows]. The rank is the number of tokens that are at least as likely, including the token
    itself.
    """
    check_tensor("token_ids", token_ids, (logits.shape[0],), torch.int64)
    if logits.is_cuda:
        from penstock.kernels.sampling import triton_logits

        return triton_logits.top_logprobs(logits, token_ids, num_likeliest)
    likeliest = logits.topk(min(num_likeliest, logits.shape[1]))
    ids = torch.cat([token_ids[:, None], likeliest.indices], 1)
    found = logits.gather(1, ids)
    as_likely = logits.numpy() >= found[:, :1].numpy()
    ranks = torch.tensor([np.count_nonzero(row) for row in as_likely])  # fast, unlike torch's sum
    return ids, found - logits.logsumexp(-1, keepdim=True), ranks


def _process(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    newest: Tensor,
    state: LogitsState,
    deferred: bool,
) -> None:
    """Compute `process_logits` in torch; logits: only this rank's shard."""
    of_slots = column(state.parameters, "flags")
    if not of_slots.numpy()[slots.numpy()].any():
        return  # fast, because most steps end here
    flags = of_slots[slots].masked_fill(slots < 0, 0)
    if not deferred:
        flags = flags.masked_fill(flags & DEFERRED > 0, 0)
    for row in flags.nonzero().squeeze(1).tolist():
        slot, flag, position = int(slots[row]), int(flags[row]), int(positions[row])
        own_slot = state.parameters[slot, None]
        words = own_slot[0]
        if flag & PENALTIES:
            is_own = slots == slot
            drafts = (newest[row + 1 :] - state.first_token)[is_own[row + 1 :]]
            token = int(newest[row]) - state.first_token
            is_new = position > words[WORD["num_given"]] and int(is_own.sum()) == 1
            if is_new and 0 <= token < logits.shape[1]:
                state.occurrences[slot, token] += 2
            drafts = drafts[(drafts >= 0) & (drafts < logits.shape[1])]
            ignored = torch.full_like(drafts, -2, dtype=torch.int32)
            occurrences = state.occurrences[slot].index_add(0, drafts, ignored)[None]
            logits[row] = penalize(
                logits[row, None],
                occurrences >> 1,
                occurrences & 1 > 0,
                repetition=column(own_slot, "repetition_penalty"),
                frequency=column(own_slot, "frequency_penalty"),
                presence=column(own_slot, "presence_penalty"),
            )
        if flag & BIAS:
            is_short = position < words[WORD["min_length"]]
            number = words[WORD["num_long_bias" if is_short else "num_bias"]]
            token_ids, values = state.bias[slot, :, :number]
            own = token_ids.long() - state.first_token
            here = (own >= 0) & (own < logits.shape[1])
            logits[row].index_add_(0, own[here], values.view(torch.float32)[here])
        if flag & MASK:
            whole = torch.arange(state.first_token, state.first_token + logits.shape[1])
            bits = state.bitmask[slot, whole // 32] >> whole.int() % 32 & 1
            logits[row].masked_fill_(bits == 0, -math.inf)


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
