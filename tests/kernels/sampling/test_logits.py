"""Penalties, restrictions and logprobs against plain loops and float64.

`tests/services/worker/test_logits_processor.py` compares penalties with transformers.
"""

import pytest
import torch
from torch import Tensor

from penstock.kernels.sampling.logits import apply_bitmask, penalize, top_logprobs

VOCAB_SIZE = 1000
NUM_ROWS = 8


def tables(prompts: Tensor, outputs: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the counts of each row's output tokens, and which tokens its prompt has."""
    counts = torch.zeros(len(outputs), vocab_size, dtype=torch.int32)
    counts.scatter_add_(1, outputs, torch.ones_like(outputs, dtype=torch.int32))
    in_prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    return counts, in_prompt.scatter(1, prompts, True)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(NUM_ROWS, VOCAB_SIZE) * 5


@pytest.fixture
def prompts() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (NUM_ROWS, 100))


@pytest.fixture
def outputs() -> Tensor:
    """Return output tokens of which some repeat often."""
    return torch.randint(0, 40, (NUM_ROWS, 60))


def test_each_row_has_its_own_penalties(logits: Tensor, prompts: Tensor, outputs: Tensor) -> None:
    """In this order: repetition, frequency, presence."""
    repetition = torch.rand(NUM_ROWS) + 0.5
    frequency, presence = torch.randn(2, NUM_ROWS)
    expected = logits.double()
    for row in range(NUM_ROWS):
        for token in {*prompts[row].tolist(), *outputs[row].tolist()}:
            factor = repetition[row].double()
            expected[row, token] *= factor if logits[row, token] < 0 else 1 / factor
        for token in outputs[row].tolist():
            expected[row, token] -= frequency[row].double()
        for token in {*outputs[row].tolist()}:
            expected[row, token] -= presence[row].double()
    each = {"repetition": repetition, "frequency": frequency, "presence": presence}
    actual = penalize(logits, *tables(prompts, outputs, VOCAB_SIZE), **each)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 262, 1000])
def test_a_bitmask_leaves_what_it_allows(vocab_size: int) -> None:
    logits = torch.randn(NUM_ROWS, vocab_size)
    allowed = torch.rand(NUM_ROWS, vocab_size) < 0.5
    words = torch.zeros(NUM_ROWS, -(-vocab_size // 32), dtype=torch.int64)
    for token in range(vocab_size):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    expected = logits.where(allowed, -torch.inf)
    apply_bitmask(logits, words.int(), torch.arange(NUM_ROWS))  # bit 31 is the sign
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("num_likeliest", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_softmax(logits: Tensor, num_likeliest: int) -> None:
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,))
    told, logprobs, ranks = top_logprobs(logits, token_ids, num_likeliest)
    order = logits.argsort(descending=True).tolist()
    assert ranks.tolist() == [1 + row.index(one) for row, one in zip(order, token_ids, strict=True)]
    exact = logits.double().log_softmax(-1)
    assert torch.equal(told[:, 0], token_ids)
    assert torch.equal(told[:, 1:], exact.topk(num_likeliest).indices)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, told), rtol=0, atol=1e-4)


def test_there_are_no_more_likeliest_tokens_than_tokens() -> None:
    told, logprobs, ranks = top_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 20)
    assert ranks.tolist() == [2]
    assert told.tolist() == [[0, 1, 0]]
    assert logprobs[0].exp()[1:].sum().item() == pytest.approx(1)


def test_refuses_what_does_not_fit(logits: Tensor, prompts: Tensor, outputs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"counts: got shape \[7, 1000\], expected \[8, 1000\]"):
        given = tables(prompts[:7], outputs[:7], VOCAB_SIZE)
        one = torch.ones(8)
        penalize(logits, *given, repetition=one, frequency=one, presence=one)
    with pytest.raises(ValueError, match=r"token_ids: got shape \[3\], expected \[8\]"):
        top_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1)
