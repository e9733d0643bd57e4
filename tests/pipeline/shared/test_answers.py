"""`n` answers to a prompt, over ZeroMQ and HTTP: their draws, and the work for their prompt."""

import asyncio
import json
import string
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.structured import StructuredOutputs
from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
NUM_PROMPT_TOKENS = 1000
BLOCK_SIZE = 16
NUM_SHARED = (NUM_PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
"""tokens of the prompt in whole blocks"""
UNKNOWN = [10, 11, 12]
"""not what the demo model was trained on: what it says depends on the draw"""
DRAWN: dict[str, Any] = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def client(shared: Pipeline) -> Iterator[Client]:
    with shared.client() as one:
        yield one


def new_prompt(seed: int) -> list[int]:
    """Return token ids that no other test has sent."""
    random = Random(seed)
    return [random.randrange(10, 200) for _ in range(NUM_PROMPT_TOKENS)]


def test_answers_are_those_of_single_requests(shared: Pipeline, client: Client) -> None:
    async def generate() -> list[list[int]]:
        async with AsyncClient(shared.endpoint) as other:
            return [one.token_ids for one in await other.generate_n(UNKNOWN, n=4, seed=7, **DRAWN)]

    single = [client.generate(UNKNOWN, seed=7 + index, **DRAWN).token_ids for index in range(4)]
    assert len(set(map(tuple, single))) == 4
    assert [one.token_ids for one in client.generate_n(UNKNOWN, n=4, seed=7, **DRAWN)] == single
    assert asyncio.run(generate()) == single
    streams = client.submit_n(UNKNOWN, n=4, seed=7, stream=True, **DRAWN)
    pieces = [[token_id for delta in one for token_id in delta.token_ids] for one in streams]
    assert pieces == single
    unseeded = [one.token_ids for one in client.generate_n(UNKNOWN, n=8, **DRAWN)]
    assert len(set(map(tuple, unseeded))) > 4  # two of them are equal once in a hundred


def test_seeds_beyond_64_bits_start_again_from_the_smallest(client: Client) -> None:
    last = 2**63 - 1
    several = client.generate_n(UNKNOWN, n=2, seed=last, **DRAWN)
    single = [client.generate(UNKNOWN, seed=seed, **DRAWN) for seed in (last, -last - 1)]
    assert [one.token_ids for one in several] == [one.token_ids for one in single]
    assert several[0].token_ids != several[1].token_ids


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_a_prompt_is_computed_once(client: Client, prompt_logprobs: int | None) -> None:
    prompt = new_prompt(1 if prompt_logprobs is None else 2)
    replies = client.generate_n(prompt, n=4, prompt_logprobs=prompt_logprobs, max_tokens=1)
    assert [one.usage.prompt_tokens for one in replies] == [NUM_PROMPT_TOKENS] * 4
    assert [one.usage.cached_tokens for one in replies] == [0, *[NUM_SHARED] * 3]
    has_logprobs = [one.prompt_logprobs is not None for one in replies]
    assert has_logprobs == [prompt_logprobs is not None, False, False, False]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_computed_once(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": new_text(stream), "echo": True, "logprobs": 0, "prompt_logprobs": 1}
    before = cache_hits(http)
    found = objects(http, "/v1/completions", body | {"stream": stream})
    assert cache_hits(http) - before == 3 * NUM_SHARED
    firsts: dict[int, Any] = {}
    for one in found:
        for choice in one["choices"]:
            firsts.setdefault(choice["index"], choice)
    assert sorted(firsts) == [0, 1, 2, 3]
    assert len(firsts[0]["logprobs"]["tokens"]) >= len(firsts[0]["prompt_logprobs"]) == 1000
    for choice in firsts.values():
        assert choice["prompt_logprobs"] == firsts[0]["prompt_logprobs"]
        of_prompt, expected = (
            one["logprobs"]["token_logprobs"][:NUM_PROMPT_TOKENS] for one in (choice, firsts[0])
        )
        assert of_prompt == expected


def test_the_prompt_of_a_chat_is_computed_once(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": new_text(2)}]
    body = {"messages": messages, "prompt_logprobs": 1}
    before = cache_hits(http)
    (whole,) = objects(http, "/v1/chat/completions", body | {"stream": False})
    num_shared = (whole["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cache_hits(http) - before == 3 * num_shared
    firsts: dict[int, Any] = {}
    streamed = objects(http, "/v1/chat/completions", body | {"stream": True})
    assert sum("prompt_logprobs" in one for one in streamed) == 4
    for one in streamed:
        firsts.setdefault(one["choices"][0]["index"], one.get("prompt_logprobs"))
    assert firsts == dict.fromkeys(range(4), whole["prompt_logprobs"])


def objects(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the reply to a request for four answers, or all events of a stream."""
    reply = http.post(path, json=body | {"n": 4, "max_tokens": 3, "ignore_eos": True})
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return [reply.json()]
    *lines, done = (line.removeprefix("data: ") for line in reply.text.splitlines() if line)
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def cache_hits(http: httpx.Client) -> float:
    """Return the number of prompt tokens that were found in the prefix cache so far."""
    lines = http.get("/metrics").text.splitlines()
    (line,) = (one for one in lines if one.startswith("penstock:prefix_cache_hits_total"))
    return float(line.rpartition(" ")[2])


def new_text(seed: int) -> str:
    """Return a text that no other test has sent, of NUM_PROMPT_TOKENS letters."""
    return "".join(Random(seed).choices(string.ascii_letters, k=NUM_PROMPT_TOKENS))


def test_answers_match_a_grammar_each(client: Client) -> None:
    choice = StructuredOutputs(choice=["yes", "no"])
    fields: dict[str, Any] = {"temperature": 2.0, "seed": 1, "logprobs": 1}
    replies = client.generate_n("zq", n=8, structured_outputs=choice, **fields)
    assert {one.text for one in replies} == {"yes", "no"}
    assert all(one.logprobs and len(one.logprobs) == len(one.token_ids) for one in replies)


def test_what_one_answer_is_refused_for(client: Client) -> None:
    """The gateway refuses each request; a request over ZeroMQ has one answer."""
    with pytest.raises(RequestError, match="temperature: got 3"):
        client.generate_n("zq", n=4, temperature=3)
    with pytest.raises(RequestError, match="n: got 4, expected 1; send a request for each"):
        client.generate("zq", n=4)
    assert client.generate_n("17+25=", n=2)[1].text == "42"
