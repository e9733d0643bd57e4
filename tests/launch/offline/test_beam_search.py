"""Beam search against an exhaustive one."""

import itertools
import math
import random
from typing import Any

import pytest

from penstock.launch.offline.beam_search import BeamSearch, BeamSearchParams
from penstock.protocol.messages.client import (
    GenerateReply,
    GenerateRequest,
    Logprob,
    TokenLogprobs,
    Usage,
)

EOS, NUM_TOKENS, PROMPT = 0, 4, [1, 2]


def logprob(token_id: int, value: float) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": value, "rank": 1, "token": "", "bytes": []}


def distribution(token_ids: list[int]) -> list[float]:
    """Return the logprobs of the next token: those of a model of random numbers."""
    noise = random.Random(str(token_ids))
    weights = [noise.random() ** 3 for _ in range(NUM_TOKENS)]
    return [math.log(one / sum(weights)) for one in weights]


def answer(request: GenerateRequest) -> GenerateReply:
    assert isinstance(request.prompt, list)
    assert request.max_tokens == 1
    values = sorted(enumerate(distribution(request.prompt)), key=lambda pair: -pair[1])
    top = [Logprob(**logprob(*pair)) for pair in values[: request.logprobs]]
    position = TokenLogprobs(**logprob(*values[0]), top=top)
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1)
    return GenerateReply(
        request_id="r",
        text="",
        token_ids=[values[0][0]],
        finish_reason="length",
        usage=usage,
        logprobs=[position],
    )


def search(params: BeamSearchParams) -> BeamSearch:
    found = BeamSearch(PROMPT, params, [EOS])
    while requests := found.requests():
        found.step([answer(one) for one in requests])
    return found


def every_text(length: int) -> list[tuple[list[int], float]]:
    """Return each possible text with its EOS, if it has one, and the sum of its logprobs."""
    found = []
    for size in range(1, length + 1):
        for text in itertools.product(range(NUM_TOKENS), repeat=size):
            if EOS in text[:-1] or (size < length and text[-1] != EOS):
                continue
            total = sum(distribution([*PROMPT, *text[:at]])[one] for at, one in enumerate(text))
            found.append((list(text), total))
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("length", [1, 2])
def test_finds_the_best_texts(length: int, penalty: float) -> None:
    """With as many beams as there are beginnings nothing is lost."""
    width = 4
    found = search(BeamSearchParams(width, length, length_penalty=penalty)).best()

    def score(pair: tuple[list[int], float]) -> float:
        text, total = pair
        return total / (len(PROMPT) + len(text) - (text[-1] == EOS)) ** penalty

    expected = sorted(every_text(length), key=score, reverse=True)[:width]
    for beam, (text, total) in zip(found, expected, strict=True):
        has_eos = text[-1] == EOS
        assert beam.token_ids == text[: len(text) - has_eos]
        assert beam.cum_logprob == pytest.approx(total)
        assert (beam.finish_reason, beam.stop_reason) == (
            ("stop", EOS) if has_eos else ("length", None)
        )
        assert [one.token_id for one in beam.logprobs] == beam.token_ids


def test_one_beam_is_greedy_until_its_end() -> None:
    beam, *_ = search(BeamSearchParams(1, 20, ignore_eos=True)).best()
    greedy = list(PROMPT)
    for _ in range(20):
        values = distribution(greedy)
        greedy.append(values.index(max(values)))
    assert beam.token_ids == greedy[len(PROMPT) :]
    assert sum(one.logprob for one in beam.logprobs) == pytest.approx(beam.cum_logprob)


def test_an_eos_is_kept_where_it_is_wanted() -> None:
    params = {"beam_width": 4, "max_tokens": 2}
    without = search(BeamSearchParams(**params)).best()
    kept = search(BeamSearchParams(**params, include_stop_str_in_output=True)).best()
    assert any(one.finish_reason == "stop" for one in kept)
    for one, other in zip(without, kept, strict=True):
        assert other.token_ids == one.token_ids + [EOS] * (one.finish_reason == "stop")
        assert other.cum_logprob == one.cum_logprob


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 11),
        ("max_tokens", 0),
        ("length_penalty", 10.1),
        ("length_penalty", math.nan),
    ],
)
def test_invalid_parameters(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}: got "):
        BeamSearchParams(**{"beam_width": 1, "max_tokens": 1} | {field: value})


def test_a_request_that_was_aborted() -> None:
    found = BeamSearch(PROMPT, BeamSearchParams(1, 2), [EOS])
    reply = answer(found.requests()[0])
    reply.logprobs, reply.finish_reason = [], "abort"
    with pytest.raises(ValueError, match="abort"):
        found.step([reply])
