"""Compiled sampling against its reference in torch."""

import math

import pytest
import torch

from penstock.kernels.cpu.compiled_step import FEW, GROUP, CompiledStep
from penstock.kernels.layouts.sampling import SamplingTensors
from penstock.kernels.sampling import reference
from tests.kernels.sampling.slot_table import slot_table

NUM_ROWS = 24
KINDS = [
    (0, 1.0, 0.0),
    (20, 0.95, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.05),
    (50, 0.8, 0.1),
    (1, 1.0, 0.0),
]
"""top-k, top-p, min-p"""


def parameters(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingTensors:
    def full(value: float) -> torch.Tensor:
        return torch.full((NUM_ROWS,), value)

    return slot_table(
        seed=torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,)),
        temperature=full(temperature),
        top_k=full(top_k).int(),
        top_p=full(top_p),
        min_p=full(min_p),
        last_token=torch.full((NUM_ROWS,), -5),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("vocab_size", [1, 15, 264, 1040, 4097, 66_001])
def test_tokens_are_those_of_the_reference(
    vocab_size: int, temperature: float, kind: tuple[int, float, float]
) -> None:
    by_slot = parameters(temperature, *kind)
    logits = torch.randn(NUM_ROWS, vocab_size + 3)[:, :vocab_size] * 3
    logits[:, ::7] = logits[:, ::7].round()  # some are equal
    logits[3, : vocab_size // 2] = -math.inf
    logits[5, vocab_size // 2] = math.nan
    logits[6, vocab_size // 3] = math.inf
    logits[7] = -math.inf
    slots = torch.randperm(NUM_ROWS)
    slots[[4, 9]] = -1
    positions = torch.randint(0, 40_000, (NUM_ROWS,))
    own = by_slot._replace(last_token=by_slot.last_token.clone())
    expected = reference.sample(logits, slots, positions, by_slot)
    assert torch.equal(CompiledStep().sample(logits, slots, positions, own), expected)
    assert torch.equal(own.last_token, by_slot.last_token)
    assert expected[[5, 6, 7]].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("vocab_size", [4 * FEW, GROUP * FEW + 1])
def test_top_p_may_keep_more_than_the_likeliest(vocab_size: int) -> None:
    by_slot = parameters(1.0, 0, 0.999, 0.0)
    logits = torch.randn(NUM_ROWS, vocab_size) * 0.1
    slots, positions = torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64)
    expected = reference.sample(logits, slots, positions, by_slot)
    assert torch.equal(CompiledStep().sample(logits, slots, positions, by_slot), expected)
