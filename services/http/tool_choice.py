"""Tool calls that must be made, as a grammar of the answer."""

import msgspec

from penstock.services.http.errors import ApiError
from penstock.services.http.schema import AllowedTools, ChatRequest, Function, NamedTool, Tool

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""as Qwen3 was trained to write: models that may write any space write many"""


def forced_call(request: ChatRequest, tags_are_tokens: bool) -> str | None:
    """A Lark grammar in llguidance's dialect: Hermes's form of one call, or, where any function
    will do and calls may be parallel, of several. None where the model is free. Raises ApiError.

    tags_are_tokens: the vocabulary has `<tool_call>`; for llguidance such a token is no text.
    """
    choice = request.tool_choice
    if not is_forced(request):
        return None
    functions = [tool.function for tool in forced_tools(request)]
    if not functions and isinstance(choice, NamedTool):
        name = choice.function.name
        raise ApiError(400, f"tool_choice is {name!r}, which is not in tools", "tool_choice")
    if not functions:
        raise ApiError(400, f"tool_choice is {choice!r}, and there are no tools", "tool_choice")
    is_one = isinstance(choice, NamedTool) or not request.parallel_tool_calls
    calls = {"x-guidance": _SPACES, "anyOf": [_call_schema(one) for one in functions]}
    schema = msgspec.json.encode(calls).decode()
    tags = (
        ("<tool_call>", "</tool_call>") if tags_are_tokens else ('"<tool_call>"', '"</tool_call>"')
    )
    return "\n".join(
        (
            "start: tool_call" if is_one else 'start: tool_call ("\\n" tool_call)*',
            f'tool_call: {tags[0]} "\\n" call "\\n" {tags[1]}',
            f"call: %json {schema}",
        )
    )


def is_forced(request: ChatRequest) -> bool:
    """Whether the model must call a function."""
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice not in ("none", "auto")


def offered_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model sees: those of `allowed_tools`, or all. Raises ApiError."""
    choice = request.tool_choice
    if not isinstance(choice, AllowedTools):
        return [] if choice == "none" else request.tools
    names = [one.function.name for one in choice.allowed_tools.tools]
    known = {tool.function.name for tool in request.tools}
    for number, name in enumerate(names):
        if name not in known:
            path = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise ApiError(400, f"{path}: got {name!r}, which is not in tools", path)
    return [tool for tool in request.tools if tool.function.name in names]


def forced_tools(request: ChatRequest) -> list[Tool]:
    """The tools of which one must be called, where a call is forced. Raises ApiError."""
    choice, tools = request.tool_choice, offered_tools(request)
    if isinstance(choice, NamedTool):
        return [one for one in tools if one.function.name == choice.function.name]
    return tools


def _call_schema(function: Function) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
