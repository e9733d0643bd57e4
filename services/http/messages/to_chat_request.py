"""Anthropic's requests as OpenAI's."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from penstock.protocol.messages.chat import FunctionCall, Message, ToolCall
from penstock.services.http.generation.schema import (
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from penstock.services.http.messages.schema import (
    AssistantBlock,
    AssistantTurn,
    CountTokensRequest,
    JsonOutputFormat,
    MessagesTool,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from penstock.services.http.shared.declined_tools import (
    is_declined,
    refuse_forced,
    report_declined,
)
from penstock.services.http.shared.errors import ApiError, invalid

# the only key of a call's input whose text is not a JSON object, as Anthropic recommends
INVALID_JSON = "INVALID_JSON"
# begins a block that Claude's tools add to `system`. It differs in every request, so nothing after
# it could be found in the prefix cache
_BILLING = "x-anthropic-billing-header:"
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


def chat_request(request: CountTokensRequest, max_model_len: int) -> ChatRequest:
    """Return the same request in OpenAI's form. Raises ApiError."""
    if request.thread is not None:
        sentence = "thread: got one, expected null: send the whole conversation"
        raise ApiError(400, sentence, "thread", "thread_unsupported_request")
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    max_tokens = max_model_len if request.max_tokens is None else request.max_tokens
    output_format = request.output_format
    if request.output_config and request.output_config.format:
        output_format = request.output_config.format
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_tokens=min(max_tokens, max_model_len),
        max_completion_tokens=None if max_tokens else 1,  # not part of the reply
        stream=request.stream,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop_sequences or None,
        tools=_tools(request),
        **_tool_choice(request),
        chat_template_kwargs={"enable_thinking": thinks},
        include_reasoning=thinks,
        continue_final_message=isinstance(request.messages[-1], AssistantTurn),
        response_format=_response_format(output_format) if output_format else None,
    )


def name_in_messages(request: CountTokensRequest, name: str) -> str:
    """Return Anthropic's name for a field of ChatRequest."""
    if found := re.match(r"tools\[(\d+)\](\.function)?", name):
        name = f"tools[{_kept(request)[int(found[1])]}]{name[found.end() :]}"
    return _NAMES.get(name, re.sub(r"^(tools\[\d+\])\.parameters", r"\1.input_schema", name))


def _messages(request: CountTokensRequest) -> list[Message]:
    """Return the conversation; successive messages of one role become one."""
    _check_calls(request.messages)
    system = [one for one in _blocks(request.system) if not one.text.startswith(_BILLING)]
    messages = [Message(role="system", content=_text(system))] if system else []
    for kind, turns in groupby(request.messages, type):
        blocks: list[Any] = [block for turn in turns for block in _blocks(turn.content)]
        if kind is AssistantTurn:
            messages.append(_assistant(blocks))
        else:
            messages += _inputs("system" if kind is SystemTurn else "user", blocks)
    if messages and messages[-1].tool_calls:
        raise invalid("messages", "got tool_use at the end, expected its tool_result after it")
    return messages


def _check_calls(turns: Sequence[UserTurn | AssistantTurn | SystemTurn]) -> None:
    """Raise ApiError unless each tool_use has one tool_result in the user's next message."""
    waiting = dict[str, str]()  # id of a call without a result → its path
    for number, turn in enumerate(turns):
        follows_user = number > 0 and isinstance(turns[number - 1], UserTurn)
        if waiting and isinstance(turn, AssistantTurn) and follows_user:
            name, path = next(iter(waiting.items()))
            problem = f"got {name!r:.200}, expected its tool_result in the user's next message"
            raise invalid(f"{path}.id", problem)
        for place, block in enumerate(_blocks(turn.content)):
            path = f"messages[{number}].content[{place}]"
            if isinstance(block, ToolUseBlock):
                if block.id in waiting:
                    raise invalid(f"{path}.id", f"got {block.id!r:.200} again, expected another id")
                waiting[block.id] = path
            elif isinstance(block, ToolResultBlock) and not waiting.pop(block.tool_use_id, None):
                problem = "expected the id of a tool_use in the assistant's last message, once"
                raise invalid(f"{path}.tool_use_id", f"got {block.tool_use_id!r:.200}, {problem}")


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    if isinstance(content, str):
        return [TextBlock(text=content)] if content else []
    return content


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(one.text for one in blocks)


def _assistant(blocks: list[AssistantBlock]) -> Message:
    calls = [one for one in blocks if isinstance(one, ToolUseBlock)]
    thoughts = [one.thinking for one in blocks if isinstance(one, ThinkingBlock)]
    return Message(
        role="assistant",
        content=_text(one for one in blocks if isinstance(one, TextBlock)),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=[_call(one) for one in calls] or None,
    )


def _call(block: ToolUseBlock) -> ToolCall:
    given = block.input
    text = given.get(INVALID_JSON) if len(given) == 1 else None
    arguments = text if isinstance(text, str) else given
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def _inputs(role: Any, blocks: list[TextBlock | ToolResultBlock]) -> list[Message]:
    """Return messages for text and results of calls, in their order."""
    messages = []
    for _, group in groupby(blocks, type):
        same = list(group)
        messages += [_result(one) for one in same if isinstance(one, ToolResultBlock)]
        if texts := [one for one in same if isinstance(one, TextBlock)]:
            messages.append(Message(role=role, content=_text(texts)))
    return messages or [Message(role=role, content="")]


def _result(block: ToolResultBlock) -> Message:
    text = _text(_blocks(block.content or ""))
    if block.is_error:
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _tools(request: CountTokensRequest) -> list[Tool]:
    """Return the tools that the client executes. Raises ApiError for unknown and forced ones."""
    choice, kept = request.tool_choice, _kept(request)
    report_declined(tool.type or "" for tool in request.tools)
    if choice and choice.type in ("any", "tool"):
        forced = [
            tool for tool in request.tools if choice.type == "any" or tool.name == choice.name
        ]
        if all(is_declined(tool.type) for tool in forced):
            kinds = (tool.type or "" for tool in forced)
            refuse_forced("tool_choice", choice.name or choice.type, kinds)
    return [_tool(request.tools[number], f"tools[{number}]") for number in kept]


def _kept(request: CountTokensRequest) -> list[int]:
    """Return the numbers of the tools that are not left out."""
    return [number for number, tool in enumerate(request.tools) if not is_declined(tool.type)]


def _tool(tool: MessagesTool, path: str) -> Tool:
    if tool.type not in (None, "custom"):
        problem = "expected 'custom', or a tool that may be left out, such as 'web_search'"
        raise invalid(f"{path}.type", f"got {tool.type!r:.60}, {problem}; leave other tools out")
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            raise invalid(f"{path}.{field}", "got nothing, expected a value; the field is required")
    function = Function(
        name=tool.name or "",
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise invalid("tool_choice.name", "got nothing, expected the name of a tool")
    kinds = {"any": "required", "tool": NamedTool(function=FunctionName(name=choice.name or ""))}
    return {
        "tool_choice": kinds.get(choice.type, choice.type),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _response_format(given: JsonOutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema))
