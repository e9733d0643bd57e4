"""Completions over HTTP."""

import json
from typing import Any

import httpx
import pytest

from tests.pipeline.http_api import BOTH_CLIENTS, COUNT, COUNTED, Api, in_pieces

pytestmark = pytest.mark.pipeline


@BOTH_CLIENTS
def test_completion(api: Api) -> None:
    reply = api.complete()
    assert reply.object == "text_completion"
    assert reply.choices[0].text == COUNTED
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(COUNT)


@BOTH_CLIENTS
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


def test_logprobs_of_a_completion(api: Api) -> None:
    logprobs = api.complete(logprobs=2).choices[0].logprobs
    assert "".join(one for one in logprobs.tokens if one[:2] != "<|") == COUNTED
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    with_prompt = api.complete(logprobs=2, echo=True).choices[0].logprobs
    assert "".join(one for one in with_prompt.tokens if one[:2] != "<|") == COUNT + COUNTED
    ids = list(COUNT.encode())
    assert api.complete(ids, echo=True).choices[0].text == COUNT + COUNTED
    assert with_prompt.text_offset[: len(COUNT)] == list(range(len(COUNT)))
    assert with_prompt.token_logprobs[0] is None
    assert with_prompt.token_logprobs[-3:] == pytest.approx(logprobs.token_logprobs[-3:], abs=1e-3)
    texts: list[str] = []

    def stream() -> list[Any]:
        chunks = [one.choices[0] for one in api.complete(logprobs=2, echo=True, stream=True)]
        texts.append(chunks[0].text)
        return [one.logprobs for one in chunks if one.logprobs]

    found = in_pieces(stream)
    assert all(text.startswith(COUNT) for text in texts)
    for name in ("tokens", "text_offset"):
        pieces = [one for piece in found for one in getattr(piece, name)]
        assert pieces == getattr(with_prompt, name)
    values = [one for piece in found for one in piece.token_logprobs]
    assert values == [None, *map(pytest.approx, with_prompt.token_logprobs[1:])]


def test_nothing_but_the_echo(http: httpx.Client) -> None:
    body = {"prompt": COUNT, "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = http.post("/v1/completions", json=body).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (COUNT, "length")
    assert "".join(choice["logprobs"]["tokens"]) == COUNT
    assert reply["usage"]["completion_tokens"] == 0
    (chunk,) = streamed(http, "/v1/completions", body)
    assert chunk["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    del body["logprobs"]
    chunks = streamed(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == COUNT
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_token_ids(http: httpx.Client) -> None:
    body = {"prompt": [COUNT, "17+25="], "max_tokens": 50, "return_token_ids": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [bytes(one["prompt_token_ids"]).decode() for one in choices] == body["prompt"]
    assert bytes(one for one in choices[0]["token_ids"] if one < 256).decode() == COUNTED
    chunks = streamed(http, "/v1/completions", body | {"prompt": COUNT})
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    token_ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert token_ids == choices[0]["token_ids"]
    first, *others = (chunk["choices"][0].get("prompt_token_ids") for chunk in chunks)
    assert bytes(first).decode() == COUNT
    assert not any(others)


def test_a_long_prompt_is_truncated(http: httpx.Client) -> None:
    body = {"prompt": "x" * 9000 + COUNT, "truncate_prompt_tokens": len(COUNT), "max_tokens": 50}
    reply = http.post("/v1/completions", json=body | {"echo": True}).json()
    assert reply["choices"][0]["text"] == COUNT + COUNTED
    reply = http.post("/v1/completions", json=body | {"truncate_prompt_tokens": -1}).json()
    assert reply["usage"]["prompt_tokens"] == 4096 - 50


def test_a_salt_keeps_the_cache_apart(http: httpx.Client) -> None:
    def cached(**fields: str) -> int:
        body = {"prompt": "salt" * 40, "max_tokens": 1, **fields}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cold, other, same, unsalted = cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached()
    assert cold == other == 0
    assert same == unsalted > 0


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
