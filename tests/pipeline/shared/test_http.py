"""Chats over HTTP: every field that OpenAI and vLLM have."""

import re
from typing import Any

import httpx
import pytest

from tests.pipeline.http_api import (
    BOTH_CLIENTS,
    COUNT_MESSAGES,
    COUNTED,
    MODEL,
    SUM_MESSAGES,
    UNKNOWN_MESSAGES,
    Api,
    content_of,
)

pytestmark = pytest.mark.pipeline


@BOTH_CLIENTS
def test_chat(api: Api) -> None:
    reply = api.chat()
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == COUNTED
    assert reply.choices[0].finish_reason == "stop"
    usage = reply.usage
    assert usage.completion_tokens == len(COUNTED) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


OF_REPLIES = "service_tier system_fingerprint kv_transfer_params ec_transfer_params metrics"
OF_CHATS = "prompt_logprobs prompt_token_ids prompt_text"
OF_MESSAGES = "refusal annotations audio function_call reasoning reasoning_content"
OF_CHOICES = "logprobs stop_reason token_ids routed_experts"


@BOTH_CLIENTS
def test_a_reply_has_vllms_keys_without_a_value(api: Api) -> None:
    """A client that reads an absent key fails: `openai` raises AttributeError."""
    chat, text = api.chat(max_tokens=1), api.complete(max_tokens=1)
    for found, names in (
        (chat, f"{OF_REPLIES} {OF_CHATS}"),
        (chat.choices[0], OF_CHOICES),
        (chat.choices[0].message, OF_MESSAGES),
        (text, OF_REPLIES),
        (text.choices[0], f"{OF_CHOICES} prompt_logprobs prompt_token_ids"),
    ):
        nulls = dict.fromkeys(names.split())
        assert {name: getattr(found, name) for name in nulls} == nulls
        assert found.to_dict() | nulls == found.to_dict()
    assert "tool_calls" not in chat.choices[0].message.model_fields_set
    again = [*COUNT_MESSAGES, chat.choices[0].message.model_dump(), *SUM_MESSAGES]
    assert api.chat(again, max_tokens=1).choices


@BOTH_CLIENTS
def test_a_chat_streamed(api: Api) -> None:
    options = {"include_usage": True}
    first, *chunks, last = api.chat(stream=True, stream_options=options, logprobs=True)
    assert (last.choices, last.usage.completion_tokens) == ([], len(COUNTED) + 1)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [one.token for piece in logprobs for one in piece.content][:-1] == [*COUNTED]
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.role == "assistant"
    assert content_of(chunks) == COUNTED
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(chunks[:-1])
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in [first, *chunks]}) == 1


def test_n(api: Api) -> None:
    fields = {"messages": UNKNOWN_MESSAGES, "temperature": 2.0, "seed": 7, "max_tokens": 8}
    replies = api.chat(n=3, **fields)  # type: ignore[arg-type]
    assert [choice.index for choice in replies.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in replies.choices]
    assert len(set(texts)) > 1
    alone = [api.chat(**fields | {"seed": 7 + i}) for i in range(3)]  # type: ignore[arg-type]
    assert texts == [one.choices[0].message.content for one in alone]
    assert replies.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_n_streamed(api: Api) -> None:
    chunks = api.chat(n=2, stream=True)
    for index in range(2):
        assert content_of([c for c in chunks if c.choices[0].index == index]) == COUNTED


HOT = {"temperature": 1.9}
DIGITS = [ord(digit) for digit in "0123456789"]
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0}, COUNTED),
    "top_p": (HOT | {"top_p": 1e-6}, COUNTED),
    "top_k": (HOT | {"top_k": 1}, COUNTED),
    "min_p": (HOT | {"min_p": 1.0}, COUNTED),
    "logit_bias": ({"logit_bias": {ord("x"): 100}, "max_tokens": 4}, "xxxx"),
    "allowed_token_ids": ({"allowed_token_ids": DIGITS, "max_tokens": 9}, r"\d+"),
    "bad_words": ({"bad_words": ["4 5", "9"], "max_tokens": 14}, "3 4 (?!5)[^9]+"),
    "stop": ({"stop": ["8", "5"]}, "3 4 "),
    "include_stop": ({"stop": "5", "include_stop_str_in_output": True}, "3 4 5"),
    "stop_token_ids": ({"stop_token_ids": [ord("5")]}, "3 4 "),
    "max_tokens": ({"max_tokens": 3}, COUNTED[:3]),
    "ignore_eos": (
        {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 14},
        rf"{COUNTED}<\|.*",
    ),
    "min_tokens": ({"min_tokens": 20, "skip_special_tokens": False}, "(?s).{20,}"),
    "repetition_penalty": ({"repetition_penalty": 100.0, "max_tokens": 14}, f"(?s)(?!{COUNTED}).+"),
}


@pytest.mark.parametrize(("fields", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_reaches_the_process_that_applies_it(
    http: httpx.Client, fields: dict[str, Any], expected: str
) -> None:
    body = {"messages": COUNT_MESSAGES, "max_tokens": 25} | fields
    reply = http.post("/v1/chat/completions", json=body)
    assert re.fullmatch(expected, reply.json()["choices"][0]["message"]["content"])


def test_penalties_and_seeds(api: Api) -> None:
    bias = {"logit_bias": {str(ord(letter)): 90 for letter in "abcdefgh"}, "max_tokens": 12}
    assert set(api.text(**bias, frequency_penalty=2.0)) > set(api.text(**bias))
    hot = {"messages": UNKNOWN_MESSAGES, "temperature": 2.0, "max_tokens": 10, "seed": 2}
    assert api.text(**hot) == api.text(**hot) != api.text(**hot | {"seed": 1})
    assert api.text(**hot, presence_penalty=2.0) != api.text(**hot)


def test_logprobs(api: Api) -> None:
    content = api.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert "".join(one.token for one in content[:-1]) == COUNTED
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob <= 0
        assert bytes(one.bytes).decode() == one.token
    assert api.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert api.chat().choices[0].logprobs is None
