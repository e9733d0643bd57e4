"""Tool choice: the tools that a model sees, and the grammar of a call that it must make.

Grammars are in llguidance's dialect of Lark, for each format of calls.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from penstock.protocol.messages.structured import MAX_GRAMMAR_BYTES, maps_in
from penstock.services.http.generation.argument_values import encoded, permitted_types
from penstock.services.http.generation.schema import (
    AllowedTools,
    ChatRequest,
    Function,
    NamedTool,
    Tool,
)
from penstock.services.http.generation.tool_call_readers import FORCED_VALUE_END
from penstock.services.http.shared.app_state import ToolFormat
from penstock.services.http.shared.errors import invalid

# Qwen3's style in training; models would generate much white space if it were free
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_END_VALUE = encoded(FORCED_VALUE_END)
# the empty line after `</think>`, as chat templates show it. Without it, the prompt of a later
# request would differ from this answer's tokens, so that the rest is not in the prefix cache.
_BEGIN = '"\\n\\n"?'


def forced_call(request: ChatRequest, form: ToolFormat) -> str | None:
    """Return the grammar of a forced call; None if no call is forced. Raises ApiError.

    The grammar is a call, or several calls if any function may be called and calls may be parallel.
    """
    choice = request.tool_choice
    if not is_forced(request):
        return None
    forced = forced_tools(request)
    functions = [tool.function for tool in forced]
    chosen = set(map(id, forced))  # comparing large schemas takes long
    if not functions and isinstance(choice, NamedTool):
        raise invalid("tool_choice", f"got {choice.function.name!r}, expected a function of tools")
    if not functions:
        raise invalid("tool_choice", f"got {choice!r} without tools; send tools, too")
    for number, tool in enumerate(request.tools):
        if id(tool) in chosen and (problem := unsuitable(form, tool.function)):
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
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    known = {tool.function.name for tool in request.tools}
    for number, name in enumerate(names):
        if name not in known:
            path = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise invalid(path, f"got {name!r}, expected a function of tools")
    return [tool for tool in request.tools if tool.function.name in names]


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools from which a forced call may choose. Raises ApiError."""
    choice, tools = request.tool_choice, offered_tools(request)
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools


def call_grammar(form: ToolFormat, functions: list[Function], is_one: bool) -> str:
    """Return the grammar of calls of the functions: one call if `is_one`, otherwise one or more."""
    is_xml = form.name == "qwen3_coder"
    rules: list[str] = []
    for number, function in enumerate(functions):
        if sum(map(len, rules)) <= MAX_GRAMMAR_BYTES:  # a longer grammar is refused
            rules += (_xml if is_xml else _json)(f"f{number}", function)
    call = "call: " + " | ".join(f"f{number}" for number in range(len(functions)))
    if is_xml:
        rules.append(f"text[suffix={_END_VALUE}]: /(?s:.*)/")
    tagged = "tool_call: call"
    if form.name != "json":
        quote = "" if form.tags_are_tokens else '"'
        opening, closing = (f"{quote}{tag}{quote}" for tag in ("<tool_call>", "</tool_call>"))
        tagged = f'tool_call: {opening} "\\n" call "\\n" {closing}'
    start = f"start: {_BEGIN} tool_call" + ("" if is_one else ' ("\\n" tool_call)*')
    return "\n".join([start, tagged, call, *rules])


def unsuitable(form: ToolFormat, function: Function) -> tuple[str, str] | None:
    """Return the field that this format's forced calls don't support, and the problem, or None."""
    schema = function.parameters or {}
    if schema.get("type", "object") != "object":
        return "parameters.type", f"got {schema['type']!r}, expected 'object'"
    if form.name != "qwen3_coder":
        return None
    if re.search(r"[<>\n]", function.name):
        return "name", f"got {function.name!r}, expected a name without <, > and line breaks"
    combined = [key for key in ("$ref", "anyOf", "oneOf", "allOf") if key in schema]
    if combined:
        return "parameters", f"got {combined[0]}, expected properties: each becomes a <parameter>"
    for name, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name, kind()), kind):
            expected = "an object" if kind is dict else "an array"
            return f"parameters.{name}", f"got {schema[name]!r:.60}, expected {expected}"
    for key, value in schema.get("properties", {}).items():
        for path, part in _parts(value)[1]:
            if (
                isinstance(part, Mapping)
                and "pattern" in part
                and "string" in permitted_types(part)
            ):
                return f"parameters.properties.{key}{path}.pattern", "got a pattern, expected none"
    return _unreadable(schema)


def _unreadable(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the field with a name or value that XmlReader would cut, and the problem, or None."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    for key in properties:
        if re.search(r"[<>\n]", key):
            problem = f"got {key!r}, expected a name without <, > and line breaks"
            return "parameters.properties", problem
    parts = {f"properties.{key}": value for key, value in properties.items()}
    parts |= {name: {name: schema[name]} for name in ("$defs", "definitions") if name in schema}
    for path, part in parts.items():
        texts = chain.from_iterable(map(_choices, maps_in(part)))
        if any(FORCED_VALUE_END in f"{text}\n" for text in texts):
            problem = "got a value with a line '</parameter>', which ends it; expected none"
            return f"parameters.{path}", problem
    return None


def _json(rule: str, function: Function) -> list[str]:
    """Return the rules of one function. Its schema stays the root, because references need it."""
    begin = encoded(f'{{"name": {encoded(function.name)}, "arguments": ')
    schema = {"type": "object", **(function.parameters or {}), "x-guidance": _SPACES}
    return [f'{rule}: {begin} {rule}_arguments "}}"', f"{rule}_arguments: %json {encoded(schema)}"]


def _xml(rule: str, function: Function) -> list[str]:
    """Return the rules of one function: its parameters in the schema's order."""
    schema = function.parameters or {}
    properties: Mapping[str, Any] = schema.get("properties", {})
    defs = {key: part for key, part in schema.items() if key in ("$defs", "definitions")}
    required = schema.get("required", ())
    parts, rules = [], []
    for number, (key, value) in enumerate(properties.items()):
        name = f"{rule}_p{number}"
        rules += _xml_parameter(name, key, value, defs)
        parts.append(name if key in required else f"{name}?")
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        parts.append('("<parameter=" /[^<>\\n]{1,64}/ ">\\n" text)*')
    head = encoded(f"<function={function.name}>\n")
    return [f'{rule}: {head} {" ".join(parts)} "</function>"', *rules]


def _xml_parameter(rule: str, key: str, schema: Any, defs: Mapping[str, Any]) -> list[str]:
    begin = f"{rule}: {encoded(f'<parameter={key}>' + chr(10))}"
    values, rules = [], []
    for number, (_, part) in enumerate(_parts(schema)[1]):
        value, *own = _xml_value(f"{rule}_v{number}", part, defs)
        if value == "text":  # any text
            return [f"{begin} text"]
        values.append(value)
        rules += own
    return [f"{begin} ({' | '.join(values)})", *rules]


def _xml_value(rule: str, schema: Any, defs: Mapping[str, Any]) -> list[str]:
    """Return the grammar's expression for a value with its end, followed by its rules."""
    if "string" not in permitted_types(schema):
        shaped = {"x-guidance": _SPACES, **defs, "allOf": [schema]}
        return [f"{rule} {_END_VALUE}", f"{rule}: %json {encoded(shaped)}"]
    choices = _choices(schema)
    if not choices and ("maxLength" in schema or "minLength" in schema):
        size = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        return [rule, f"{rule}[suffix={_END_VALUE}]: /(?s:.{{{size}}})/"]
    if not choices:
        return ["text"]
    return [f"({' | '.join(map(encoded, choices))}) {_END_VALUE}"]


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """Return the values of an enumeration in a schema, as texts of parameters."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = values if isinstance(values, list) else []
    return [value if isinstance(value, str) else encoded(value) for value in values]


def _parts(schema: Any, path: str = "") -> tuple[bool, list[tuple[str, Any]]]:
    """Return whether a schema permits strings; its alternatives if it does, with their paths."""
    parts, kind = None, ""
    if isinstance(schema, Mapping) and "type" not in schema:
        kind = "anyOf" if "anyOf" in schema else "oneOf"
        parts = schema.get(kind)
    if not isinstance(parts, list):
        return "string" in permitted_types(schema), [(path, schema)]
    found = [_parts(part, f"{path}.{kind}[{n}]") for n, part in enumerate(parts)]
    if not any(permits for permits, _ in found):
        return False, [(path, schema)]
    return True, [*chain.from_iterable(own for _, own in found)]
