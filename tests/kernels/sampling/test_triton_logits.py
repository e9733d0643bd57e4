"""The Triton kernels that change logits, and logprobs, against the reference."""

from itertools import product

import pytest
import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import (
    BIAS,
    DEFERRED,
    MASK,
    MAX_BIAS,
    NEVER,
    PENALTIES,
    LogitsState,
    make_logits_state,
    make_parameters,
    write_numbers,
)
from penstock.kernels.sampling import logits as wrapper
from penstock.kernels.sampling import triton_logits
from tests.kernels.conftest import on_gpu

FLAGS = [sum(some) for some in product((0, PENALTIES), (0, BIAS), (0, MASK), (0, DEFERRED))]
"""of each slot: every combination"""
SIZES = [(264, 0, 264), (9001, 0, 9001), (9001, 4096, 4096), (9001, 8192, 809)]
"""vocabulary, first token and tokens of the shard"""


def random_state(vocab_size: int, first_token: int, num_tokens: int) -> LogitsState:
    """Penalties, bias and mask for each of FLAGS; of other slots what no kernel may use."""
    num_slots = len(FLAGS)
    table = make_parameters(num_slots, torch.device("cpu"))
    state = make_logits_state(table, vocab_size, first_token, num_tokens)
    occurrences = torch.randint(-40, 9, state.occurrences.shape, dtype=torch.int32).clamp(min=0)
    state.occurrences.copy_(occurrences)
    state.bitmask.copy_(torch.randint(-(2**31), 2**31, state.bitmask.shape))
    for slot in range(num_slots):
        number = min(vocab_size // 2, 300 * slot, 1100)
        token_ids = torch.randperm(vocab_size)[:number].int()
        twice = token_ids[: number // 3]  # a biased token may be an end token
        state.bias[slot] = torch.iinfo(torch.int32).max
        both = torch.cat([token_ids, twice])
        state.bias[slot, 0, : len(both)] = both
        values = torch.cat([torch.randn(number), torch.full((len(twice),), NEVER)])
        state.bias[slot, 1, : len(both)] = values.view(torch.int32)
        numbers = {
            "repetition_penalty": 1.0 + slot / 7,
            "frequency_penalty": slot / 5,
            "presence_penalty": -slot / 3,
            "flags": FLAGS[slot],
            "num_given": 100,
            "min_length": 100 + slot % 3,
            "num_bias": number,
            "num_long_bias": len(both),
        }
        write_numbers(table[slot].numpy(), numbers)
    return state


def rows_of(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots with padded rows and drafts, positions around what was given, newest tokens."""
    slots = torch.randperm(len(FLAGS))
    slots[3] = -1
    slots = slots.repeat_interleave(1 + 2 * (slots % 4 == 1))
    return slots, 100 + torch.arange(len(slots)) % 4, torch.randint(0, vocab_size, (len(slots),))


def count_drafts(state: LogitsState, slots: Tensor, newest: Tensor) -> None:
    """Count the tokens of slots with several rows, as the logits processor does before a step."""
    for slot, token in zip(slots.tolist(), (newest - state.first_token).tolist(), strict=True):
        if (slots == slot).sum() > 1 and 0 <= token < state.occurrences.shape[1]:
            state.occurrences[slot, token] += 2


def to(device: str, state: LogitsState) -> LogitsState:
    """Return a copy there."""
    return LogitsState(state[0], *(tensor.clone().to(device) for tensor in state[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, on_gpu((151936, 0, 151936))])
def test_processes_logits_like_the_reference(
    device: str, sizes: tuple[int, int, int], deferred: bool
) -> None:
    state = random_state(*sizes)
    slots, positions, newest = rows_of(sizes[0])
    newest[::2] = sizes[1] + torch.randint(0, sizes[2], (len(newest[::2]),))
    count_drafts(state, slots, newest)
    raw = torch.randn(len(slots), sizes[2] + 5) * 4
    expected, there = raw.clone(), to("cpu", state)
    wrapper.process_logits(expected, slots, positions, newest, there, deferred=deferred)
    actual, on_device = raw.to(device), to(device, state)
    rows = (tensor.to(device) for tensor in (slots, positions, newest))
    triton_logits.process(actual, *rows, on_device, deferred)
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(on_device.occurrences.cpu(), there.occurrences)
    left = [
        row
        for row, slot in enumerate(slots.tolist())
        if slot < 0 or not FLAGS[slot] or (FLAGS[slot] & DEFERRED and not deferred)
    ]
    assert torch.equal(expected[left], raw[left])
    assert torch.equal(expected[:, sizes[2] :], raw[:, sizes[2] :])
    assert not torch.equal(there.occurrences, state.occurrences)


def test_the_newest_token_is_counted_once_unless_it_was_given() -> None:
    state = make_logits_state(make_parameters(2, torch.device("cpu")), 50, 0, 50)
    state.occurrences.zero_()
    penalties_of_row = {"repetition_penalty": 1, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    for words in state.parameters.numpy():
        write_numbers(words, {"flags": PENALTIES, "num_given": 10, **penalties_of_row})
    logits = torch.zeros(2, 50)
    positions, newest = torch.tensor([10, 11]), torch.tensor([7, 7])
    for _ in range(2):
        wrapper.process_logits(logits.zero_(), torch.tensor([0, 1]), positions, newest, state)
    assert state.occurrences.nonzero().tolist() == [[1, 7]]
    assert logits[1, 7] == -0.5 * 2 - 0.5
    assert state.bias.shape == (2, 2, MAX_BIAS)


def test_rows_of_a_draft_are_penalized_as_rows_of_steps() -> None:
    """Whatever is drafted: each row counts the tokens up to its own."""
    state = random_state(50, 0, 50)
    slots = torch.full((4,), FLAGS.index(PENALTIES))
    positions, newest = 200 + torch.arange(4), torch.tensor([7, 9, 7, 7])
    raw = torch.randn(4, 50)
    one_by_one, at_once = raw.clone(), raw.clone()
    there = to("cpu", state)
    for row in range(4):
        some = slice(row, row + 1)
        wrapper.process_logits(one_by_one[some], slots[some], positions[some], newest[some], there)
    count_drafts(state, slots, newest)
    wrapper.process_logits(at_once, slots, positions, newest, state)
    assert torch.equal(at_once, one_by_one)
    assert torch.equal(state.occurrences, there.occurrences)


@pytest.mark.parametrize("vocab_size", [264, 9001])
def test_masks_like_the_reference(device: str, vocab_size: int) -> None:
    """By slot; rows without a slot stay as they are."""
    raw = torch.randn(6, vocab_size)
    bitmask = torch.randint(-(2**31), 2**31, (4, -(-vocab_size // 32)), dtype=torch.int32)
    slots = torch.tensor([2, -1, -1, -1, 0, 3])
    expected, actual = raw.clone(), raw.to(device)
    wrapper.apply_bitmask(expected, bitmask, slots)
    triton_logits.mask(actual, bitmask.to(device), slots.to(device))
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(expected[1:4], raw[1:4])
    for row in 0, 4, 5:
        words = bitmask[slots[row]].tolist()
        allowed = [t for t in range(vocab_size) if words[t // 32] >> t % 32 & 1]
        assert expected[row].isfinite().nonzero().squeeze(1).tolist() == allowed


@pytest.mark.slow
@pytest.mark.parametrize("num_likeliest", [0, 1, 20])
@pytest.mark.parametrize("vocab_size", [20, 264, 9001, on_gpu(151936)])
def test_logprobs_like_the_reference(device: str, vocab_size: int, num_likeliest: int) -> None:
    wide = torch.randn(5, vocab_size + 3) * torch.tensor([0.1, 1.0, 3.0, 9.0, 2.0])[:, None]
    wide[4, : vocab_size // 2] = -torch.inf
    logits = wide[:, :vocab_size]
    token_ids = torch.randint(vocab_size // 2, vocab_size, (5,))
    ids, logprobs, ranks = wrapper.top_logprobs(logits, token_ids, num_likeliest)
    on_device = wide.to(device)[:, :vocab_size], token_ids.to(device)
    some_ids, some_logprobs, some_ranks = triton_logits.top_logprobs(*on_device, num_likeliest)
    assert torch.equal(some_ranks.cpu(), ranks)
    assert torch.equal(some_logprobs.cpu().isinf(), logprobs.isinf())
    finite = logprobs.isfinite()
    assert torch.equal(some_ids.cpu()[finite], ids[finite])
    torch.testing.assert_close(some_logprobs.cpu()[finite], logprobs[finite], rtol=1e-5, atol=1e-5)
    logits[torch.arange(5), token_ids] = logits[:, 1]  # as likely as another token
    _, _, ranks = wrapper.top_logprobs(logits, token_ids, 0)
    on_device = wide.to(device)[:, :vocab_size], token_ids.to(device)
    assert torch.equal(triton_logits.top_logprobs(*on_device, 0)[2].cpu(), ranks)


def test_refuses_what_does_not_fit() -> None:
    state = make_logits_state(make_parameters(2, torch.device("cpu")), 50, 0, 50)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"logits: got shape \[2, 49\]"):
        wrapper.process_logits(torch.zeros(2, 49), slots, slots, slots, state)
    with pytest.raises(ValueError, match=r"newest: got shape \[1\], expected \[2\]"):
        wrapper.process_logits(torch.zeros(2, 50), slots, slots, slots[:1], state)
    with pytest.raises(ValueError, match=r"bitmask: got shape \[2, 1\], expected \[any, 2\]"):
        wrapper.apply_bitmask(torch.zeros(2, 50), torch.zeros(2, 1, dtype=torch.int32), slots)
