"""Grammars of forced calls: what they let through is parsed as a call with valid arguments."""

import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.protocol.config import Config
from penstock.protocol.messages.chat import Message
from penstock.protocol.messages.structured import MAX_GRAMMAR_BYTES
from penstock.services.http.generation import tool_grammar
from penstock.services.http.generation.argument_values import permitted_types
from penstock.services.http.generation.schema import ChatRequest, Function, Tool
from penstock.services.http.generation.tool_calls import make_parser
from penstock.services.http.generation.tool_grammar import call_grammar, forced_call, unsuitable
from penstock.services.http.shared.app_state import ToolFormat
from penstock.services.http.shared.errors import ApiError
from tests.services.http.generation.test_tool_calls import Answer, parameter
from tests.services.http.generation.tool_call_texts import FORMATS

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "$defs": {"Point": POINT},
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "mode": {"type": "string", "enum": ["fast", "two\nlines"]},
        "point": {"$ref": "#/$defs/Point"},
    },
    "required": ["code"],
    "additionalProperties": False,
}
ANY = Function(name="any")
DRAW = Function(name='draw "it"', parameters=SCHEMA)
NAMES: dict[str, Any] = {form: ToolFormat(form) for form in FORMATS}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """Return the demo model's tokenizer: a token is a byte."""
    return LLTokenizer(str(Config().model_folder / "tokenizer.json"))


def num_accepted(tokenizer: LLTokenizer, grammar: str, text: str) -> int:
    """Return the number of bytes that a grammar lets through; len + 1 if the text may end there."""
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    number = matcher.try_consume_tokens(list(data))
    return number + (number == len(data) and matcher.is_accepting())


def written(form: str, function: Function, arguments: dict[str, Any]) -> str:
    if form != "qwen3_coder":
        body = json.dumps({"name": function.name, "arguments": arguments})
        return body if form == "json" else f"<tool_call>\n{body}\n</tool_call>"
    values = {k: one if isinstance(one, str) else json.dumps(one) for k, one in arguments.items()}
    body = "".join(parameter(*item) for item in values.items())
    return f"<tool_call>\n<function={function.name}>\n{body}</function>\n</tool_call>"


def parsed(form: str, text: str, *functions: Function) -> list[tuple[str | None, Any]]:
    schemas = {one.name: one.parameters or {} for one in functions}
    parser = make_parser(NAMES[form].name, schemas, is_forced=True)
    answer = Answer([*parser.feed(text), *parser.finish()])
    assert not answer.text
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"code": ""},
        {"code": "if a < b:\n\tprint('}')\n", "mode": "two\nlines"},
        {"code": "</parameter>\n<a></parameter>\n</function>\n<parameter=b>\n"},
        {"code": "x", "point": {"x": -5}},
    ],
)
def test_calls_are_let_through(
    tokenizer: LLTokenizer, form: str, arguments: dict[str, Any]
) -> None:
    grammar = call_grammar(NAMES[form], [ANY, DRAW], is_one=True)
    text = written(form, DRAW, arguments)
    assert num_accepted(tokenizer, grammar, text) == len(text.encode()) + 1
    assert parsed(form, text, ANY, DRAW) == [(DRAW.name, arguments)]
    jsonschema.validate(arguments, SCHEMA)
    assert num_accepted(tokenizer, grammar, f"{text}\n") == len(text.encode())
    assert num_accepted(tokenizer, grammar, f"\n\n{text}") == len(text.encode()) + 3
    several = call_grammar(NAMES[form], [ANY, DRAW], is_one=False)
    text = f"{text}\n{written(form, ANY, {'key': 'value'})}"
    assert num_accepted(tokenizer, several, text) == len(text.encode()) + 1
    assert parsed(form, text, ANY, DRAW)[1] == ("any", {"key": "value"})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": "x", "mode": "slow"}, {"code": "x", "point": {"y": 1}}, {"code": "x", "z": "1"}],
)
def test_other_calls_are_not(tokenizer: LLTokenizer, form: str, arguments: dict[str, Any]) -> None:
    grammar = call_grammar(NAMES[form], [ANY, DRAW], is_one=True)
    text = written(form, DRAW, arguments)
    assert num_accepted(tokenizer, grammar, text) < len(text)


@pytest.mark.parametrize("schema", [{"properties": {}}, {"additionalProperties": False}])
def test_a_function_without_arguments_gets_none(
    tokenizer: LLTokenizer, schema: dict[str, Any]
) -> None:
    """A model that may write parameters of any name may never end."""
    function = Function(name="now", parameters={"type": "object"} | schema)
    grammar = call_grammar(NAMES["qwen3_coder"], [function], is_one=True)
    text = written("qwen3_coder", function, {})
    assert num_accepted(tokenizer, grammar, text) == len(text) + 1
    text = written("qwen3_coder", function, {"a": "1"})
    assert num_accepted(tokenizer, grammar, text) < len(text)


@pytest.mark.parametrize("length", [0, 5])
def test_lengths_in_xml(tokenizer: LLTokenizer, length: int) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}}}
    function = Function(name="f", parameters=schema | {"required": ["s"]})
    grammar = call_grammar(NAMES["qwen3_coder"], [function], is_one=True)
    text = written("qwen3_coder", function, {"s": "x" * length})
    assert num_accepted(tokenizer, grammar, text) == len(text) + 1
    text = written("qwen3_coder", function, {"s": "x" * 6})
    assert num_accepted(tokenizer, grammar, text) < len(text)


@pytest.mark.parametrize(
    ("parts", "good", "bad"),
    [
        ([{"type": "string", "enum": ["a", "bc"]}, {"type": "null"}], ["a", "bc", None], ["b", 5]),
        ([{"type": "string", "maxLength": 2}, {"const": 12345}], ["", "xx", 12345], ["xxx", 1234]),
        ([{"anyOf": [{"const": "x"}, {"type": "boolean"}]}, {"const": 3}], [True, 3], ["y", 4]),
        ([{"type": "string"}, {"const": 3}], ["x", 3, 4], []),
        ([True, {"type": "string", "maxLength": 0}], ["", 3], ["x"]),
    ],
)
def test_unions_with_strings_in_xml(
    tokenizer: LLTokenizer, parts: list[Any], good: list[Any], bad: list[Any]
) -> None:
    """Optional texts are written so: each alternative is enforced."""
    schema = {"type": "object", "properties": {"s": {"anyOf": parts}}, "required": ["s"]}
    function = Function(name="f", parameters=schema)
    grammar = call_grammar(NAMES["qwen3_coder"], [function], is_one=True)
    for value in good:
        text = written("qwen3_coder", function, {"s": value})
        assert num_accepted(tokenizer, grammar, text) == len(text) + 1
    for value in bad:
        text = written("qwen3_coder", function, {"s": value})
        assert num_accepted(tokenizer, grammar, text) < len(text)


def with_property(schema: Any, name: str = "p", **fields: Any) -> Function:
    return Function(name="f", parameters={"properties": {name: schema}} | fields)


PATTERN = {"type": "string", "pattern": "a"}
INNER = {"P": {"properties": {"q": {"const": "\n</parameter>"}}}}
UNSUITABLE: list[tuple[str, Function, str | None]] = [
    ("hermes", Function(name="f", parameters={"type": "array"}), "parameters.type"),
    ("json", Function(name="f", parameters={"type": "string"}), "parameters.type"),
    ("qwen3_coder", Function(name="a>b"), "name"),
    ("qwen3_coder", Function(name="f", parameters={"$ref": "#/$defs/x"}), "parameters"),
    ("qwen3_coder", with_property(PATTERN), "parameters.properties.p.pattern"),
    (
        "qwen3_coder",
        with_property({"anyOf": [PATTERN]}),
        "parameters.properties.p.anyOf[0].pattern",
    ),
    ("hermes", Function(name="a>b", parameters=SCHEMA), None),
    ("qwen3_coder", with_property({"const": "a\n</parameter>"}), "parameters.properties.p"),
    ("qwen3_coder", with_property({"enum": ["", "\n</parameter>\n"]}), "parameters.properties.p"),
    ("qwen3_coder", with_property({"enum": ["a</parameter>", "\n<parameter=b"]}), None),
    ("qwen3_coder", with_property({"$ref": "#/$defs/P"}, **{"$defs": INNER}), "parameters.$defs"),
    ("qwen3_coder", with_property({"type": "string"}, "a>b"), "parameters.properties"),
    ("hermes", with_property({"const": "</parameter>"}), None),
    *(
        ("qwen3_coder", with_property({}, **malformed), f"parameters.{next(iter(malformed))}")
        for malformed in ({"properties": None}, {"properties": "a"}, {"required": 1})
    ),
]


class Uncomparable(str):
    """A part of a schema whose comparison would take long."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        raise AssertionError


def test_tools_are_not_compared_with_one_another() -> None:
    """128 tools with large schemas would block the server for seconds."""
    schemas = [{"type": "string", "description": Uncomparable(n)} for n in range(2)]
    tools = [Tool(type="function", function=with_property(schema)) for schema in schemas]
    messages = [Message(role="user", content="a")]
    request = ChatRequest(messages=messages, tools=tools, tool_choice="required")
    assert forced_call(request, NAMES["qwen3_coder"])


def test_nested_alternatives_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte of alternatives within one another blocked the server for ten seconds."""
    seen: list[Any] = []

    def noted(schema: Any) -> set[str]:
        seen.append(schema)
        return permitted_types(schema)

    monkeypatch.setattr(tool_grammar, "permitted_types", noted)
    nested: dict[str, Any] = {"type": "string", "maxLength": 1}
    for _ in range(6):
        nested = {"anyOf": [nested, {"anyOf": [nested]}]}
    permits, alternatives = tool_grammar._parts(nested)
    assert permits
    assert len(seen) == len(alternatives) == 2**6


@pytest.mark.parametrize("form", FORMATS)
def test_a_grammar_beyond_the_limit_does_not_grow_with_further_functions(form: str) -> None:
    large = with_property({"enum": ["x" * MAX_GRAMMAR_BYTES]})
    one, nine = (call_grammar(NAMES[form], [large] * n, is_one=True) for n in (1, 9))
    assert MAX_GRAMMAR_BYTES < len(one) < len(nine) < 2 * len(one)


@pytest.mark.parametrize(("form", "function", "field"), UNSUITABLE)
def test_functions_that_the_form_can_not_write(form: str, function: Function, field: Any) -> None:
    problem = unsuitable(NAMES[form], function)
    assert (problem and problem[0]) == field
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    request = msgspec.convert(
        msgspec.to_builtins(fields) | {"messages": [{"role": "user", "content": "a"}]}, ChatRequest
    )
    if field:
        with pytest.raises(ApiError, match=re.escape(f"tools[0].function.{field}: got")):
            forced_call(request, NAMES[form])
