"""OpenAI's requests become fields of `GenerateRequest`, or a sentence says why not."""

from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.chat import MessageError, chat_messages
from penstock.protocol.messages.client import ChatMessage, GenerateRequest
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.http.generation.schema import ChatRequest, CompletionRequest
from penstock.services.http.generation.to_generate_request import (
    chat_fields,
    completion_fields,
    prompts_of,
    truncated,
)
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ApiError, as_api_error

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return decode_body(msgspec.json.encode({"messages": [USER], **fields}), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode_body(msgspec.json.encode({"prompt": "hi", **fields}), CompletionRequest)


def refusal(function: Any, *arguments: Any) -> ApiError:
    with pytest.raises((ApiError, MessageError)) as caught:
        function(*arguments)
    error = as_api_error(caught.value)
    assert error.status == 400
    return error


def test_every_sampling_parameter_is_passed_on() -> None:
    """A parameter that is declared in SamplingParams needs no further line here."""
    marks = {name: object() for name in SamplingParams.__struct_fields__}
    for kind in (ChatRequest, CompletionRequest):
        assert set(marks) <= set(kind.__struct_fields__)
    special = {"n", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"}
    asked = chat()
    for name in set(marks) - special:
        setattr(asked, name, marks[name])
    fields = chat_fields(asked)
    assert {name: fields[name] for name in set(marks) - special} == {
        name: mark for name, mark in marks.items() if name not in special
    }


def test_sampling_fields_are_passed_on() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
    }
    for fields in (chat_fields(chat(**given)), completion_fields(completion(**given))):
        assert {name: fields[name] for name in given} == given
        GenerateRequest(**fields)


def test_keys_of_logit_bias_are_texts_in_json() -> None:
    assert chat_fields(chat(logit_bias={"50": 3}))["logit_bias"] == {50: 3.0}


def test_null_is_as_left_out() -> None:
    nulls = dict.fromkeys(("temperature", "logit_bias", "presence_penalty", "n", "tools", "stop"))
    assert chat_fields(chat(**nulls)) == chat_fields(chat())


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat_fields(chat(max_completion_tokens=5))["max_tokens"] == 5
    assert chat_fields(chat(max_completion_tokens=5, max_tokens=6))["max_tokens"] == 5
    assert chat_fields(chat(max_tokens=6))["max_tokens"] == 6
    assert chat_fields(chat())["max_tokens"] is None
    assert completion_fields(completion())["max_tokens"] == 16


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
    ],
)
def test_logprobs_of_chats(given: dict[str, Any], passed_on: int | None) -> None:
    assert chat_fields(chat(**given))["logprobs"] == passed_on


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(chat_fields, chat(top_logprobs=2)).body.error.param == "top_logprobs"


def test_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            {"role": "assistant", "content": "2", "reasoning_content": "hm", "annotations": []},
            {"role": "assistant", "content": "3", "reasoning": "so"},
        ]
    )
    template_call = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat_messages(request.messages) == [
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="a\nb", name="me"),
        ChatMessage(role="assistant", content="", tool_calls=[template_call]),
        ChatMessage(role="tool", content="2", tool_call_id="c"),
        ChatMessage(role="assistant", content="2", reasoning_content="hm"),
        ChatMessage(role="assistant", content="3", reasoning_content="so"),
    ]


def test_parts_of_text() -> None:
    parts = [
        {"type": "refusal", "refusal": "no"},
        {"type": "output_text", "text": "b"},
        {"type": "input_text", "text": "c"},
    ]
    (message,) = chat_messages(chat(messages=[{"role": "assistant", "content": parts}]).messages)
    assert message.content == "no\nb\nc"


@pytest.mark.parametrize("arguments", ["{", "[1]", "9" * 40, '{"a": ' + "9" * 40 + "}"])
def test_arguments_that_are_no_map_stay_text(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    (message,) = chat_messages(request.messages)
    assert message.tool_calls
    assert message.tool_calls[0]["function"]["arguments"] == arguments


def test_images_are_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:…"}}
    request = chat(messages=[{"role": "user", "content": [part]}])
    error = refusal(chat_messages, request.messages).body.error
    assert "'image_url'" in error.message
    assert error.param == "messages[0].content[0].type"


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_a_message_without_content(role: str, message: dict[str, Any]) -> None:
    messages = [USER, {"role": role} | message]
    error = refusal(chat_fields, chat(messages=messages)).body.error
    assert error.param == "messages[1].content"
    assert error.message == (
        "messages[1].content: got null, expected a string or a list of text parts"
    )


def test_an_assistant_may_have_no_content() -> None:
    messages = [USER, {"role": "assistant", "content": None}]
    assert chat_fields(chat(messages=messages))["messages"][1].content == ""


@pytest.mark.parametrize("stream_options", [{"include_usage": True}, {}])
def test_stream_options_need_a_stream(stream_options: dict[str, Any]) -> None:
    fields = {"stream_options": stream_options}
    for function, make in ((chat_fields, chat), (completion_fields, completion)):
        error = refusal(function, make(**fields)).body.error
        assert error.param == "stream_options"
        function(make(stream=True, **fields))
        function(make(stream_options=None))


def test_thinking() -> None:
    kwargs = {"enable_thinking": True}
    assert chat_fields(chat(chat_template_kwargs=kwargs))["chat_template_kwargs"] == kwargs
    without = chat_fields(chat(reasoning_effort="none"))
    assert without["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert prompts_of(prompt) == prompts


def test_prompts_are_not_mixed() -> None:
    for prompt in ([1, "a"], [], ""):
        assert refusal(prompts_of, prompt).body.error.param == "prompt"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refused_in_completions(given: dict[str, Any], param: str) -> None:
    assert refusal(completion_fields, completion(**given)).body.error.param == param


def test_best_of_n_is_n() -> None:
    completion_fields(completion(best_of=2, n=2, suffix=""))


def test_an_echo_alone_generates_one_token() -> None:
    assert completion_fields(completion(max_tokens=0, echo=True))["max_tokens"] == 1


def test_fields_of_prompts_are_passed_on() -> None:
    given = {
        "add_special_tokens": True,
        "truncation_side": "right",
        "cache_salt": "s",
        "priority": 3,
    }
    for fields in (chat_fields(chat(**given)), completion_fields(completion(**given))):
        assert {name: fields[name] for name in given} == given
    of_chats = {"chat_template": "x", "add_generation_prompt": False}
    fields = chat_fields(chat(**of_chats, continue_final_message=True))
    assert {name: fields[name] for name in of_chats} == of_chats
    assert GenerateRequest(**fields).continue_final_message


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, 90),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1000}, 1),
        ({}, None),
    ],
)
def test_prompts_are_truncated_to_what_leaves_room(given: dict[str, Any], kept: int | None) -> None:
    fields = truncated(completion_fields(completion(**given)), max_model_len=100)
    assert fields["truncate_prompt_tokens"] == kept


def test_a_truncated_chat_leaves_room_for_an_answer() -> None:
    fields = truncated(chat_fields(chat(truncate_prompt_tokens=-1)), max_model_len=100)
    assert fields["truncate_prompt_tokens"] == 75


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    fields = completion_fields(completion(echo=True, logprobs=2))
    assert (fields["logprobs"], fields["prompt_logprobs"]) == (2, 2)
    assert completion_fields(completion(echo=True))["prompt_logprobs"] is None
