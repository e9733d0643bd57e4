"""Tool choice: the tools that a model sees, and the grammar of a call that it must make."""

import msgspec

from penstock.services.http.errors import invalid
from penstock.services.http.schema import AllowedTools, ChatRequest, Function, NamedTool, Tool

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""as Qwen3 was trained to write: with free white space, models write a lot of it"""


def forced_call(request: ChatRequest, tags_are_tokens: bool) -> str | None:
    """Return a Lark grammar in llguidance's dialect; None if the model need not call a function.

    The grammar is Hermes's form of one call, or of several where any function may be called and
    calls may be parallel. tags_are_tokens: the vocabulary has `<tool_call>`, which llguidance does
    not treat as text. Raises ApiError.
    """
    choice = request.tool_choice
    if not is_forced(request):
        return None
    functions = [tool.function for tool in forced_tools(request)]
    if not functions and isinstance(choice, NamedTool):
        raise invalid("tool_choice", f"got {choice.function.name!r}, expected a function of tools")
    if not functions:
        raise invalid("tool_choice", f"got {choice!r} without tools; send tools, too")
    is_one = isinstance(choice, NamedTool) or not request.parallel_tool_calls
    calls = {"x-guidance": _SPACES, "anyOf": [_call_schema(one) for one in functions]}
    schema = msgspec.json.encode(calls).decode()
    quote = "" if tags_are_tokens else '"'
    opening, closing = (f"{quote}{tag}{quote}" for tag in ("<tool_call>", "</tool_call>"))
    return "\n".join(
        (
            "start: tool_call" if is_one else 'start: tool_call ("\\n" tool_call)*',
            f'tool_call: {opening} "\\n" call "\\n" {closing}',
            f"call: %json {schema}",
        )
    )


def is_forced(request: ChatRequest) -> bool:
    """Return whether the model must call a function."""
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice not in ("none", "auto")


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools that the model sees. Raises ApiError."""
    choice = request.tool_choice
    if not isinstance(choice, AllowedTools):
        return [] if choice == "none" else request.tools
    names = [one.function.name for one in choice.allowed_tools.tools]
    known = {tool.function.name for tool in request.tools}
    for number, name in enumerate(names):
        if name not in known:
            path = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise invalid(path, f"got {name!r}, expected a function of tools")
    return [tool for tool in request.tools if tool.function.name in names]


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools of which one must be called, if a call is forced. Raises ApiError."""
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
