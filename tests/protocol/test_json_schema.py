"""Integers of JSON schemas that llguidance would round, and where schemas are."""

from typing import Any

import pytest

from penstock.protocol.messages.structured import LIMIT, inexact, maps_in, schemas_in

BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"const": BIG}, "const"),
        ({"const": 2**53}, ""),
        ({"const": 2**60}, ""),
        ({"const": 2**63}, "const"),
        ({"const": True}, ""),
        ({"const": {"minimum": [-BIG]}}, "const"),
        ({"enum": [1, 1234567890123456789]}, "enum"),
        ({"properties": {"enum": {"default": BIG}}}, ""),
        ({"properties": {"const": {"items": {"const": BIG}}}}, "const"),
        ({"$defs": {"a": {"anyOf": [{"minimum": BIG}]}}}, "minimum"),
        ({"minimum": -LIMIT, "maximum": LIMIT}, ""),
        ({"maximum": -BIG}, "maximum"),
        ({"exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"exclusiveMinimum": 2**53 - 1}, ""),
        ({"exclusiveMaximum": -1e17}, "exclusiveMaximum"),
        ({"exclusiveMaximum": True, "maximum": 2**54}, "maximum"),
        ({"exclusiveMaximum": False, "maximum": 2**54}, ""),
        ({"maximum": 1e300}, ""),
        ({"maxLength": BIG}, ""),
    ],
)
def test_integers_that_would_be_rounded(schema: dict[str, Any], name: str) -> None:
    found = inexact(schema)
    assert found.partition(":")[0] == name
    assert not name or "expected an integer up to 2**53" in found


def test_schemas_in_a_grammar() -> None:
    """Text instead of a schema, one within another's text, one that does not end."""
    lark = 'start: "%json" %json {"const": "%json {}"} | a %json{"a": 1}\na: %json {'
    found = [(lark[begin:end], schema) for begin, end, schema in schemas_in(lark)]
    assert found == [
        ('{"const": "%json {}"}', {"const": "%json {}"}),
        ('{"a": 1}', {"a": 1}),
    ]


def test_values_and_names_are_not_keywords() -> None:
    inner = {"items": [{"type": "null"}], "const": {"items": {}}}
    schema = {"properties": {"const": inner}, "default": {"a": {}}}
    assert list(maps_in(schema)) == [schema, inner, {"type": "null"}]
