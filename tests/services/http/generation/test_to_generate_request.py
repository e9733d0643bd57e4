"""OpenAI's requests become fields of `GenerateRequest`, or a sentence says why not."""

import json
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.chat import (
    FunctionCall,
    Message,
    MessageError,
    ToolCall,
    chat_messages,
)
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
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    given |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    given |= {"stop": ["x"], "stop_token_ids": [5], "include_stop_str_in_output": True}
    given |= {"ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "prompt_logprobs": 1}
    given |= {"skip_special_tokens": False, "add_special_tokens": True, "truncation_side": "right"}
    given |= {"cache_salt": "s", "priority": 3}
    for fields in (chat_fields(chat(**given)), completion_fields(completion(**given))):
        assert {name: fields[name] for name in given} == given
        GenerateRequest(**fields)


def test_keys_of_logit_bias_are_texts_in_json() -> None:
    assert chat_fields(chat(logit_bias={"50": 3}))["logit_bias"] == {50: 3.0}


def test_null_is_as_left_out() -> None:
    nulls = dict.fromkeys(("temperature", "logit_bias", "presence_penalty", "n", "tools", "stop"))
    assert chat_fields(chat(**nulls)) == chat_fields(chat())


@pytest.mark.parametrize(
    ("given", "name", "passed_on"),
    [
        ({}, "logprobs", None),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 5}, "logprobs", 5),
        ({"logprobs": False}, "logprobs", None),
        ({"logprobs": False, "top_logprobs": 0}, "logprobs", None),
        ({"top_logprobs": 0}, "logprobs", None),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", 5),
        ({"max_tokens": 6}, "max_tokens", 6),
        ({}, "max_tokens", None),
    ],
)
def test_fields_with_other_names(given: dict[str, Any], name: str, passed_on: int | None) -> None:
    assert chat_fields(chat(**given))[name] == passed_on


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(chat_fields, chat(top_logprobs=2)).body.error.param == "top_logprobs"


def test_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = [{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "b"}]
    other += [{"type": "input_text", "text": "c"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            {"role": "assistant", "content": "2", "reasoning_content": "hm", "annotations": []},
            {"role": "assistant", "content": other, "reasoning": "so"},
        ]
    )
    assert chat_messages(request.messages) == [
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content=["a", "b"], name="me"),
        ChatMessage(role="assistant", content="", tool_calls=[call]),
        ChatMessage(role="tool", content="2", tool_call_id="c"),
        ChatMessage(role="assistant", content="2", reasoning_content="hm"),
        ChatMessage(role="assistant", content=["no", "b", "c"], reasoning_content="so"),
    ]


@pytest.mark.parametrize("arguments", ["", "{", "[1]", {"a": 10**18}])
def test_arguments_are_passed_on_as_json(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    (message,) = chat_messages(request.messages)
    assert message.tool_calls
    sent = message.tool_calls[0]["function"]["arguments"]
    assert sent == arguments if isinstance(arguments, str) else json.loads(sent) == arguments


class Counted(str):
    """Text that counts its comparisons."""

    __slots__ = ()
    __hash__ = str.__hash__
    number = 0

    def __eq__(self, other: object) -> bool:
        Counted.number += 1
        return str.__eq__(self, other)


def test_results_of_many_calls_are_sorted_in_linear_time() -> None:
    """12,000 of them, in a body of a megabyte, blocked the server for 20 s."""
    names = [Counted(number) for number in range(500)]
    function = FunctionCall(name="f", arguments="{}")
    calls = [ToolCall(id=name, function=function) for name in names]
    results = [Message(role="tool", content=name, tool_call_id=name) for name in reversed(names)]
    made = chat_messages([Message(role="assistant", tool_calls=calls), *results])
    assert [message.content for message in made[1:]] == [str(name) for name in names]
    assert Counted.number < 10 * len(names)


@pytest.mark.parametrize("function", [{}, {"arguments": "{}"}, {"name": None}])
def test_a_call_needs_a_name(function: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert caught.value.body.error.param == "messages[1].tool_calls[0].function.name"


def called(*ids: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": one, "function": function} for one in ids]}


def results(*ids: str | None) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": f"of {one}", "tool_call_id": one} for one in ids]


@pytest.mark.parametrize(
    ("messages", "order"),
    [
        ([called("a", "b", "c"), *results("c", "a", "b")], ["of a", "of b", "of c"]),
        (
            [called("a", "b"), *results("b", "a"), USER, called("a"), *results("a")],
            ["of a", "of b", "of a"],
        ),
        ([called("a", "b"), *results(None, "a")], ["of None", "of a"]),
        ([called("", ""), *results("b", "a")], ["of b", "of a"]),
        ([called("a", "b"), USER], []),
        ([called("a"), *results("x")], ["of x"]),
    ],
)
def test_results_stand_in_the_order_of_their_calls(messages: list[Any], order: list[str]) -> None:
    """Qwen's templates do not show ids: the model finds the result of a call by its place."""
    fields = chat_fields(chat(messages=[USER, *messages]))
    assert [one.content for one in fields["messages"] if one.role == "tool"] == order


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([called("a", "b"), *results("b")], "messages[1].tool_calls[0].id"),
        ([called("a", "b"), *results("a"), USER, *results("b")], "messages[1].tool_calls[1].id"),
        ([called("a", "b"), *results("a", "b", "b")], "messages[1].tool_calls[1].id"),
        ([called("a", "a"), *results("a", "a")], "messages[1].tool_calls[0].id"),
        ([called("a", "b"), *results("a", "b", "c")], "messages[2].tool_call_id"),
    ],
)
def test_results_that_would_be_taken_for_others_are_refused(messages: Any, path: str) -> None:
    error = refusal(chat_fields, chat(messages=[USER, *messages])).body.error
    assert error.param == path
    assert error.message.startswith(f"{path}: got ")


@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
@pytest.mark.parametrize("kind", ["image_url", "image", "input_image", "video_url", "input_audio"])
def test_images_are_refused(role: str, kind: str) -> None:
    """Also among texts: an answer to what is left would be wrong."""
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:…"}}]
    request = chat(messages=[USER, {"role": role, "content": content}])
    error = refusal(chat_messages, request.messages).body.error
    assert error.message == (
        f"messages[1].content[1].type: got {kind!r}, expected 'text': the model reads text only"
    )
    assert error.param == "messages[1].content[1].type"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
def test_a_part_without_text_is_refused(kind: str) -> None:
    field = "refusal" if kind == "refusal" else "text"
    parts = [{"type": kind, field: ""}, {"type": kind}]
    messages = [USER, {"role": "assistant", "content": parts}]
    error = refusal(chat_messages, chat(messages=messages).messages).body.error
    assert error.message == f"messages[1].content[1].{field}: got nothing, expected a string"


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_only_an_assistant_may_have_no_content(role: str, message: dict[str, Any]) -> None:
    asked = chat(messages=[USER, {"role": role} | message])
    if role == "assistant":
        assert chat_fields(asked)["messages"][1].content == ""
        return
    error = refusal(chat_fields, asked).body.error
    assert error.param == "messages[1].content"
    assert error.message.startswith("messages[1].content: got null, expected a string")


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
    effort = chat_fields(chat(reasoning_effort="low", chat_template_kwargs=kwargs))
    assert effort["chat_template_kwargs"] == kwargs | {"reasoning_effort": "low"}
    own = {"reasoning_effort": "high"}
    own = chat_fields(chat(reasoning_effort="low", chat_template_kwargs=own))
    assert own["chat_template_kwargs"] == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ([1, "a"], None),
        ([], None),
        ("", None),
    ],
)
def test_prompts_are_not_mixed(prompt: Any, prompts: Any) -> None:
    if prompts:
        assert prompts_of(prompt) == prompts
    else:
        assert refusal(prompts_of, prompt).body.error.param == "prompt"


@pytest.mark.parametrize(
    "given",
    [{"suffix": "x"}, {"best_of": 2}, {"max_tokens": 0}, {"truncate_prompt_tokens": 0}],
)
def test_refused_in_completions(given: dict[str, Any]) -> None:
    assert refusal(completion_fields, completion(**given)).body.error.param == next(iter(given))


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [({}, 16), ({"best_of": 2, "n": 2, "suffix": ""}, 16), ({"max_tokens": 0, "echo": True}, 1)],
)
def test_completions_have_an_end(given: dict[str, Any], max_tokens: int) -> None:
    """The best of n are n; an echo alone generates one token."""
    assert completion_fields(completion(**given))["max_tokens"] == max_tokens


def test_fields_of_templates_are_passed_on() -> None:
    given = {"chat_template": "x", "add_generation_prompt": False}
    fields = chat_fields(chat(**given, continue_final_message=True))
    assert {name: fields[name] for name in given} == given
    assert GenerateRequest(**fields).continue_final_message


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (completion(truncate_prompt_tokens=7), 7),
        (completion(truncate_prompt_tokens=-1, max_tokens=10), 90),
        (completion(truncate_prompt_tokens=-1, max_tokens=1000), 1),
        (completion(), None),
        (chat(truncate_prompt_tokens=-1), 75),
    ],
)
def test_prompts_are_truncated_to_what_leaves_room(given: Any, kept: int | None) -> None:
    fields = chat_fields(given) if isinstance(given, ChatRequest) else completion_fields(given)
    assert truncated(fields, max_model_len=100)["truncate_prompt_tokens"] == kept


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    fields = completion_fields(completion(echo=True, logprobs=2))
    assert (fields["logprobs"], fields["prompt_logprobs"]) == (2, 2)
    assert completion_fields(completion(echo=True))["prompt_logprobs"] is None
