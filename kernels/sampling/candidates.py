"""Sampling from sharded logits by the exchange of a few candidates of each rank.

This method serves ranks that can't read each other's memory; for other ranks see
`triton_sharded_sampling.py`. A rank's candidates of a row are the token that it would draw from its
shard, and the likeliest tokens. The token drawn from the whole vocabulary is among all ranks'
candidates, unless more tokens may be drawn (`candidates_suffice`). The host does not wait for the
device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import COLUMNS, SamplingTensors, unrestricted
from penstock.kernels.sampling.sampling import sample

NUM_LIKELIEST = 64  # candidates of each rank in addition to the drawn token
NEVER = -1e30  # logit of other tokens; finite, so that sums over only such tokens are not NaN


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
