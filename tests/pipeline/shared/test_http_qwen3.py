"""Over HTTP: thinking, tool calls, answers that must match something."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.pipeline.http_api import (
    COUNT_MESSAGES,
    COUNTED,
    SCHEMA,
    TOOL,
    Api,
    content_of,
    in_pieces,
)

pytestmark = pytest.mark.pipeline


ANSWER = "\n\nAnswer: three and four."


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("four", "Answer: three and "),
        ("wants", "Answer: three and four."),
        ("\n", "Answer: three and four."),
    ],
)
def test_a_stop_string_ends_the_answer(api: Api, stop: str, expected: str) -> None:
    thought = "The user wants four."
    grammar = f"start: <think> {json.dumps(thought)} </think> {json.dumps(ANSWER)}"
    extra = {"structured_outputs": {"grammar": grammar}}
    fields: dict[str, Any] = {"stop": stop, "max_tokens": 99, "extra_body": extra}
    choice = api.chat(**fields).choices[0]
    assert choice.message.reasoning_content == thought
    assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    chunks = list(api.chat(stream=True, **fields))
    assert content_of(chunks, "reasoning_content") == thought
    assert content_of(chunks) == expected


def test_enable_thinking(api: Api) -> None:
    """The template puts an empty thought into the prompt."""
    with_thought = {"chat_template_kwargs": {"enable_thinking": False}}
    longer = api.chat(extra_body=with_thought, max_tokens=1).usage.prompt_tokens
    assert longer > api.chat(max_tokens=1).usage.prompt_tokens
    assert longer == api.chat(reasoning_effort="none", max_tokens=1).usage.prompt_tokens


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
REPEATED_CALL: list[Any] = [{"role": "user", "content": f"repeat: {CALL}"}]


def test_tool_calls(api: Api) -> None:
    choice = api.chat(REPEATED_CALL, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "f"
    assert json.loads(call.function.arguments) == {"x": 1}
    assert api.text(REPEATED_CALL).startswith("<tool_call>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_tools(api: Api, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = api.chat(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "add"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)  # type: ignore[arg-type]

    def stream() -> list[Any]:
        deltas = [chunk.choices[0].delta for chunk in api.chat(**fields, stream=True)]
        return [piece for delta in deltas for piece in delta.tool_calls or []]

    pieces = in_pieces(stream, 3)
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


def test_a_final_message_is_continued(api: Api) -> None:
    messages = [*COUNT_MESSAGES, {"role": "assistant", "content": COUNTED[:7]}]
    extra = {"continue_final_message": True, "return_token_ids": True}
    reply = api.chat(messages, extra_body=extra)
    assert reply.choices[0].message.content == COUNTED[7:]
    assert bytes(reply.choices[0].token_ids[:-1]).decode() == COUNTED[7:]
    first, *others = api.chat(messages, extra_body=extra, stream=True)
    assert first.prompt_token_ids == reply.prompt_token_ids
    token_ids = [one for chunk in others for one in getattr(chunk.choices[0], "token_ids", [])]
    assert token_ids == reply.choices[0].token_ids
    with pytest.raises(openai.BadRequestError, match="continue_final_message: got true"):
        api.chat(messages, extra_body=extra | {"add_generation_prompt": True})


def test_templates_of_requests_are_refused(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        api.chat(extra_body={"chat_template": "{{ messages[0].content }}"})


def test_response_format(api: Api) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    jsonschema.validate(json.loads(api.text(response_format=given)), SCHEMA)  # type: ignore[arg-type]
    bias = {str(ord("}")): 100}
    text = api.text(response_format={"type": "json_object"}, logit_bias=bias)
    assert isinstance(json.loads(text), dict)
    assert api.text(response_format={"type": "text"}) == COUNTED


IN_THOUGHT: list[Any] = [
    {"role": "user", "content": "17+25="},
    {"role": "assistant", "content": "<think>\nWell"},
]
"""the prompt ends within a thought, as with a template that ends with `<think>`"""
CLOSES = {"260": 100}
"""a bias that makes the demo model, which never thinks, write `</think>` wherever it may"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_follows_the_thought(api: Api, stream: bool) -> None:
    """`</think>` is not part of the grammar, nor what comes before it of the content."""
    fields: dict[str, Any] = {
        "logit_bias": CLOSES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        "extra_body": {"continue_final_message": True},
    }
    answer = api.chat(IN_THOUGHT, stream=stream, **fields)
    content = content_of(answer) if stream else answer.choices[0].message.content
    jsonschema.validate(json.loads(content), SCHEMA)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_the_thought(api: Api, stream: bool) -> None:
    answer = api.chat(
        IN_THOUGHT,
        stream=stream,
        logit_bias=CLOSES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"continue_final_message": True},
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        calls = answer.choices[0].message.tool_calls
    arguments = "".join(call.function.arguments for call in calls)
    jsonschema.validate(json.loads(arguments), SCHEMA)  # type: ignore[arg-type]


def test_what_ends_within_the_thought_is_reasoning(api: Api) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "extra_body": {"continue_final_message": True}}
    message = api.chat(IN_THOUGHT, **fields).choices[0].message
    assert message.reasoning_content
    assert not message.content
    chunks = list(api.chat(IN_THOUGHT, stream=True, **fields))
    assert content_of(chunks, "reasoning_content") == message.reasoning_content
    assert content_of(chunks) == ""
