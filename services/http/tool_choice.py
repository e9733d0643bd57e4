"""Tool choice: the tools that a model sees, and the grammar of a call that it must make."""

from penstock.services.http.errors import invalid
from penstock.services.http.schema import AllowedTools, ChatRequest, NamedTool, Tool
from penstock.services.http.tool_grammar import ToolFormat, call_grammar, unsuitable


def forced_call(request: ChatRequest, form: ToolFormat) -> str | None:
    """Return a grammar; None if the model need not call a function. Raises ApiError.

    The grammar is one call, or several where any function may be called and calls may be parallel.
    """
    choice = request.tool_choice
    if not is_forced(request):
        return None
    functions = [tool.function for tool in forced_tools(request)]
    if not functions and isinstance(choice, NamedTool):
        raise invalid("tool_choice", f"got {choice.function.name!r}, expected a function of tools")
    if not functions:
        raise invalid("tool_choice", f"got {choice!r} without tools; send tools, too")
    for number, tool in enumerate(request.tools):
        if tool.function in functions and (problem := unsuitable(form, tool.function)):
            raise invalid(f"tools[{number}].function.{problem[0]}", problem[1])
    is_one = isinstance(choice, NamedTool) or not request.parallel_tool_calls
    return call_grammar(form, functions, is_one)


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
