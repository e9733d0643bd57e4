"""Choice of the next token of each row: greedy, or random among the tokens that may be drawn."""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.layouts.sampling import NUM_WORDS, SamplingTensors
from penstock.kernels.sampling import reference


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    by_slot: SamplingTensors,
    out: Tensor | None = None,
) -> Tensor:
    """Return a token id for each row, int64 [num_rows]; of equal scores, the lowest id wins.

    The token is -1 if a logit is NaN or +inf, or if all logits are -inf. `last_token` is then 0, a
    token that the model accepts. A logit of -inf forbids a token.

    logits: float32 [num_rows, vocab_size], with any row stride. slots: int64 [num_rows], the rows'
    slots, -1 for a padded row, whose token is 0. positions: int64 [num_rows], index of the new
    token in its sequence. by_slot: parameters; its `last_token` is overwritten. out: memory of the
    result; elements of padded rows stay unchanged. Raises ValueError.
    """
    check_tensor("logits", logits, (-1, -1), torch.float32)
    if logits.stride(1) != 1:
        raise ValueError(f"logits: got strides {list(logits.stride())}, expected 1 as the last")
    for name, values in (("slots", slots), ("positions", positions)):
        check_tensor(name, values, (logits.shape[0],), torch.int64)
        check_contiguous(name, values)
    last_token = by_slot.last_token
    check_tensor("last_token", last_token, (len(by_slot.parameters),), torch.int64)
    check_contiguous("last_token", last_token)
    check_tensor("parameters", by_slot.parameters, (len(last_token), NUM_WORDS), torch.int32)
    check_contiguous("parameters", by_slot.parameters)
    if out is not None:
        check_tensor("out", out, slots.shape, torch.int64)
        check_contiguous("out", out)
    if not logits.is_cuda:
        tokens = (CHOSEN.compiled_step or reference).sample(logits, slots, positions, by_slot)
        return tokens if out is None else out.copy_(torch.where(slots < 0, out, tokens))
    from penstock.kernels.sampling import triton_sampling

    return triton_sampling.sample(logits, slots, positions, by_slot, out)
