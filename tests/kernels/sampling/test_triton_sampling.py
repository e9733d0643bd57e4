"""The Triton sampler against the reference."""

from itertools import cycle

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling import reference
from penstock.kernels.sampling import sampling as wrapper
from penstock.kernels.sampling import triton_sampling as sampling
from penstock.kernels.sampling.reference import philox
from penstock.kernels.sampling.triton_gumbel import words
from tests.kernels.conftest import on_gpu
from tests.kernels.sampling.slot_table import slot_table

# temperature, top_k, top_p, min_p
GREEDY, PLAIN = (0.0, 3, 0.5, 0.5), (0.8, 0, 1.0, 0.0)
KINDS = [
    GREEDY,
    PLAIN,
    (1.7, 20, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.5, 200, 1.0, 0.0),  # in more groups than are read at a time
    (0.6, 0, 0.95, 0.0),
    (2.5, 0, 0.99, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (0.6, 20, 0.95, 0.0),
    (2.0, 150, 0.8, 0.01),
    (2.0, 40, 0.9, 0.2),
    (3.0, 10**6, 0.5, 1e-4),
    (1e-30, 5, 0.9, 0.1),
]
FEW_KINDS = [KINDS[n] for n in (0, 1, 2, 5, 9, 12)]
"""one a branch of the kernels, for the interpreter"""
FIELDS = ("temperature", "top_k", "top_p", "min_p")


def parameters_of(kinds: list[tuple[float, int, float, float]]) -> dict[str, Tensor]:
    """By slot, with random seeds."""
    by_name = {
        name: torch.tensor(values, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, values in zip(FIELDS, zip(*kinds, strict=True), strict=True)
    }
    return {"seed": torch.randint(-(2**62), 2**62, (len(kinds),)), **by_name}


def draw(
    device: str,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    parameters: dict[str, Tensor],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and the last token by slot (-1: not written), by the kernels."""
    num_slots = len(parameters["seed"])
    last_token = torch.full((num_slots,), -1, device=device)
    on_device = {name: values.to(device) for name, values in parameters.items()}
    by_slot = slot_table(**on_device, last_token=last_token)
    rows = logits.to(device), slots.to(device), positions.to(device)
    tokens = sampling.sample(*rows, by_slot, None if out is None else out.to(device))
    return tokens.cpu(), last_token.cpu()


def reference_scores(
    logits: Tensor, slots: Tensor, positions: Tensor, parameters: dict[str, Tensor]
) -> Tensor:
    """Return the scores whose argmax is the token; for greedy rows the logits."""
    seeds, temperature, top_k, top_p, min_p = (values[slots] for values in parameters.values())
    greedy = (temperature == 0)[:, None]
    scores = (logits - logits.amax(1, keepdim=True)) / temperature.masked_fill(
        temperature == 0, 1
    ).unsqueeze(1)
    kept = reference.keep_top_k_top_p(scores, top_k, top_p, min_p)
    noise = reference.gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(greedy, logits, kept + noise)


@pytest.fixture(autouse=True)
def _no_free_memory_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that the sampler allocates holds what no kernel may read."""

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 2**30)

    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [264, 9001, on_gpu(5000)])
def test_draws_the_tokens_of_the_reference(device: str, vocab_size: int) -> None:
    parameters = parameters_of(KINDS * 2)
    slots = torch.randperm(len(KINDS) * 2)[: len(KINDS) + 8]
    positions = torch.randint(0, 40000, (len(slots),))
    padded = torch.tensor([0, 5, len(slots) - 1])
    wide = torch.randn(len(slots), vocab_size + 7) * torch.tensor([1.0, 3.0]).repeat(
        len(slots) // 2
    ).unsqueeze(1)
    logits = wide[:, :vocab_size]
    scores = reference_scores(logits, slots, positions, parameters)
    some = slots.clone()
    some[padded] = -1
    tokens, last_token = draw(device, wide[:, :vocab_size], some, positions, parameters)
    best = scores.topk(2).values
    unsure = best[:, 0] - best[:, 1] < 1e-4
    assert unsure.sum() <= 1
    expected = scores.argmax(1).masked_fill(some < 0, 0)
    assert torch.equal(tokens[~unsure], expected[~unsure])
    written = torch.full_like(last_token, -1)
    written[some[some >= 0]] = tokens[some >= 0]
    assert torch.equal(last_token, written)


def test_rows_without_a_slot_keep_their_tokens(device: str) -> None:
    logits, slots = torch.randn(5, 264), torch.tensor([1, -1, 0, -1, 2])
    parameters, before = parameters_of([GREEDY, PLAIN, (0.6, 20, 0.95, 0.0)]), torch.arange(5) + 900
    tokens, last_token = draw(device, logits, slots, before, parameters)
    rows = torch.where(slots < 0, before, tokens), last_token
    kept = draw(device, logits, slots, before, parameters, before.clone())
    assert all(map(torch.equal, rows, kept))
    by_slot = slot_table(**parameters, last_token=torch.full((3,), -1))
    tokens = wrapper.sample(logits, slots, before, by_slot, before.clone())
    assert all(map(torch.equal, rows, (tokens, by_slot.last_token)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "last"),
    [
        ((20, 1.0, 0.0), 20),
        ((190, 1.0, 0.0), 190),
        ((0, 60.5 / 154.8, 0.0), 61),
        ((0, 1.0, 0.8), 100),
        ((200, 1.0, 0.8), 100),
        ((200, 60.5 / 150, 0.8), 61),  # the sum is of what top-k leaves, before min-p
    ],
)
def test_the_last_token_kept_may_be_drawn_and_the_next_may_not(
    device: str, limits: tuple[int, float, float], last: int
) -> None:
    vocab_size = 5000
    parameters = parameters_of([(1.0, *limits)] * 4)
    slots = torch.arange(4)
    lucky = reference.gumbel_noise(parameters["seed"], slots, vocab_size).argmax(1)
    weights = torch.full((vocab_size,), 1e-3)
    weights[:200], weights[:100] = 0.5, 1.0
    ordered = weights.log() - torch.arange(vocab_size) * 1e-6
    logits = torch.stack([ordered[torch.randperm(vocab_size)] for _ in slots])
    for row in slots:
        # The token with the most noise takes the place of the last that is kept, or of the next.
        place = (logits[row] == ordered[last - (row < 2).int()]).nonzero().item()
        logits[row, [place, lucky[row]]] = logits[row, [lucky[row], place]]
    scores = reference_scores(logits, slots, slots, parameters)
    assert scores.isfinite().sum(1).tolist() == [last] * 4
    assert (scores.argmax(1) == lucky).tolist() == [True] * 2 + [False] * 2
    tokens, _ = draw(device, logits, slots, slots, parameters)
    assert torch.equal(tokens, scores.argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(1.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.3, 0.0)])
def test_tokens_that_tie_stay_or_go_together(
    device: str, kind: tuple[float, int, float, float]
) -> None:
    # Two likeliest tokens, then 40 alike: the third is one of them, and so is what reaches 0.3.
    logits = torch.full((8, 600), -50.0)
    logits[:, 100:140] = 2.0
    logits[:, [7, 300]] = 2.5
    slots = torch.arange(8)
    parameters = parameters_of([kind] * 8)
    scores = reference_scores(logits, slots, slots, parameters)
    assert scores[0].isfinite().sum() in (42, 600)
    tokens, _ = draw(device, logits, slots, slots, parameters)
    assert torch.equal(tokens, scores.argmax(1))
    assert len(set(tokens.tolist())) > 3


def test_greedy_rows_take_the_lowest_id_of_equals(device: str) -> None:
    vocab_size = 9001
    logits = torch.zeros(4, vocab_size)
    logits[0, [9000, 4097, 4500]] = 1.0
    logits[1, [3000, 1030, 1029]] = 1.0
    logits[3, 9000] = 1.0
    slots = torch.arange(4)
    tokens, _ = draw(device, logits, slots, slots, parameters_of([GREEDY] * 4))
    assert tokens.tolist() == [4097, 1029, 0, 9000]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_a_row_with_a_logit_that_is_no_number_has_no_token(device: str) -> None:
    """Wherever it is, among forbidden tokens, too; the next rows are as ever."""
    kinds = FEW_KINDS if device == "cpu" else KINDS
    parameters = parameters_of([kind for kind in kinds for _ in range(2)])
    logits = torch.randn(2 * len(kinds), 9000)
    logits[:, 5000:] = -torch.inf
    slots = torch.arange(len(logits))
    alone, _ = draw(device, logits, slots, slots, parameters)
    for row, at in zip(range(0, len(logits), 2), cycle([0, 3000, 4096, 5000, 8999]), strict=False):
        logits[row, at] = torch.inf if row % 4 else torch.nan
    tokens, last_token = draw(device, logits, slots, slots, parameters)
    assert (tokens[::2] == -1).all()
    assert (last_token[::2] == 0).all()
    assert torch.equal(tokens[1::2], alone[1::2])
    assert torch.equal(last_token[1::2], alone[1::2])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_number_has_no_token(device: str, value: float) -> None:
    logits, slots = torch.full((len(KINDS), 264), value), torch.arange(len(KINDS))
    tokens, last_token = draw(device, logits, slots, slots, parameters_of(KINDS))
    assert (tokens == -1).all()
    assert (last_token == 0).all()


def test_no_rows_give_no_tokens(device: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tokens, last_token = draw(device, torch.zeros(0, 264), none, none, parameters_of([PLAIN]))
    assert tokens.shape == (0,)
    assert last_token.tolist() == [-1]


@triton.jit
def _write_words(seed_ptr, position_ptr, counters_ptr, words_ptr):
    lane = tl.arange(0, 16)
    counters = tl.load(counters_ptr + lane)
    w0, w1, w2, w3 = words(tl.load(seed_ptr), counters, tl.load(position_ptr))
    tl.store(words_ptr + lane, w0.to(tl.int64))
    tl.store(words_ptr + 16 + lane, w1.to(tl.int64))
    tl.store(words_ptr + 32 + lane, w2.to(tl.int64))
    tl.store(words_ptr + 48 + lane, w3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345, -(2**63)])
def test_words_are_those_of_philox(device: str, seed: int) -> None:
    counters = torch.randint(0, 2**31, (16,), dtype=torch.int32)
    key, position, zero = torch.tensor(seed), torch.tensor(40959), torch.tensor(0)
    found = torch.full((4, 16), -1, device=device)
    _write_words[(1,)](key.to(device), position.to(device), counters.to(device), found)
    expected = torch.stack(philox(key, (counters.long(), position, zero, zero)))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [PLAIN, (0.8, 50, 0.9, 0.0), (0.8, 0, 0.9, 0.01)])
def test_tokens_have_the_probabilities_of_the_softmax(
    kind: tuple[float, int, float, float],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("takes too long without a GPU")
    num_rows = 20000
    logits = torch.randn(264) * 2
    limits = (torch.tensor([value]) for value in kind[1:])
    expected = reference.keep_top_k_top_p(logits[None] / kind[0], *limits)[0].softmax(0)
    slots = torch.zeros(num_rows, dtype=torch.int64)
    positions = torch.arange(num_rows)
    tokens, _ = draw("cuda", logits.repeat(num_rows, 1), slots, positions, parameters_of([kind]))
    counts = torch.bincount(tokens, minlength=264)
    assert not counts[expected == 0].any()
    deviation = (counts - expected * num_rows) / (expected * num_rows + 1).sqrt()
    assert deviation.abs().max() < 5


@pytest.mark.slow
def test_what_a_grammar_rules_out_counts_nothing(device: str) -> None:
    """Whole runs of the vocabulary may be at minus infinity."""
    kinds = FEW_KINDS if device == "cpu" else KINDS
    logits = torch.randn(len(kinds), 9000) * 3
    logits[:, 100:] = -torch.inf
    slots = torch.arange(len(kinds))
    parameters = parameters_of(kinds)
    tokens, _ = draw(device, logits, slots, slots, parameters)
    by_slot = slot_table(**parameters, last_token=slots.clone())
    expected = reference.sample(logits, slots, slots, by_slot)
    assert tokens.tolist() == expected.tolist()
