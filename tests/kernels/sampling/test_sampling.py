"""The next token: greedy, random, restricted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.kernels.layouts.sampling import SamplingTensors, make_parameters
from penstock.kernels.sampling.reference import gumbel_noise, keep_top_k_top_p, philox, uniform
from penstock.kernels.sampling.sampling import sample
from tests.kernels.sampling.slot_table import slot_table

NUM_DRAWS = 10_000
CHI_SQUARE_999 = {3: 16.27, 7: 24.32}
"""degrees of freedom → value that chance exceeds once in a thousand"""


def draw(logits: Tensor, **given: Any) -> Tensor:
    """`sample` with parameters as numbers or lists; temperature 1 and no restriction if absent."""
    defaults = {"positions": 0, "seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    dtypes = {"positions": torch.int64, "seed": torch.int64, "top_k": torch.int32}
    num_rows = len(logits)
    parameters = {
        name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).repeat(num_rows)[
            :num_rows
        ]
        for name, value in {**defaults, "min_p": 0.0, **given}.items()
    }
    last_token = torch.full((num_rows,), -1)
    positions = parameters.pop("positions")
    by_slot = slot_table(**parameters, last_token=last_token)
    tokens = sample(logits, torch.arange(num_rows), positions, by_slot)
    assert torch.equal(last_token, tokens)
    return tokens


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Return the deviation of the counts of tokens from their probabilities."""
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities))
    assert not counts[expected == 0].any()
    possible = expected > 0
    return float((((counts - expected) ** 2)[possible] / expected[possible]).sum())


def test_temperature_0_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 2.0], [-5.0, 1.0, 1.0]])
    assert draw(logits, temperature=0.0, top_k=2, top_p=0.5).tolist() == [1, 0, 1]


def test_random_rows_take_the_lowest_id_of_equal_scores() -> None:
    # A temperature so small that the noise is lost in the distance to the third token.
    logits = torch.tensor([[0.0, 1.0, 1.0]])
    tokens = {draw(logits, temperature=1e-30, seed=seed).item() for seed in range(20)}
    assert tokens == {1, 2}
    # Tokens that tie are kept together.
    tokens = {
        draw(logits, temperature=1e-30, top_k=1, top_p=1e-6, min_p=1.0, seed=seed).item()
        for seed in range(20)
    }
    assert tokens == {1, 2}


@pytest.mark.parametrize(
    ("vary", "temperature", "top_k"),
    [("positions", 0.5, 0), ("seed", 1.0, 0), ("positions", 2.0, 0), ("positions", 1.0, 4)],
)
def test_tokens_have_the_probabilities_of_the_softmax(
    vary: str, temperature: float, top_k: int
) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.6, -2.0, 1.5])
    numbers = {"temperature": temperature, "top_k": top_k, vary: torch.arange(NUM_DRAWS)}
    tokens = draw(logits.expand(NUM_DRAWS, -1), **numbers)
    kept = torch.where(logits >= 0.6, logits, -torch.inf) if top_k else logits
    degrees = (top_k or len(logits)) - 1
    assert chi_square(tokens, (kept / temperature).softmax(0)) < CHI_SQUARE_999[degrees]


def test_neighbouring_positions_are_independent() -> None:
    tokens = draw(torch.zeros(NUM_DRAWS, 2), positions=torch.arange(NUM_DRAWS), seed=5)
    pairs = tokens[:-1] * 2 + tokens[1:]
    assert chi_square(pairs, torch.full((4,), 0.25)) < CHI_SQUARE_999[3]


def test_noise_has_the_mean_and_variance_of_gumbels_distribution() -> None:
    noise = gumbel_noise(torch.arange(10), torch.arange(10), 20000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.03)


def test_four_token_ids_share_a_counter() -> None:
    noise = gumbel_noise(torch.tensor([2**40 + 3]), torch.tensor([7]), 10000)[0]
    zero = torch.tensor(0)
    for run, lane, word in [(0, 0, 0), (0, 1023, 3), (1, 5, 2), (2, 700, 1)]:
        counter = (torch.tensor(run * 1024 + lane), torch.tensor(7), zero, zero)
        u = uniform(philox(torch.tensor(2**40 + 3), counter)[word])
        assert noise[run * 4096 + word * 1024 + lane] == -torch.log(-torch.log1p(-u))


@pytest.mark.parametrize("vocab_size", [1, 1000, 1024, 3000, 4097, 5000])
def test_noise_does_not_depend_on_the_size_of_the_vocabulary(vocab_size: int) -> None:
    seeds, positions = torch.tensor([5, -6]), torch.tensor([1, 2])
    noise = gumbel_noise(seeds, positions, 9000)
    assert torch.equal(gumbel_noise(seeds, positions, vocab_size), noise[:, :vocab_size])
    assert len(noise.unique()) > 17900


def mixed_rows(num_rows: int, vocab_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of all kinds: greedy, free, restricted in one way or in several."""
    parameters = {
        "positions": torch.randint(0, 5000, (num_rows,)),
        "seed": torch.randint(-(2**62), 2**62, (num_rows,)),
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.7])[torch.arange(num_rows) % 4],
        "top_k": torch.tensor([0, 1, 40], dtype=torch.int32)[torch.randint(3, (num_rows,))],
        "top_p": torch.tensor([1.0, 0.9, 0.3])[torch.randint(3, (num_rows,))],
        "min_p": torch.tensor([0.0, 0.1])[torch.randint(2, (num_rows,))],
    }
    return torch.randn(num_rows, vocab_size) * 3, parameters


@pytest.mark.parametrize("vocab_size", [17, 264, 1001])
def test_a_row_does_not_depend_on_the_others(vocab_size: int) -> None:
    logits, parameters = mixed_rows(64, vocab_size)
    together = draw(logits, **parameters)
    noise = gumbel_noise(parameters["seed"], parameters["positions"], vocab_size)
    for row in range(64):
        alone = {name: values[row : row + 1] for name, values in parameters.items()}
        assert draw(logits[row : row + 1], **alone).item() == together[row].item()
        own_noise = gumbel_noise(alone["seed"], alone["positions"], vocab_size)
        assert torch.equal(own_noise[0], noise[row])


def transformers_scores(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return the scores that transformers' `generate` samples from, processors in its order."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores


@pytest.mark.parametrize("vocab_size", [9, 1001])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_keeps_the_tokens_that_transformers_keeps(
    vocab_size: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(8, vocab_size) * torch.tensor([0.1, 1, 3, 9]).repeat(2)[:, None]
    for temperature in (0.3, 1.0, 1.9):
        wanted = transformers_scores(logits, temperature, top_k, top_p, min_p)
        kept = keep_top_k_top_p(
            logits / temperature,
            torch.full((8,), top_k),
            torch.full((8,), top_p),
            torch.full((8,), min_p),
        )
        assert torch.equal(kept, wanted)


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    kept = keep_top_k_top_p(scores, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert kept.isfinite().tolist() == [[True, True, True, False, True]]
    assert torch.equal(kept, transformers_scores(scores, 1.0, 2, 1.0, 0.0))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, [3]), (0.4, [3]), (0.41, [0, 2, 3]), (0.9, [0, 2, 3, 4]), (1, None)]
)
def test_top_p_keeps_or_drops_tokens_that_tie_together(top_p: float, kept: list[int]) -> None:
    # Probabilities 0.2, 0.04, 0.2, 0.4, 0.16: 0.2 twice, after 0.4.
    scores = torch.tensor([[5.0, 1.0, 5.0, 10.0, 4.0]]).log()
    none = torch.tensor([0.0])
    left = keep_top_k_top_p(scores, torch.tensor([0]), torch.tensor([top_p]), none)[0].isfinite()
    assert left.nonzero().flatten().tolist() == (kept or [0, 1, 2, 3, 4])
    assert torch.equal(
        left, keep_top_k_top_p(scores.flip(1), none, none + top_p, none)[0].flip(0) > -9
    )


def test_rows_use_the_parameters_of_their_slots() -> None:
    logits, parameters = mixed_rows(8, 264)
    slots, positions = torch.tensor([5, -1, 0, 7]), torch.tensor([3, 9, 4, 3])
    last_token = torch.full((8,), -1)
    by_slot = {name: values for name, values in parameters.items() if name != "positions"}
    wide = torch.full((4, 300), torch.nan)
    wide[:, :264] = logits[:4]
    tokens = sample(wide[:, :264], slots, positions, slot_table(**by_slot, last_token=last_token))
    for row in (0, 2, 3):
        alone = {name: values[slots[row : row + 1]] for name, values in by_slot.items()}
        expected = draw(logits[row : row + 1], positions=positions[row], **alone)
        assert tokens[row] == last_token[slots[row]] == expected
    assert tokens[1] == 0
    assert last_token[[1, 2, 3, 4, 6]].tolist() == [-1] * 5


def test_the_likeliest_is_always_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9]]).expand(50, -1)
    tokens = draw(logits, top_p=0.0, min_p=1.0, seed=torch.arange(50))
    assert tokens.tolist() == [1] * 50


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"logits: got dtype torch.float64, expected \[torch.float32\]"
    ):
        draw(torch.zeros(1, 3).double())
    with pytest.raises(ValueError, match=r"logits: got strides \[1, 2\], expected 1 as the last"):
        draw(torch.zeros(5, 2).T)
    given = {
        "slots": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "parameters": make_parameters(3, torch.device("cpu")),
        "last_token": torch.zeros(3, dtype=torch.int64),
    }

    def run(slots: Tensor, positions: Tensor, **by_slot: Tensor) -> Tensor:
        return sample(torch.zeros(2, 5), slots, positions, SamplingTensors(**by_slot))

    run(**given)
    for name, values in given.items():
        with pytest.raises(ValueError, match=r"got shape \[1|got shape \[3"):
            run(**{**given, name: values[:1]})
        with pytest.raises(ValueError, match=rf"{name}: got strides \[(2|32)"):
            run(**{**given, name: values.repeat_interleave(2, 0)[::2]})


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_logit_that_is_no_number_has_no_token(bad: float) -> None:
    logits, parameters = mixed_rows(16, 264)
    logits[:, 200:] = -torch.inf
    by_slot = {name: values for name, values in parameters.items() if name != "positions"}
    slots, last_token = torch.arange(16), torch.full((16,), -1)
    rows = slots, slots, slot_table(**by_slot, last_token=last_token)
    alone = sample(logits, *rows)
    assert (alone >= 0).all()
    logits[::4, 7], logits[1::4, 230], logits[2::4] = bad, bad, -torch.inf
    tokens = sample(logits, *rows)
    for first in range(3):
        assert (tokens[first::4] == -1).all()
        assert (last_token[first::4] == 0).all()
    assert torch.equal(tokens[3::4], alone[3::4])
    assert torch.equal(last_token[3::4], alone[3::4])
