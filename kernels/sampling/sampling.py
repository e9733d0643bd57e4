"""Choice of the next token of each row: greedy, or random among the tokens that may be drawn.

The logits of a row may be sharded over ranks. Ranks that can read each other's memory sample with
`triton_sampling.ShardedSampler`. Other ranks exchange a few candidates of each row: the token that
a rank would draw from its shard, and the likeliest tokens. The token drawn from the whole
vocabulary is among all ranks' candidates, unless more tokens may be drawn (`candidates_suffice`).
The host does not wait for the device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.layouts.sampling import COLUMNS, NUM_WORDS, SamplingTensors, unrestricted
from penstock.kernels.sampling import reference

NUM_LIKELIEST = 64  # candidates of each rank in addition to the drawn token
NEVER = -1e30  # logit of tokens that are no candidates; finite, so that no sum of them is NaN


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


def candidates_suffice(numbers: Mapping[str, float]) -> bool:
    """Return True if the candidates include all tokens that a row may draw, or the winner.

    numbers: the row's numbers by column, without neutral numbers.
    """
    is_random = numbers.get("temperature", 0) > 0
    is_restricted = is_random and any(COLUMNS[name].removes for name in numbers)
    return not is_restricted or 0 < numbers.get("top_k", 0) <= NUM_LIKELIEST


def candidates(
    logits: Tensor,
    num_tokens: int,
    rank: int,
    num_ranks: int,
    slots: Tensor,
    positions: Tensor,
    by_slot: SamplingTensors,
) -> Tensor:
    """Return logits and token ids of a rank's candidates; float64 holds both exactly.

    Shape: [num_rows, 1 + NUM_LIKELIEST or all, 2].

    logits: this rank's shard, float32 [num_rows, part_size], starting at token rank * part_size;
    elements after the first `num_tokens` are overwritten. slots, positions, by_slot: see `sample`;
    `last_token` is not written.
    """
    part_size = logits.shape[1]
    first = rank * part_size
    logits[:, num_tokens:] = NEVER
    # Noise depends on the token id, so the shard must keep its place in the vocabulary.
    whole = logits.new_full((len(logits), num_ranks * part_size), NEVER)
    whole[:, first : first + part_size] = logits
    of_all_tokens = SamplingTensors(
        unrestricted(by_slot.parameters), torch.empty_like(by_slot.last_token)
    )
    drawn = sample(whole, slots, positions, of_all_tokens)
    # A rank without tokens, or a padded row, may draw another rank's token.
    drawn = (drawn[:, None] - first).clamp(0, part_size - 1)
    likeliest = logits.topk(min(NUM_LIKELIEST, part_size)).indices
    here = torch.cat([drawn, likeliest], 1)
    return torch.stack([logits.gather(1, here).double(), (here + first).double()], -1)


def draw_candidate(
    parts: list[Tensor], part_size: int, slots: Tensor, positions: Tensor, by_slot: SamplingTensors
) -> Tensor:
    """Draw tokens, int64 [num_rows], from the `candidates` of all ranks, in rank order.

    The result is the same on every rank, and is written to `by_slot.last_token`.
    """
    logits, token_ids = torch.cat(parts, 1).unbind(-1)
    whole = logits.new_full((len(logits), len(parts) * part_size), NEVER, dtype=torch.float32)
    whole.scatter_(1, token_ids.long(), logits.float())
    return sample(whole, slots, positions, by_slot)
