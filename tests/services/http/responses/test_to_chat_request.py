"""Requests of the Responses API as chats, or a sentence that names the field."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from penstock.protocol.messages.chat import chat_messages
from penstock.services.http.generation.schema import AllowedTools, ChatRequest, NamedTool
from penstock.services.http.generation.to_generate_request import chat_fields
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.responses.to_chat_request import (
    chat_request,
    input_items,
    name_in_responses,
    offer,
)
from penstock.services.http.shared.body import FIELDS, decode_body
from penstock.services.http.shared.errors import ApiError, fields_as_sent

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
PARTS = [{"type": "reasoning_text", "text": "hm"}]
THOUGHT = {"type": "reasoning", "summary": [], "content": PARTS}


def decoded(**given: Any) -> ResponsesRequest:
    return decode_body(msgspec.json.encode({"input": "hi"} | given), ResponsesRequest)


def chat(**given: Any) -> ChatRequest:
    request = decoded(**given)
    return chat_request(request, input_items(request), offer(request.tools))


def messages(*items: Any, **fields: Any) -> list[Any]:
    """Return the messages of items as the chat template sees them."""
    return [msgspec.to_builtins(one) for one in chat_messages(chat(input=items, **fields).messages)]


def test_a_text_is_a_message_of_the_user() -> None:
    asked = chat(input="hi", instructions="be brief", max_output_tokens=9, top_k=3)
    assert [(one.role, one.content) for one in asked.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert (asked.max_tokens, asked.top_k, asked.logprobs) == (9, 3, False)


def test_parts_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}]
    refusal = [{"type": "refusal", "refusal": "no"}]
    assert messages(
        {"role": "developer", "content": parts},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": answer},
        {"role": "assistant", "content": refusal, "phase": "final_answer"},
        USER,
    ) == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
        USER,
    ]


def test_reasoning_text_and_calls_are_one_message() -> None:
    text = {"role": "assistant", "content": "so"}
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "c", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "c"}
    assert messages(USER, THOUGHT, text, CALL, OUTPUT) == [USER, answer, result]
    both = messages(USER, CALL, CALL | {"call_id": "d"}, OUTPUT | {"call_id": "d"}, OUTPUT)
    assert [one["role"] for one in both] == ["user", "assistant", "tool", "tool"]
    assert [one["id"] for one in both[1]["tool_calls"]] == ["c", "d"]
    assert [one["tool_call_id"] for one in both[2:]] == ["c", "d"]
    after = messages(USER, CALL, text, THOUGHT, CALL, OUTPUT)
    assert [one.get("content") for one in after] == ["hi", "", "so", "", "2"]


def test_tools_and_their_choice() -> None:
    asked = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert [tool.function.name for tool in asked.tools] == ["f"]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)
    named = chat(tools=[TOOL], tool_choice={"type": "function", "name": "f"}).tool_choice
    assert isinstance(named, NamedTool)
    assert named.function.name == "f"
    choice = chat(**forced(allowed("auto", {"type": "function", "name": "f"}))).tool_choice
    assert isinstance(choice, AllowedTools)
    assert choice.allowed_tools.tools == [named]


def test_forms_of_the_text() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    outputs = chat_fields(chat(text={"format": form}))["structured_outputs"]
    assert outputs.json == schema
    outputs = chat_fields(chat(text={"format": {"type": "json_object"}}))["structured_outputs"]
    assert outputs.json_object
    for text in ({}, {"format": None}, {"format": {"type": "text"}, "verbosity": "low"}):
        assert chat_fields(chat(text=text))["structured_outputs"] is None


def test_other_options() -> None:
    off = chat_fields(chat(reasoning={"effort": "none", "summary": "auto"}))
    assert off["chat_template_kwargs"] == {"enable_thinking": False}
    high = chat_fields(chat(reasoning={"effort": "high"}))
    assert high["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert chat_fields(chat(client_metadata={"turn_id": "x"}))
    assert chat_fields(chat(truncation="auto"))["truncate_prompt_tokens"] == -1
    assert chat_fields(chat(top_logprobs=0))["logprobs"] is None


def test_every_field_of_the_api_is_known() -> None:
    known = {*ResponsesRequest.__struct_fields__, *FIELDS.ignored, *FIELDS.neutral}
    assert not set(ResponseCreateParamsBase.__annotations__) - known


SPACE = {"type": "namespace", "name": "s", "description": "x", "tools": [TOOL]}
TOOL_TYPE = "tools[0].tools[0].type"
MANY = [TOOL | {"name": f"f{number}"} for number in range(128)]
ARRAY = TOOL | {"parameters": {"type": "array"}}
IMAGE = {"type": "input_image", "image_url": "x"}
DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]


def forced(choice: Any, *tools: Any) -> dict[str, Any]:
    return {"tools": tools or [TOOL], "tool_choice": choice}


def allowed(mode: str, tool: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [tool]}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": DEEP}, "input"),
        ({"input": [USER, {"type": "item_reference", "id": "m"}]}, "input[1].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input[0].content[0].text"),
        ({"input": [USER, OUTPUT]}, "input[1].call_id"),
        ({"input": [OUTPUT, CALL]}, "input[0].call_id"),
        ({"input": [CALL, {**OUTPUT, "output": None}]}, "input[1].output"),
        ({"input": [CALL, CALL | {"call_id": "d"}, OUTPUT]}, "input"),
        ({"input": [CALL, {**OUTPUT, "output": [IMAGE]}]}, "input[1].output[0].type"),
        ({"input": [{**CALL, "arguments": None}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": {"a": 1}}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}, {"type": "surprise"}]}, "tools[1].type"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [SPACE | {"tools": [{"type": "custom", "name": "f"}]}]}, TOOL_TYPE),
        ({"tools": [SPACE | {"tools": [SPACE]}]}, TOOL_TYPE),
        ({"tools": [SPACE | {"tools": [TOOL] * 129}]}, "tools[0].tools"),
        ({"tools": [SPACE | {"name": None}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "s.f"}, SPACE]}, "tools[1].tools[0].name"),
        ({"tools": [SPACE | {"name": f"s{n}", "tools": MANY} for n in range(9)]}, "tools"),
        (forced("required", {"type": "web_search"}), "tool_choice"),
        (forced({"type": "web_search_preview"}), "tool_choice.type"),
        (forced(allowed("required", {"type": "mcp", "server_label": "x"})), "tool_choice.mode"),
        (
            forced("required", {"type": "web_search"}, SPACE | {"tools": [ARRAY]}),
            "tools[1].tools[0].parameters.type",
        ),
        (forced({"type": "function", "name": "f"}, SPACE), "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": "f" * 129}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": "{}"}]}, "tools[0].parameters"),
        (forced({"type": "custom"}), "tool_choice.type"),
        (forced({"type": "function", "name": "g"}), "tool_choice"),
        (forced({"type": "allowed_tools"}), "tool_choice.mode"),
        (forced({"type": "allowed_tools", "mode": "auto"}), "tool_choice.tools"),
        (forced(allowed("auto", {"type": "function", "name": "g"})), "tool_choice.tools[0].name"),
        (forced("required", ARRAY), "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": "high"}, "reasoning"),
        ({"include": ["all"]}, "include[0]"),
        ({"truncation": "left"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"previous_response_id": "r" * 129}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"instruction": "x"}, "instruction"),
    ],
)
def test_errors_name_the_field(given: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        request = decoded(**given)
        tools = offer(request.tools)
        asked = chat_request(request, input_items(request), tools)
        with fields_as_sent(partial(name_in_responses, tools)):
            chat_fields(asked)
    assert caught.value.status == 400
    detail = caught.value.body.error
    assert detail.param == path, detail.message
    assert detail.message.startswith(f"{path}: ")
    assert len(json.dumps(detail.message)) < 3000
