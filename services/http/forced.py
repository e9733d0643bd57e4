"""Tool calls that must be made, as a grammar of the answer."""

import msgspec

from penstock.services.http.errors import ApiError
from penstock.services.http.schema import ChatRequest, Function, NamedTool

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""as Qwen3 was trained to write: models that may write any space write many"""


def forced_call(request: ChatRequest, tags_are_tokens: bool) -> str | None:
    """A Lark grammar in llguidance's dialect: Hermes's form of one call, or, where any function
    will do and calls may be parallel, of several. None where the model is free. Raises ApiError.

    tags_are_tokens: the vocabulary has `<tool_call>`; for llguidance such a token is no text.
    """
    choice, functions = request.tool_choice, [tool.function for tool in request.tools]
    if choice in ("none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one.name == choice.function.name]
        if not functions:
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
