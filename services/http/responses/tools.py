"""Tools of `/v1/responses`: functions, those of namespaces included, under one name each."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import convert

from penstock.services.http.generation.schema import Function, Tool
from penstock.services.http.responses.schema import FunctionTool, NamespaceTool, ResponseTool
from penstock.services.http.shared.declined_tools import is_declined, report_declined
from penstock.services.http.shared.errors import invalid

MAX_FUNCTIONS = 1024  # of all namespaces
_TYPES = "'function' or 'namespace', or a tool that may be left out, such as 'web_search'"


class OfferedTools(NamedTuple):
    """Functions that the model sees, and what they are for the client."""

    # as in the request, without those that are left out
    kept: list[FunctionTool | NamespaceTool]
    functions: list[Tool]
    # path of each function in the request
    paths: list[str]
    # name that the model sees → namespace and name
    names: dict[str, tuple[str | None, str]]
    # types of the tools that are left out
    declined: list[str]


def model_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees."""
    return f"{namespace}.{name}" if namespace else name


def offer(tools: Iterable[ResponseTool]) -> OfferedTools:
    """Flatten namespaces, and leave out tools that this server does not run. Raises ApiError."""
    offered = OfferedTools([], [], [], {}, [])
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if is_declined(tool.type):
            offered.declined.append(tool.type)
        elif tool.type not in ("function", "namespace"):
            problem = f"got {tool.type!r:.60}, expected {_TYPES}; leave other tools out"
            raise invalid(f"{path}.type", problem)
        elif tool.name is None:
            raise invalid(f"{path}.name", "got nothing, expected a value; the field is required")
        elif tool.type == "function":
            function = convert(tool, FunctionTool, from_attributes=True)
            offered.kept.append(function)
            _add(offered, None, function, path)
        else:
            namespace = convert(tool, NamespaceTool, from_attributes=True)
            offered.kept.append(namespace)
            for place, function in enumerate(tool.tools):
                _add(offered, tool.name, function, f"{path}.tools[{place}]")
    report_declined(offered.declined)
    return offered


def _add(offered: OfferedTools, namespace: str | None, tool: FunctionTool, path: str) -> None:
    name = model_name(namespace, tool.name)
    if offered.names.setdefault(name, (namespace, tool.name)) != (namespace, tool.name):
        problem = f"got {tool.name!r}, expected another name: the model would see {name!r} twice"
        raise invalid(f"{path}.name", problem)
    if len(offered.functions) == MAX_FUNCTIONS:
        raise invalid("tools", f"got more than {MAX_FUNCTIONS} functions, which is the limit")
    function = Function(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    offered.functions.append(Tool(type="function", function=function))
    offered.paths.append(path)
