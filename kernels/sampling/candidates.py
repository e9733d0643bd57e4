"""Sampling from logits of which every rank of a group has a part, by what few of them can win.

For ranks that can't read each other's memory (otherwise: `triton_sharded_sampling.py`). Each one
names candidates of its part: for each row the token that it would draw from the part, and the
likeliest ones. The token that the whole vocabulary gives is among all ranks' candidates, unless
more tokens than these may be drawn (`is_enough`). Nothing here waits for the device.
"""

import torch
from torch import Tensor

from penstock.kernels.sampling.sampling import sample

NUM_LIKELIEST = 64
"""candidates of each rank beside the one that it draws"""
NEVER = -1e30
"""logit of what is no candidate: finite, for sums over nothing else would be no numbers"""


def is_enough(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether all tokens that a row may draw, or the one that wins, are among the candidates."""
    is_restricted = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    return not is_restricted or 0 < top_k <= NUM_LIKELIEST


def candidates(
    logits: Tensor,
    num_tokens: int,
    rank: int,
    num_ranks: int,
    slots: Tensor,
    positions: Tensor,
    parameters: dict[str, Tensor],
) -> Tensor:
    """Logits and token ids of a rank's candidates: float64, which holds both exactly,
    [num_rows, 1 + NUM_LIKELIEST or all, 2].

    logits: this rank's part, float32 [num_rows, part_size]; what is behind the first `num_tokens`
    of a row is void, and overwritten. The part begins at token rank * part_size. slots, positions:
    as for `sample`, and parameters its arguments by slot, of which `last_token` stays as it is.
    """
    part_size = logits.shape[1]
    first = rank * part_size
    logits[:, num_tokens:] = NEVER
    # Noise goes by token id, so that the part must lie where it lies in the whole.
    whole = logits.new_full((len(logits), num_ranks * part_size), NEVER)
    whole[:, first : first + part_size] = logits
    drawn = sample(whole, slots=slots, positions=positions, **_unrestricted(parameters))
    # A rank without tokens, or a padded row, may draw another rank's.
    drawn = (drawn[:, None] - first).clamp(0, part_size - 1)
    likeliest = logits.topk(min(NUM_LIKELIEST, part_size)).indices
    here = torch.cat([drawn, likeliest], 1)
    return torch.stack([logits.gather(1, here).double(), (here + first).double()], -1)


def draw_candidate(
    parts: list[Tensor],
    part_size: int,
    slots: Tensor,
    positions: Tensor,
    parameters: dict[str, Tensor],
) -> Tensor:
    """Tokens, int64 [num_rows], of the `candidates` of all ranks, in the order of the ranks.

    The same on every rank; `last_token` of the parameters takes them, too.
    """
    logits, token_ids = torch.cat(parts, 1).unbind(-1)
    whole = logits.new_full((len(logits), len(parts) * part_size), NEVER, dtype=torch.float32)
    whole.scatter_(1, token_ids.long(), logits.float())
    return sample(whole, slots=slots, positions=positions, **parameters)


def _unrestricted(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return parameters | {
        "top_k": torch.zeros_like(parameters["top_k"]),
        "top_p": torch.ones_like(parameters["top_p"]),
        "min_p": torch.zeros_like(parameters["min_p"]),
        "last_token": torch.empty_like(parameters["last_token"]),
    }
