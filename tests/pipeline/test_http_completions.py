"""Completions over HTTP."""

from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.http_api import COUNT, COUNTED, Api, api, http, url

__all__ = ["api", "http", "url"]
"""fixtures"""
pytestmark = pytest.mark.pipeline


def test_completion(api: Api) -> None:
    reply = api.complete()
    assert reply.object == "text_completion"
    assert reply.choices[0].text == COUNTED
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(COUNT)


def test_a_completion_streamed(api: Api) -> None:
    *chunks, last = api.complete(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == COUNTED
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.prompt_tokens) == ([], len(COUNT))


@pytest.mark.parametrize("tokens", [False, True])
def test_many_prompts(api: Api, tokens: bool) -> None:
    prompts: list[Any] = [COUNT, "17+25="]
    if tokens:
        prompts = [list(prompt.encode()) for prompt in prompts]
    reply = api.complete(prompts, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [COUNTED, COUNTED, "42", "42"]
    assert reply.usage.prompt_tokens == len(COUNT) + len("17+25=")
    assert api.complete(prompts[1]).choices[0].text == "42"


def test_at_most_16_tokens_if_nothing_is_said(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={"prompt": "count from 1 to 50"}).json()
    assert reply["usage"]["completion_tokens"] == 16


def test_echo(api: Api) -> None:
    assert api.complete(echo=True).choices[0].text == COUNT + COUNTED
    assert api.complete(list(COUNT.encode()), echo=True).choices[0].text == COUNT + COUNTED
    chunks = api.complete(echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == COUNT + COUNTED


def test_logprobs_of_a_completion(api: Api) -> None:
    logprobs = api.complete(logprobs=2).choices[0].logprobs
    assert "".join(one for one in logprobs.tokens if one[:2] != "<|") == COUNTED
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    with_prompt = api.complete(logprobs=2, echo=True).choices[0].logprobs
    assert "".join(one for one in with_prompt.tokens if one[:2] != "<|") == COUNT + COUNTED
    assert with_prompt.text_offset[: len(COUNT)] == list(range(len(COUNT)))
    assert with_prompt.token_logprobs[0] is None
    assert with_prompt.token_logprobs[-3:] == pytest.approx(logprobs.token_logprobs[-3:], abs=1e-3)


def test_best_of_and_suffix_are_refused(api: Api) -> None:
    for fields in ({"best_of": 2}, {"suffix": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            api.complete(**fields)
        assert caught.value.param == next(iter(fields))
