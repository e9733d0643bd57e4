"""Constraints on answers, and tools that the model sees and must call."""

from typing import Any

import pytest

from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.generation.to_generate_request import (
    chat_fields,
    completion_fields,
    name_as_sent,
)
from penstock.services.http.shared.app_state import ToolFormat
from penstock.services.http.shared.errors import ApiError, as_api_error, fields_as_sent
from tests.services.http.generation.test_to_generate_request import chat, completion, refusal

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARGE = {"title": "a" * 100_000}
LARGE_TOOL = {"type": "function", "function": {"name": "f", "parameters": LARGE}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            StructuredOutputs(json=SCHEMA),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=["a", "b"])),
        ({"guided_grammar": "start: A"}, StructuredOutputs(grammar="start: A")),
        ({"structured_outputs": {"regex": "a"}}, StructuredOutputs(regex="a")),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"json_schema": '{"type": "object"}'}, StructuredOutputs(json='{"type": "object"}')),
    ],
)
def test_structured_outputs(given: dict[str, Any], expected: StructuredOutputs | None) -> None:
    assert chat_fields(chat(**given))["structured_outputs"] == expected
    assert completion_fields(completion(**given))["structured_outputs"] == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice: got guided_regex with another value, too; send one of them",
        ),
        (
            {"guided_json": {"const": 1}, "json_schema": {"const": True}},
            "json_schema: got guided_json with another value, too; send one of them",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema: got",
        ),
        ({"guided_json": 1.5}, "guided_json: got 1.5, expected a JSON schema, a map"),
        ({"guided_json": False}, "guided_json: got False, expected a JSON schema, a map"),
        ({"guided_json": "{"}, "guided_json: got '{', expected a JSON schema, a map or its text"),
        ({"guided_regex": ""}, "guided_regex: got '', expected `str` of length >= 1"),
        ({"guided_choice": []}, "guided_choice: got [], expected `array` of length >= 1"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
            "response_format.json_schema.schema: got 100012 bytes, expected up to",
        ),
        ({"tools": [LARGE_TOOL], "tool_choice": "required"}, "tools[0].function.parameters: got"),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice: got a forced call and a structured output; send one",
        ),
    ],
)
def test_what_is_no_grammar_is_refused(given: dict[str, Any], sentence: str) -> None:
    error = refusal(chat_fields, chat(**given))
    assert error.status == 400
    assert error.body.error.message.startswith(sentence)
    assert error.body.error.param == sentence.partition(":")[0]


@pytest.mark.parametrize(
    "given",
    [
        {"guided_grammar": "start: /a/", "structured_outputs": {"grammar": "start: /a/"}},
        {"guided_json": '{"const": 1, "title": "a"}', "json_schema": {"title": "a", "const": 1}},
        {"guided_regex": "a", "regex": "a", "structured_outputs": {"regex": "a"}},
        {
            "guided_json": SCHEMA,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ],
)
def test_two_fields_may_say_the_same(given: dict[str, Any]) -> None:
    first = dict([next(iter(given.items()))])
    assert chat_fields(chat(**given)) == chat_fields(chat(**first))
    error = refusal(chat_fields, chat(**given, guided_choice=["b"])).body.error
    assert "with another value, too; send one of them" in error.message


def test_tools() -> None:
    assert chat_fields(chat(tools=[TOOL]))["tools"] == [TOOL]
    assert "tools" not in chat_fields(chat(tools=[TOOL], tool_choice="none"))
    assert chat_fields(chat(tools=[TOOL]))["structured_outputs"] is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_tools_are_a_grammar(choice: Any) -> None:
    grammar = chat_fields(chat(tools=[TOOL], tool_choice=choice))["structured_outputs"].grammar
    assert r'"{\"name\": \"f\"' in grammar
    assert "*" in grammar if choice == "required" else "*" not in grammar
    assert 'tool_call: "<tool_call>" "' in grammar
    form = ToolFormat(tags_are_tokens=True)
    grammar = chat_fields(chat(tools=[TOOL], tool_choice=choice), form)
    assert 'tool_call: <tool_call> "' in grammar["structured_outputs"].grammar


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_model_sees_only_allowed_tools() -> None:
    fields = chat_fields(chat(tools=[TOOL, ADD], tool_choice=allowed("auto", "add")))
    assert fields["tools"] == [ADD]
    assert fields["structured_outputs"] is None
    fields = chat_fields(chat(tools=[TOOL, ADD], tool_choice=allowed("required", "add")))
    assert fields["tools"] == [ADD]
    assert r"\"name\": \"add\"" in fields["structured_outputs"].grammar
    assert r"\"name\": \"f\"" not in fields["structured_outputs"].grammar
    both = chat_fields(chat(tools=[TOOL, ADD], tool_choice=allowed("required", "add", "f")))
    assert both["tools"] == [TOOL, ADD]


def test_errors_name_the_field_that_was_sent() -> None:
    """The gateway and the tokenizer know nothing of HTTP's names."""
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    function = {"type": "function", "function": {"name": "add"}}
    for given, path in (
        ({"response_format": schema}, "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [TOOL, ADD], "tool_choice": function}, "tools[1].function.parameters"),
        ({"tools": [TOOL, ADD], "tool_choice": "required"}, "tools"),
        (
            {"tools": [TOOL, ADD], "tool_choice": allowed("required", "add")},
            "tools[1].function.parameters",
        ),
    ):
        assert sent("structured_outputs", chat(**given)) == (path, f"{path}: got one (structured)")
    name = "max_completion_tokens"
    sentence = f"{name}: got one (structured)"
    assert sent("max_tokens", chat(max_completion_tokens=9)) == (name, sentence)


def sent(field: str, asked: ChatRequest) -> tuple[str | None, str]:
    """Return the field and the message of the gateway's error as the client sees them."""
    message = f"{field}: got one (structured)"
    error = RequestError(ErrorReply(code="invalid", message=message, field=field))
    with (
        pytest.raises((ApiError, RequestError)) as raised,
        fields_as_sent(lambda name: name_as_sent(name, asked)),
    ):
        raise error
    detail = as_api_error(raised.value).body.error
    return detail.param, detail.message
