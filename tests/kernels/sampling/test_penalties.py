"""Penalties, restrictions and logprobs against transformers, plain loops and float64."""

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from penstock.kernels.sampling.penalties import apply_bitmask, penalize, top_logprobs
from tests.kernels.sampling.test_sampling import chi_square, draw

VOCAB_SIZE = 1000
NUM_ROWS = 8
CHI_SQUARE_999 = {4: 18.47}


def tables(prompts: Tensor, outputs: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the counts of each row's output tokens, and which tokens its prompt has."""
    counts = torch.zeros(len(outputs), vocab_size, dtype=torch.int32)
    counts.scatter_add_(1, outputs, torch.ones_like(outputs, dtype=torch.int32))
    in_prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    return counts, in_prompt.scatter(1, prompts, True)


def penalized(
    logits: Tensor,
    prompts: Tensor,
    outputs: Tensor,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Tensor:
    values = {"repetition": repetition, "frequency": frequency, "presence": presence}
    each = {name: torch.full((len(logits),), value) for name, value in values.items()}
    return penalize(logits, *tables(prompts, outputs, logits.shape[1]), **each)


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


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 7.0])
def test_repetition_is_that_of_transformers(
    logits: Tensor, prompts: Tensor, outputs: Tensor, penalty: float
) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.cat([prompts, outputs], 1), logits.clone())
    assert torch.equal(penalized(logits, prompts, outputs, repetition=penalty), expected)


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
    masked = apply_bitmask(logits, words.int())  # bit 31 is the sign
    assert torch.equal(masked, logits.where(allowed, -torch.inf))


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


@pytest.mark.slow
def test_penalized_and_restricted_tokens_have_their_probabilities() -> None:
    """Two of eight tokens are forbidden, and top-p leaves five; 100,000 draws."""
    num_draws = 100_000
    logits = torch.tensor([[2.0, 1.5, 1.0, 3.0, 0.5, 0.0, 1.2, -6.0]])
    prompts, outputs = torch.tensor([[0, 4]]), torch.tensor([[3, 3, 1]])
    changed = penalized(logits, prompts, outputs, repetition=1.25, frequency=0.4, presence=0.2)
    bitmask = torch.tensor([[0b11101011]], dtype=torch.int32)  # not tokens 2 and 4
    changed = apply_bitmask(changed, bitmask).expand(1000, -1)
    positions = torch.arange(num_draws).split(1000)
    tokens = torch.cat([draw(changed, top_p=0.99, positions=some, seed=3) for some in positions])
    left = {0: 2 / 1.25, 1: 1.5 / 1.25 - 0.4 - 0.2, 3: 3 / 1.25 - 0.8 - 0.2, 5: 0.0, 6: 1.2}
    weights = torch.zeros(8)
    weights[list(left)] = torch.tensor(list(left.values())).exp()
    assert chi_square(tokens, weights / weights.sum()) < CHI_SQUARE_999[4]


def test_refuses_what_does_not_fit(logits: Tensor, prompts: Tensor, outputs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"counts: got shape \[7, 1000\], expected \[8, 1000\]"):
        penalized(logits, prompts, outputs[:7])
    with pytest.raises(ValueError, match=r"bitmask: got shape \[8, 31\], expected \[8, 32\]"):
        apply_bitmask(logits, torch.zeros(8, 31, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"token_ids: got shape \[3\], expected \[8\]"):
        top_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1)
