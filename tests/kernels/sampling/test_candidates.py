"""Sampling from the candidates of ranks that can't read each other's logits."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import COLUMNS, shard_size
from penstock.kernels.sampling.sampling import (
    NUM_LIKELIEST,
    candidates,
    candidates_suffice,
    draw_candidate,
    sample,
)
from tests.kernels.sampling.slot_table import slot_table

KINDS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.5, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
    (1.5, 20, 0.9, 0.0),
    (5.0, NUM_LIKELIEST, 1.0, 0.0),
    (5.0, NUM_LIKELIEST, 0.95, 0.01),
]
"""temperature, top-k, top-p, min-p"""


def rows_of_every_kind(device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Slots, the last one a padded row's; positions; parameters."""
    kinds = KINDS * 4
    temperature, top_k, top_p, min_p = (
        torch.tensor(values, device=device) for values in zip(*kinds, strict=True)
    )
    parameters = {
        "seed": torch.randint(-(2**63), 2**63 - 1, (len(kinds),), device=device),
        "temperature": temperature,
        "top_k": top_k.int(),
        "top_p": top_p,
        "min_p": min_p,
        "last_token": torch.full((len(kinds),), -1, device=device),
    }
    slots = torch.cat([torch.randperm(len(kinds)), torch.tensor([-1])]).to(device)
    return slots, torch.randint(0, 40000, (len(slots),), device=device), parameters


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("vocab_size", "part_size"),
    [
        (264, 66),
        (264, 132),
        (1001, 251),
        (1000, 500),
        (90, 30),  # fewer than there may be candidates
        (5000, shard_size(5000, 3)),  # the last rank has no token
    ],
)
def test_draws_what_the_whole_vocabulary_gives(
    device: str, vocab_size: int, part_size: int
) -> None:
    slots, positions, parameters = rows_of_every_kind(device)
    logits = 4 * torch.randn(len(slots), vocab_size, device=device)
    logits[5, vocab_size - 1], logits[6, 3] = torch.nan, torch.inf
    logits[slots == 0] = logits[slots == 0].clamp(max=3)  # of equal scores the lowest id wins
    expected = sample(logits, slots, positions, slot_table(**parameters))
    assert expected[[5, 6]].tolist() == [-1, -1]
    expected_last = parameters["last_token"].clone()
    rows = slots, positions, slot_table(**parameters)
    num_ranks = 3 if vocab_size == 5000 else -(-vocab_size // part_size)
    parts = []
    for rank in range(num_ranks):
        own = logits[:, rank * part_size : (rank + 1) * part_size]
        part = torch.full((len(slots), part_size), torch.inf, device=device)  # void: it would win
        part[:, : own.shape[1]] = own
        parameters["last_token"].fill_(-1)
        parts.append(candidates(part, own.shape[1], rank, num_ranks, *rows))
        assert parameters["last_token"].eq(-1).all()
    assert parts[0].shape == (len(slots), 1 + min(NUM_LIKELIEST, part_size), 2)
    assert torch.equal(draw_candidate(parts, part_size, *rows), expected)
    assert torch.equal(parameters["last_token"], expected_last)


@pytest.mark.parametrize(
    ("kind", "enough"),
    [
        *[(kind, True) for kind in KINDS],
        ((1.0, NUM_LIKELIEST + 1, 1.0, 0.0), False),
        ((1.0, 0, 0.99, 0.0), False),
        ((1.0, 0, 1.0, 0.01), False),
        ((0.0, 500, 0.5, 0.5), True),
    ],
)
def test_rows_that_may_draw_any_of_many_tokens_need_more(
    kind: tuple[float, int, float, float], enough: bool
) -> None:
    names = "temperature", "top_k", "top_p", "min_p"
    given = zip(names, kind, strict=True)
    numbers = {name: value for name, value in given if value != COLUMNS[name].neutral}
    assert candidates_suffice(numbers) == enough
