"""Arguments that models write as text have a value that their schema permits."""

import ast
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.services.http.generation.argument_values import ArgumentSchema
from tests.search import scaled

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
DEFS = {
    "$defs": {"text": STRING, "number": INTEGER, "one": {"const": 1}, "list": {"type": "array"}}
}


def value_of(schema: Any, text: str) -> Any:
    root = {"type": "object", "properties": {"a": schema}, **DEFS}
    arguments = ArgumentSchema(root)
    return json.loads(arguments.value(arguments.of("a"), text))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # strings without a type of their own
        ({"$ref": "#/$defs/text"}, "5", "5"),
        ({"allOf": [STRING]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1.0"}, "1.0", "1.0"),
        ({"description": "a name"}, "007", "007"),
        ({}, "5", "5"),
        # unions with strings
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
        ({"anyOf": [STRING, {"type": "null"}]}, "None", None),
        ({"anyOf": [STRING, {"type": "null"}]}, "none", "none"),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [STRING, {"type": "array"}]}, "[a", "[a"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, INTEGER]}, "500", 500),
        ({"anyOf": [{"type": "object", "required": ["x"]}, STRING]}, '{"y": 1}', '{"y": 1}'),
        # Python
        ({"type": "array"}, "['a', \"b\"]", ["a", "b"]),
        ({"type": "array"}, "('a', 1)", ["a", 1]),
        ({"type": "object"}, "{'k': None, 'b': True}", {"k": None, "b": True}),
        ({"type": "array"}, "__import__('os')", "__import__('os')"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "null"}, "None", None),
        # JSON with mistakes
        ({"type": "object"}, '{"a": "b\nc"}', {"a": "b\nc"}),
        (INTEGER, "007", 7),
        (INTEGER, "3.0", 3),
        (INTEGER, "+5", 5),
        (INTEGER, "3.5", "3.5"),
        (INTEGER, "12345678901234567890.0", 12345678901234567890),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "1e999", "1e999"),
        # names of types in other languages
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "int"}, "5", 5),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({"type": "list"}, "[1]", [1]),
        ({"type": "str"}, "5", "5"),
        # quoted strings: only where the schema does not name the type
        ({"$ref": "#/$defs/text"}, '"a"', "a"),
        ({"enum": ["a"]}, '"a"', "a"),
        ({"anyOf": [STRING, {"type": "null"}]}, '"a"', '"a"'),
        # what no reading fits
        ({"type": "integer", "minimum": 10}, "5", 5),
        (INTEGER, "five", "five"),
        ({"enum": [1, 2]}, "3", "3"),
        (False, "5", "5"),
    ],
)
def test_values(schema: Any, text: str, value: Any) -> None:
    found = value_of(schema, text)
    assert found == value
    assert type(found) is type(value)


def test_numbers_are_sent_as_they_are_written() -> None:
    arguments = ArgumentSchema({"properties": {"a": {"type": "number"}}})
    for text in ("1.50", "1e3", "100000000000000000001", "-0"):
        assert arguments.value(arguments.of("a"), text) == text


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        (STRING, True),
        ({"$ref": "#/$defs/text"}, True),
        ({"type": "string", "description": "a", "maxLength": 5}, True),
        ({"type": "string", "enum": ["a"]}, False),
        ({"type": ["string", "null"]}, False),
        ({}, False),
        (True, False),
        ({"$ref": "#/$defs/loop"}, False),
    ],
)
def test_strings_that_can_be_sent_as_they_come(schema: Any, is_text: bool) -> None:
    root = {
        "properties": {"a": schema},
        "$defs": {"text": STRING, "loop": {"$ref": "#/$defs/loop"}},
    }
    arguments = ArgumentSchema(root)
    assert arguments.is_text(arguments.of("a")) == is_text
    assert arguments.is_text(arguments.of("unknown"))


@pytest.mark.parametrize(
    "root",
    [
        {"properties": {"a": INTEGER}},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": INTEGER}}}},
        {"allOf": [{"properties": {}}, {"properties": {"a": INTEGER}}]},
    ],
)
def test_the_schema_of_an_argument(root: Any) -> None:
    assert ArgumentSchema(root).of("a") == INTEGER


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]},
        {"type": 5, "required": True, "properties": [1], "anyOf": {"a": 1}},
        {"type": "array", "items": {"enum": 5}, "minItems": "3"},
        {"$ref": 5},
        {"$ref": "other.json#/a"},
        {"type": "array", "maxItems": None, "prefixItems": 3},
    ],
)
def test_a_schema_that_is_none_or_endless_does_no_harm(schema: Any) -> None:
    for text in ("[1]", "a", '{"a": {"a": 1}}', "5"):
        value_of(schema, text)
        ArgumentSchema(schema if isinstance(schema, dict) else {}).of("a")


def test_a_schema_with_many_paths_ends() -> None:
    """Each of 60 levels refers twice to the next one: 2^60 paths."""
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    root = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs | {"d60": INTEGER}}
    arguments = ArgumentSchema(root)
    assert json.loads(arguments.value(arguments.of("a"), "5")) == 5


def test_the_schema_of_an_argument_is_found_once_in_each_place() -> None:
    """A thousand references to the whole schema: 1,000^n paths."""
    root = {"allOf": [{"$ref": "#"}] * 1000}
    assert ArgumentSchema(root).of("a") == STRING


def test_long_lists_end() -> None:
    many = {"allOf": [{"enum": [*range(100_000)], "required": [*map(str, range(1000))]}] * 1000}
    assert value_of(many, "5") == "5"


# ---- any schema and text ---------------------------------------------------------------------

SCALARS = st.sampled_from([0, 1, -7, 1.5, 3.0, True, False, None, "", "a", "5", "null", "[1]"])
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])}
    ),
    st.sampled_from(
        [
            *({}, True, False, {"type": ["string", "integer"]}, {"type": ["null", "string"]}),
            *({"$ref": f"#/$defs/{name}"} for name in DEFS["$defs"]),
            *({"type": "integer", "minimum": 3}, {"type": "number", "exclusiveMaximum": 3}),
            *({"type": "array", "minItems": 2}, {"type": "object", "required": ["a"]}),
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False},
        ]
    ),
    SCALARS.map(lambda one: {"const": one}),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda several: {"enum": several}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).flatmap(
            lambda parts: st.sampled_from(
                [{"anyOf": parts}, {"allOf": parts}, {"oneOf": parts}, {"not": parts[0]}]
            )
        ),
        inner.map(lambda items: {"type": "array", "items": items}),
        inner.map(lambda one: {"type": "object", "properties": {"a": one}}),
        inner.map(lambda one: {"anyOf": [{"type": "string", "maxLength": 2}, one]}),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner)
)
TEXTS = st.one_of(
    VALUES.map(json.dumps),
    VALUES.map(repr),
    st.sampled_from(
        ["TRUE", "007", "3.0", "+1", "1e2", "None", "none", ' "a" ', "a", "", "[1, 2.0]"]
    ),
    st.text(st.sampled_from("[]{}'\",:1.0-eaTN "), max_size=6),
)


def _integer(word: str) -> int:
    return int(word.removesuffix(".0").replace("_", "?"))


def readings(text: str) -> list[Any]:
    """Return all that a text may mean."""
    found: list[Any] = [text]
    word = text.strip()
    is_python = word[:1] in ("[", "{", "(")
    readers = [json.loads, *([ast.literal_eval] if is_python else []), _integer]
    for read in readers:
        try:
            value = read(word)
            dumped = json.dumps(value, allow_nan=False)
            dumped.encode()
        except (ValueError, SyntaxError, TypeError, MemoryError):
            continue
        found.append(json.loads(dumped))
    names = {"true": True, "false": False, "null": None, "none": None}
    return [*found, *([names[word.lower()]] if word.lower() in names else [])]


@pytest.mark.search
@settings(max_examples=scaled(2000))
@given(SCHEMAS, TEXTS)
@example({"enum": [True]}, "1")
@example({"type": "array", "items": {"type": "integer"}}, "[1.0]")
@example({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, "1e2")
def test_a_value_is_valid_where_any_reading_is(schema: Any, text: str) -> None:
    checker = jsonschema.Draft202012Validator({"allOf": [schema], **DEFS})
    arguments = ArgumentSchema({"properties": {"a": schema}, **DEFS})
    if arguments.is_text(schema):
        assert checker.is_valid(text)
        return
    value = json.loads(arguments.value(schema, text))
    assert checker.is_valid(value) or not any(map(checker.is_valid, readings(text)))
