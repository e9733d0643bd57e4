"""Chats over HTTP: every field that OpenAI and vLLM have."""

from typing import Any

import openai
import pytest

from tests.pipeline.http_api import (
    BOTH_CLIENTS,
    COUNT,
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


def test_cached_tokens(api: Api) -> None:
    messages = [{"role": "user", "content": f"repeat: {'cached ' * 20}"}]
    api.chat(messages, max_tokens=1)
    assert api.chat(messages, max_tokens=1).usage.prompt_tokens_details.cached_tokens >= 128


@BOTH_CLIENTS
def test_a_chat_streamed(api: Api) -> None:
    first, *chunks = api.chat(stream=True)
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.role == "assistant"
    assert content_of(chunks) == COUNTED
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(chunks[:-1])
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in [first, *chunks]}) == 1


def test_the_usage_of_a_stream(api: Api) -> None:
    *chunks, last = api.chat(stream=True, stream_options={"include_usage": True})
    assert content_of(chunks) == COUNTED
    assert last.choices == []
    assert last.usage.completion_tokens == len(COUNTED) + 1


def test_roles_and_parts(api: Api) -> None:
    parts = [{"type": "text", "text": COUNT}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    api.chat([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    api.chat(
        [
            {"role": "system", "content": "x"},
            *SUM_MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
        max_tokens=2,
    )
    assert api.text([{"role": "user", "content": parts}]) == COUNTED


def test_an_answer_can_be_sent_back(api: Api) -> None:
    answer = api.chat(SUM_MESSAGES).choices[0].message
    messages = [*SUM_MESSAGES, answer.model_dump(), *COUNT_MESSAGES]
    assert api.chat(messages, max_tokens=1).choices


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens(api: Api, field: str) -> None:
    reply = api.chat(**{field: 3})
    assert reply.choices[0].message.content == COUNTED[:3]
    assert reply.choices[0].finish_reason == "length"


def test_stop(api: Api) -> None:
    assert api.text(stop="7") == "3 4 5 6 "
    assert api.text(stop=["8", "5"]) == "3 4 "
    chunks = api.chat(stream=True, stop=["6 7"])
    assert content_of(chunks) == "3 4 5 "


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


def test_sampling(api: Api) -> None:
    hot = {"messages": UNKNOWN_MESSAGES, "temperature": 2.0, "max_tokens": 10}
    texts = [api.text(**hot, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert api.text(temperature=0) == COUNTED
    assert api.text(temperature=1.9, top_p=1e-6) == COUNTED
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert api.text(temperature=1.9, extra_body=extra) == COUNTED


def test_logit_bias(api: Api) -> None:
    assert api.text(logit_bias={str(ord("x")): 100}, max_tokens=4) == "xxxx"


def test_restricted_tokens(api: Api) -> None:
    digits = {"allowed_token_ids": [ord(digit) for digit in "0123456789"]}
    assert set(api.text(max_tokens=9, extra_body=digits)) <= set("0123456789")
    text = api.text(max_tokens=14, extra_body={"bad_words": ["4 5", "9"]})
    assert text.startswith("3 4 ")
    assert "4 5" not in text
    assert "9" not in text
    with pytest.raises(openai.BadRequestError, match=r"allowed_token_ids\[0\]: got 264"):
        api.text(extra_body={"allowed_token_ids": [264]})


def test_penalties(api: Api) -> None:
    bias = {"logit_bias": {str(ord(letter)): 90 for letter in "abcdefgh"}, "max_tokens": 12}
    letters = set(api.text(**bias))
    assert set(api.text(**bias, frequency_penalty=2.0)) > letters
    hot = {"messages": UNKNOWN_MESSAGES, "temperature": 2.0, "max_tokens": 10, "seed": 2}
    assert api.text(**hot, presence_penalty=2.0) != api.text(**hot)
    assert api.text(extra_body={"repetition_penalty": 1.0}) == COUNTED
    assert api.text(extra_body={"repetition_penalty": 100.0}, max_tokens=14) != COUNTED


def test_ends(api: Api) -> None:
    assert api.text(extra_body={"stop_token_ids": [ord("5")]}) == "3 4 "
    assert api.text(stop="5", extra_body={"include_stop_str_in_output": True}) == "3 4 5"
    reply = api.chat(max_tokens=30, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 30
    reply = api.chat(max_tokens=25, extra_body={"min_tokens": 20})
    assert reply.usage.completion_tokens >= 20


def test_special_tokens(api: Api) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
    assert api.text(max_tokens=14, extra_body=fields).startswith(f"{COUNTED}<|")


def test_logprobs(api: Api) -> None:
    content = api.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert "".join(one.token for one in content[:-1]) == COUNTED
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == one.top_logprobs[0].logprob <= 0
        assert bytes(one.bytes).decode() == one.token
    assert api.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert api.chat().choices[0].logprobs is None


@BOTH_CLIENTS
def test_logprobs_of_a_stream(api: Api) -> None:
    chunks = api.chat(stream=True, logprobs=True, top_logprobs=1)
    tokens = [
        one.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert "".join(tokens[:-1]) == COUNTED


def test_prompt_logprobs(api: Api) -> None:
    first, *others = api.chat(extra_body={"prompt_logprobs": 1}).prompt_logprobs
    assert first is None
    for one in others:
        ranks = [entry["rank"] for entry in one.values()]
        assert 1 in ranks
        assert all(isinstance(rank, int) for rank in ranks)
    chunks = list(api.chat(stream=True, extra_body={"prompt_logprobs": 1}))
    assert [hasattr(one, "prompt_logprobs") for one in chunks] == [True] + [False] * len(chunks[1:])
    assert [set(one or {}) for one in chunks[0].prompt_logprobs] == [
        set(one or {}) for one in (first, *others)
    ]


def test_user_and_others_change_nothing(api: Api) -> None:
    assert api.text(user="me", store=False, metadata={"a": "b"}, service_tier="auto") == COUNTED
