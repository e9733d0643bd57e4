"""Constraints on a text: exactly one, not too large, in llguidance's format."""

import json
import time
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.structured import (
    JSON_STYLE,
    MAX_GRAMMAR_BYTES,
    NO_FORCING,
    StructuredOutputs,
)


def decode(**fields: Any) -> StructuredOutputs:
    return msgspec.convert(fields, StructuredOutputs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "got none, expected one of json, json_object, regex, choice, grammar"),
        ({"json_object": False}, "got none, expected"),
        ({"regex": "a", "json": {}}, "got json and regex, expected"),
        ({"regex": ""}, "length >= 1"),
        ({"choice": []}, "length >= 1"),
        ({"choice": [""]}, "length >= 1"),
        ({"json": "{"}, "json: got .{., expected a JSON schema, a map or its text"),
        ({"json": "3"}, "json: got 3, expected a JSON schema, a map"),
        ({"json": [1]}, "expected a JSON schema, a map"),
        ({"json": True}, "json: got True, expected a JSON schema, a map"),
        ({"json": False}, "json: got False, expected a JSON schema, a map"),
        ({"lark": "a"}, "unknown field `lark`"),
    ],
)
def test_refuses(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=sentence):
        decode(**fields)


def test_the_size_limit_and_one_more() -> None:
    longest = "a" * (MAX_GRAMMAR_BYTES - 2)  # and two quotes
    assert decode(regex=longest).regex == longest
    with pytest.raises(
        msgspec.ValidationError, match="regex: got 65537 bytes, expected up to 65536"
    ):
        decode(regex=longest + "a")
    with pytest.raises(
        msgspec.ValidationError, match=r"choice: got .* bytes, expected up to 65536"
    ):
        decode(choice=["a" * 64] * 1024)
    with pytest.raises(msgspec.ValidationError, match=r"json: got .* bytes, expected up to 65536"):
        decode(json={"enum": list(range(20_000))})


def grammar(**fields: Any) -> dict[str, Any]:
    (parts,) = json.loads(decode(**fields).to_llguidance())["grammars"]
    return dict(parts)


def test_a_schema_keeps_its_order_and_gets_the_style() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "x-guidance": {"lenient": True}}
    for given in (schema, json.dumps(schema)):
        made = schema_of(json=given)
        assert list(made["properties"]) == ["b", "a"]
        assert made["x-guidance"] == JSON_STYLE
    assert schema_of(json_object=True)["type"] == "object"


def schema_of(**fields: Any) -> dict[str, Any]:
    lark = grammar(**fields)["lark_grammar"]
    return dict(json.loads(lark.removeprefix("start: %json ")))


@pytest.mark.parametrize(
    ("fields", "has_name"),
    [
        ({"choice": ["a</think>b"]}, True),
        ({"regex": "a(<tool_call>|b)"}, True),
        ({"json": {"properties": {"<|im_end|>": {}}}}, True),
        ({"choice": ["<tts_pad>"]}, True),  # of Qwen3.5's vocabulary
        ({"json": {"enum": ["<b>x</b>"]}}, False),
        ({"grammar": 'start: <tool_call> "\\"x" </tool_call>'}, False),
        ({"grammar": 'start: "\\"" "<think>"'}, True),
        ({"grammar": 'start: "a</" "think>"'}, True),
        ({"grammar": 'start: "a\\u003c/think>"'}, True),
        ({"regex": "a</think>b"}, True),
        ({"regex": r"a<\|im_end\|>"}, True),
        ({"regex": r"[<](\x2f)think>"}, True),
        ({"json": {"pattern": r"^<\|im_end\|>$"}}, True),
    ],
)
def test_a_text_with_a_special_tokens_name_is_not_forced(
    fields: dict[str, Any], has_name: bool
) -> None:
    """Other grammars are: models continue best in the tokenizer's own tokens."""
    assert grammar(**fields)["lark_grammar"].startswith(NO_FORCING) == has_name


@pytest.mark.parametrize("unit", ['"\\', "/\\", '"a', '"<|a', '/a"', "\\\n"])
def test_a_search_for_names_takes_time_that_grows_with_the_text(unit: str) -> None:
    """A tokenizer serves nobody else meanwhile: one grammar took it 4 s."""
    outputs = StructuredOutputs(grammar="<think>" + unit * 10_000)
    begin = time.thread_time()
    outputs.to_llguidance()
    assert time.thread_time() - begin < 0.2


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
LIMIT = 2**63 - 1024


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"} | INT64, {"type": "integer", "minimum": -LIMIT, "maximum": LIMIT}),
        (
            {"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**64, "maximum": 7},
            {"minimum": -LIMIT, "maximum": 7},
        ),
        (
            {"properties": {"default": INT64}},
            {"properties": {"default": {"minimum": -LIMIT, "maximum": LIMIT}}},
        ),
        ({"const": INT64, "maximum": LIMIT - 1}, {"const": INT64, "maximum": LIMIT - 1}),
    ],
)
def test_bounds_beyond_int64_are_brought_near(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = schema_of(json=schema)
    del made["x-guidance"]
    assert made == expected
    given = grammar(grammar=f'start: "%json" %json {json.dumps(schema)} "x"')["lark_grammar"]
    in_lark = given.removeprefix('start: "%json" %json ').removesuffix(' "x"')
    assert json.loads(in_lark) == expected


@pytest.mark.parametrize(
    ("regex", "lark"),
    [
        ("a/b", r"a\/b"),
        (r"a\/b", r"a\/b"),
        (r"a\\/b", r"a\\\/b"),
        ("a\nb", r"a\nb"),
        ("a\\\nb", r"a\nb"),
        ("a\\\\\nb", r"a\\\nb"),
    ],
)
def test_a_regex_in_lark(regex: str, lark: str) -> None:
    assert grammar(regex=regex)["lark_grammar"] == f"start: /{lark}/"
