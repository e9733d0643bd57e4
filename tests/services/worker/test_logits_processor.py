"""Rows that ask for more than a token, by the real model: transformers' logits, changed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from penstock.services.worker import logits_processor as second_pass
from tests.services.worker.driver import (
    NUM_STEPS,
    OTHER,
    PROMPT,
    Driver,
    Listener,
    extras,
    generate,
    make_runner,
)
from tests.services.worker.plans import plan, row

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.5}
SAMPLING = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": -7}
Change = Callable[[Tensor, list[int]], Tensor]
"""(logits [1, vocab_size], tokens so far) → logits"""


def expected(reference: Qwen3ForCausalLM, change: Change) -> tuple[list[int], list[Tensor]]:
    """Return the likeliest tokens by changed logits, and the raw logits."""
    token_ids, raw = list(PROMPT), []
    for _ in range(NUM_STEPS):
        with torch.inference_mode():
            raw.append(reference(torch.tensor([token_ids])).logits[:, -1])
        token_ids.append(int(change(raw[-1].clone(), token_ids).argmax()))
    return token_ids[len(PROMPT) :], raw


def penalize(logits: Tensor, token_ids: list[int]) -> Tensor:
    """PENALTIES."""
    logits = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([token_ids]), logits)
    output = token_ids[len(PROMPT) :]
    for token_id in output:
        logits[0, token_id] -= 0.3
    logits[0, list(set(output))] -= 0.5
    return logits


def test_penalties(folder: Path, reference: Qwen3ForCausalLM, plain: dict[int, list[int]]) -> None:
    tokens = generate(folder, extras(), **PENALTIES).tokens
    assert tokens[3] == expected(reference, penalize)[0] != plain[3]
    assert (tokens[1], tokens[6]) == (plain[1], plain[6])


def test_bias(folder: Path, reference: Qwen3ForCausalLM) -> None:
    bias = {5: 3.0, 17: 2.5, 200: -100.0}

    def add(logits: Tensor, _: list[int]) -> Tensor:
        for token_id, value in bias.items():
            logits[0, token_id] += value
        return logits

    tokens = generate(folder, extras(logit_bias=bias)).tokens[3]
    assert tokens == expected(reference, add)[0]
    assert set(tokens) & {5, 17}


def test_min_tokens(folder: Path, plain: dict[int, list[int]]) -> None:
    """The token that would come is not drawn until then; ids outside the vocabulary end nothing."""
    end = plain[3][0]
    asked = extras(min_tokens=4, end_token_ids=[end, 10**6], logit_bias={end: 50.0})
    tokens = generate(folder, asked).tokens[3]
    assert end not in tokens[:4]
    assert tokens[4:] == [end] * 12
    random = generate(folder, asked, temperature=2.0).tokens[3]
    assert end not in random[:4]


def test_logprobs_are_of_the_raw_logits(folder: Path, reference: Qwen3ForCausalLM) -> None:
    listener = generate(folder, extras(num_logprobs=3), **PENALTIES)
    tokens, raw = expected(reference, penalize)
    for logits, token_id, packed in zip(raw, tokens, listener.logprobs(1), strict=True):
        exact = logits[0].double().log_softmax(-1)
        ids, logprobs = zip(*packed.pairs(), strict=True)
        assert ids == (token_id, *exact.topk(3).indices.tolist())
        torch.testing.assert_close(
            torch.tensor(logprobs).double(), exact[list(ids)], rtol=0, atol=1e-4
        )
    assert not any(output.prompt_logprobs or output.failed for output in listener.outputs)


def test_each_row_gets_as_many_logprobs_as_it_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_pass, "MAX_ROWS", 2)
    numbers = [0, 5, -1, 20, 1]
    listener = Listener(folder)
    added = [
        row(slot, PROMPT, range(5 * slot, 5 * slot + 5), extras=extras(num_logprobs=number))
        for slot, number in enumerate(numbers)
    ]
    listener.step(plan(added=added, chunks=[(slot, 37) for slot in range(5)]), *range(5))
    lengths = {index: len(packed.pairs()) for index, packed in listener.outputs[0].logprobs}
    assert lengths == {0: 1, 1: 6, 3: 21, 4: 2}
    assert len({packed.pairs()[0] for _, packed in listener.outputs[0].logprobs}) == 1


@pytest.mark.parametrize("chunks", [[37], [1, 20, 16], [36, 1]])
def test_prompt_logprobs(
    folder: Path, reference: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, chunks: list[int]
) -> None:
    monkeypatch.setattr(second_pass, "MAX_PROMPT_TOKENS", 7)
    listener = Listener(folder)
    listener.step(plan(added=[row(0, OTHER, [30, 31])], chunks=[(0, 20)]), 0)
    added = [row(3, PROMPT, range(5), extras=extras(num_prompt_logprobs=2))]
    for chunk in chunks[:-1]:
        listener.step(plan(added=added, chunks=[(3, chunk)]), 0)
        added = []
    listener.step(plan(added=added, chunks=[(3, chunks[-1])]), 0, 3)
    listener.step(plan(), 0, 3)
    found = [
        packed for one in listener.outputs for slot, some in one.prompt_logprobs for packed in some
    ]
    with torch.inference_mode():
        exact = reference(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    for row_logprobs, token_id, packed in zip(exact, PROMPT[1:], found, strict=False):
        order = row_logprobs.argsort(descending=True).tolist()
        assert packed.rank == 1 + order.index(token_id)
        ids, logprobs = zip(*packed.pairs(), strict=True)
        assert ids == (token_id, *row_logprobs.topk(2).indices.tolist())
        torch.testing.assert_close(
            torch.tensor(logprobs).double(), row_logprobs[list(ids)], rtol=0, atol=1e-4
        )
    assert len(found) == len(PROMPT) - 1


def test_a_row_that_comes_again_goes_on_as_before(folder: Path) -> None:
    """Count its output as output when the row returns in another slot, after another row."""
    asked = extras(min_tokens=12, end_token_ids=list(range(100, 200)))
    numbers: Any = PENALTIES | SAMPLING
    whole = generate(folder, asked, **numbers).tokens[3]
    driver = Driver(make_runner(folder))
    driver.step(
        plan(added=[row(3, PROMPT, range(5), extras=asked, **numbers)], chunks=[(3, 37)]), 3
    )
    driver.decode(8, 3)
    so_far = driver.tokens.pop(3)
    added = [row(3, OTHER, range(10, 14), extras=extras(OTHER), presence_penalty=2.0)]
    added += [row(0, PROMPT + so_far, range(5), extras=asked, **numbers)]
    driver.step(plan(removed=[3], added=added, chunks=[(3, 20), (0, 46)]), 0, 3)
    driver.decode(NUM_STEPS - 10, 0, 3)
    assert so_far + driver.tokens[0] == whole


def test_there_is_a_place_for_every_row(folder: Path) -> None:
    """Twenty rows with penalties come and go, up to eight at once."""
    alone = generate(folder, extras(), **PENALTIES).tokens[3]
    driver = Driver(make_runner(folder))
    for _ in range(3):
        added = [
            row(s, PROMPT, range(5 * s, 5 * s + 5), extras=extras(), **PENALTIES) for s in range(8)
        ]
        driver.step(plan(added=added, chunks=[(slot, 37) for slot in range(8)]), *range(8))
        driver.decode(3, *range(8))
        driver.step(plan(removed=range(8)))
    assert all(tokens == alone[:4] * 3 for tokens in driver.tokens.values())


def test_clear_forgets_what_rows_asked_for(folder: Path, plain: dict[int, list[int]]) -> None:
    driver = Driver(make_runner(folder))
    asked = extras(logit_bias={5: 100.0})
    driver.step(plan(added=[row(3, PROMPT, range(5), extras=asked)], chunks=[(3, 37)]), 3)
    assert driver.tokens.pop(3) == [5]
    driver.runner.clear()
    driver.step(plan(added=[row(3, PROMPT, range(5))], chunks=[(3, 37)]), 3)
    assert driver.tokens[3] == plain[3][:1]
