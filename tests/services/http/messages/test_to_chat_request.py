"""Anthropic's requests: their schema, what becomes of them, and what is refused."""

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.chat import chat_messages
from penstock.services.http.generation.schema import ChatRequest, NamedTool
from penstock.services.http.generation.to_generate_request import chat_fields
from penstock.services.http.messages import (
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    chat_request,
    name_in_messages,
)
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ApiError, fields_as_sent
from tests.search import scaled

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SEARCH = {"name": "web_search", "type": "web_search_20250305", "max_uses": 3}
RESULT = {"type": "tool_result", "tool_use_id": "call_1"}
CALL = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}


def decoded(messages: Any = HELLO, **fields: Any) -> MessagesRequest:
    body = msgspec.json.encode({"max_tokens": 9, "messages": messages} | fields)
    return decode_body(body, MessagesRequest)


def chat(messages: Any = HELLO, **fields: Any) -> ChatRequest:
    """Return the OpenAI request for a body."""
    return chat_request(decoded(messages, **fields), 4096)


def templated(messages: Any = HELLO, **fields: Any) -> Any:
    """Return the messages that the chat template gets."""
    return msgspec.to_builtins(chat_messages(chat(messages, **fields).messages))


def refusal(messages: Any = HELLO, **fields: Any) -> str:
    """Return the sentence that refuses a body."""
    with pytest.raises(ApiError) as raised:
        request = decoded(messages, **fields)
        asked = chat_request(request, 4096)
        with fields_as_sent(partial(name_in_messages, request)):
            chat_fields(asked)
    assert raised.value.status == 400
    return str(raised.value)


def test_a_conversation_with_tools() -> None:
    no_way = [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1", "cache_control": {}}]},
        {"role": "user", "content": "please"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "add them", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "well", "citations": None},
                CALL,
                CALL | {"id": "call_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                RESULT | {"content": "2"},
                RESULT | {"tool_use_id": "call_2", "content": no_way, "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "system", "content": "be quick"},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert templated(messages, system=[{"type": "text", "text": "be kind"}]) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "1+1\nplease"},
        {
            "role": "assistant",
            "content": "well",
            "reasoning_content": "add them",
            "tool_calls": [{"id": "call_1"} | call, {"id": "call_2"} | call],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        {"role": "tool", "content": "Error: no\nway", "tool_call_id": "call_2"},
        {"role": "user", "content": "so?"},
        {"role": "system", "content": "be quick"},
    ]


def test_fields() -> None:
    asked = chat(
        max_tokens=100_000,
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        stream=True,
        stop_sequences=["a", "b"],
        metadata={"user_id": "x"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[ADD | {"type": "custom", "cache_control": {}, "defer_loading": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        context_management={"edits": []},
        container=None,
    )
    assert (asked.max_tokens, asked.temperature, asked.top_k, asked.top_p) == (4096, 0.5, 5, 0.5)
    assert (asked.stop, asked.stream, asked.tool_choice) == (["a", "b"], True, "auto")
    assert not asked.parallel_tool_calls
    (tool,) = chat_fields(asked)["tools"]
    given = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert tool == {"type": "function", "function": given}


def test_tools_that_a_server_would_run_are_left_out() -> None:
    types = ["bash_20250124", "text_editor_20250728", "code_execution_20250825", "mcp_toolset"]
    asked = chat(tools=[SEARCH, ADD, *({"type": kind} for kind in types)])
    assert [tool.function.name for tool in asked.tools] == ["add"]
    assert chat(tools=[SEARCH], tool_choice={"type": "auto"}).tools == []
    same = ADD | {"name": "web_search"}
    choice = {"type": "tool", "name": "web_search"}
    assert isinstance(chat(tools=[SEARCH, same], tool_choice=choice).tool_choice, NamedTool)


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "adaptive", "display": "summarized"}, True),
        ({"type": "between_tools"}, True),
    ],
)
def test_thinking(thinking: Any, thinks: bool) -> None:
    """Clients that do not ask for thinking do not expect its blocks."""
    asked = chat(thinking=thinking)
    assert asked.chat_template_kwargs == {"enable_thinking": thinks}
    assert asked.reasoning_effort is None
    effort = chat(thinking=thinking, output_config={"effort": "max"})
    kwargs = {"enable_thinking": thinks, "reasoning_effort": "max"}
    assert chat_fields(effort)["chat_template_kwargs"] == kwargs
    assert asked.include_reasoning == thinks


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    asked = chat(tools=[ADD], tool_choice=choice)
    assert msgspec.to_builtins(asked.tool_choice) == expected
    assert asked.parallel_tool_calls


def test_an_answer_of_the_client_is_continued() -> None:
    assert not chat().continue_final_message
    assert chat([*HELLO, {"role": "assistant", "content": "well,"}]).continue_final_message


def test_the_billing_block_is_left_out() -> None:
    """The block differs in every request: no prompt would be found in the prefix cache."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0f3a;"}
    system = [billing, {"type": "text", "text": "be kind"}, {"type": "text", "text": "always"}]
    assert templated(system=system)[0] == {"role": "system", "content": "be kind\nalways"}
    assert templated(system=[billing]) == templated(system="") == HELLO


def test_a_call_that_was_not_json_comes_back_as_it_was() -> None:
    call = CALL | {"input": {"INVALID_JSON": '{"a": '}}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [RESULT]}]
    assistant, tool = templated(turns)
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"a": '
    assert tool == {"role": "tool", "content": "", "tool_call_id": "call_1"}


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_output_format(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    fields = {name: form if name == "output_format" else {"format": form, "effort": "high"}}
    structured = chat_fields(chat(**fields))["structured_outputs"]
    assert structured.json == schema


IMAGE = {"type": "image", "source": {}}
BAD_ADD = ADD | {"input_schema": {"type": "array"}}
ANY = {"type": "any"}


def said(role: str, *content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: got nothing"),
        ({"messages": []}, "messages: got []"),
        ({"max_token": 1}, "max_token: got an unknown field; did you mean `max_tokens`?"),
        ({"container": "x"}, "container: got 'x', expected null"),
        ({"seed": 1}, "seed: got 1, expected null"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: got [{"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: got ''"),
        ({"top_p": 2}, "top_p: got 2"),
        ({"thinking": {"type": "maybe"}}, "thinking.type: got 'maybe', expected 'adaptive' or"),
        (said("user", IMAGE), "messages[0].content[0].type: got 'image', expected 'text' or"),
        (
            said("user", RESULT | {"content": [IMAGE]}),
            "messages[0].content[0].content[0].type: got 'image', expected 'text'",
        ),
        (said("assistant", RESULT), "messages[0].content[0].type: got 'tool_result', expected"),
        (said("assistant", CALL), "messages: got tool_use at the end, expected its tool_result"),
        (
            {"tools": [SEARCH, {"name": "x", "type": "surprise_20250305"}]},
            "tools[1].type: got 'surprise_20250305', expected 'custom', or a tool that may be left",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: got nothing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name: got nothing"),
        (
            {"tools": [SEARCH], "tool_choice": ANY},
            "tool_choice: got 'any', expected 'auto' or 'none': Penstock does not run tools "
            "of type web_search_20250305",
        ),
        (
            {"tools": [ADD, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice: got 'web_search', expected 'auto' or 'none': Penstock does not run",
        ),
        ({"tool_choice": ANY}, "tool_choice: got 'required' without tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: got nothing"),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
            "tool_choice: got 'sub', expected a function of tools",
        ),
        ({"tools": [BAD_ADD], "tool_choice": ANY}, "tools[0].input_schema.type: got 'array'"),
        ({"tools": [SEARCH, BAD_ADD], "tool_choice": ANY}, "tools[1].input_schema.type: got"),
    ],
)
def test_refusals(fields: dict[str, Any], sentence: str) -> None:
    assert refusal(**fields).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("stop", "stop_sequences"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("tools[3].function.parameters", "tools[3].input_schema"),
        ("tools[3].function.parameters.type", "tools[3].input_schema.type"),
        ("tools[3].function.name", "tools[3].name"),
        ("messages", "messages"),
    ],
)
def test_names_of_fields(name: str, sent: str) -> None:
    request = MessagesRequest(max_tokens=1, messages=[], tools=[MessagesTool(name="f")] * 4)
    assert name_in_messages(request, name) == sent


WORDS = ["text", "tool_use", "tool_result", "thinking", "image", "user", "assistant", "system"]
KEYS = ["type", "role", "content", "text", "thinking", "input", "name", "id", "tool_use_id"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from([one for one in CountTokensRequest.__struct_fields__ if one != "messages"])


@pytest.mark.search
@settings(max_examples=scaled(100), suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=3),
    st.dictionaries(FIELDS, VALUES, max_size=3),
)
def test_hostile_bodies_are_refused_by_a_sentence(messages: Any, fields: Any) -> None:
    turns = [{"role": "user", "content": "x"} | one for one in messages]
    try:
        chat_fields(chat(turns, **fields))
    except ApiError as error:
        assert error.status == 400
        assert str(error)


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [CALL | {"id": one} for one in ids]}


def results(*ids: str) -> dict[str, Any]:
    content = [{"type": "tool_result", "tool_use_id": one} for one in ids]
    return {"role": "user", "content": content}


OK = {"role": "assistant", "content": "ok"}
LAST = "expected the id of a tool_use in the assistant's last message, once"


@pytest.mark.parametrize(
    ("messages", "place", "sentence"),
    [
        ([results("a")], "messages[0].content[0].tool_use_id: got 'a'", LAST),
        (
            [*HELLO, calls("a", "b"), results("b", "c")],
            "messages[2].content[1].tool_use_id: got 'c'",
            LAST,
        ),
        ([calls("a"), results("a", "a")], "messages[1].content[1].tool_use_id: got 'a'", LAST),
        (
            [calls("a"), results("a"), OK, results("a")],
            "messages[3].content[0].tool_use_id: got 'a'",
            LAST,
        ),
        (
            [calls("a", "b"), results("b"), OK],
            "messages[0].content[0].id: got 'a'",
            "expected its tool_result in the user's next",
        ),
        (
            [calls("a"), *HELLO, OK],
            "messages[0].content[0].id: got 'a'",
            "expected its tool_result",
        ),
        ([calls("a", "a")], "messages[0].content[1].id: got 'a' again", "expected another id"),
        ([*HELLO, calls("a", "b"), results("b")], "messages: got 'a'", "expected one tool message"),
    ],
)
def test_a_call_has_one_result(messages: Any, place: str, sentence: str) -> None:
    assert refusal(messages).startswith(f"{place}, {sentence}")


def test_ids_of_calls_may_come_again() -> None:
    turns = [calls("a"), results("a"), calls("a", "b"), results("b"), results("a"), OK]
    roles = [one["role"] for one in templated(turns)]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
