"""Structured outputs: constraints on the text of an answer, and their JSON schemas.

llguidance reads numbers as float64, which rounds large integers in a schema.
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
from msgspec import Meta, Struct

MAX_EXACT = 1 << 53
# the largest float64 among the integers that llguidance accepts
LIMIT = (1 << 63) - 1024
BOUNDS = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))
# keywords whose values are data
VALUES = ("const", "enum", "default", "examples")
# keywords whose values are maps of schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DECODER = json.JSONDecoder()
_LARGE = re.compile(r"\d{16}")
_BEGIN = re.compile(r"%json\s*(?=\{)")


def schemas_in(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Yield begin, end and value of each `%json` of a grammar in Lark."""
    position = 0
    while found := _BEGIN.search(lark, position):
        position = found.end()
        try:
            schema, end = _DECODER.raw_decode(lark, position)
        except (ValueError, RecursionError):  # llguidance reports the error in more detail
            continue
        yield position, end, schema
        position = end


def maps_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas, if they are maps."""
    found = [schema]
    while found:
        value = found.pop()
        if isinstance(value, list):
            found += value
        elif isinstance(value, dict):
            yield value
            for key, inner in value.items():
                if key in NAMED and isinstance(inner, dict):
                    found += inner.values()
                elif key not in VALUES:
                    found.append(inner)


def within_limit(lark: str) -> str:
    """Return a grammar in whose schemas bounds have at most LIMIT; bounds of int64 are common.

    A bound beyond `LIMIT` becomes `LIMIT`: integers between the two are valid, but never generated.
    """
    if not _LARGE.search(lark):
        return lark
    parts, begin = [], 0
    for start, end, schema in schemas_in(lark):
        for part in maps_in(schema):
            _limit(part)
        parts += [lark[begin:start], json.dumps(schema)]  # may have lone surrogates
        begin = end
    return "".join([*parts, lark[begin:]])


def _limit(part: dict[str, Any]) -> None:
    for inclusive, exclusive, sign in BOUNDS:
        if _is_number(bound := part.get(exclusive)) and bound * sign > LIMIT:
            del part[exclusive]
            part.setdefault(inclusive, sign * LIMIT)
        if _is_number(bound := part.get(inclusive)) and bound * sign > LIMIT:
            part[inclusive] = sign * LIMIT


def inexact(schema: Any) -> str:
    """Return an error for a number in a schema that would be rounded, or an empty string."""
    for part in maps_in(schema):
        wrong: list[tuple[str, float]] = [
            (key, number)
            for key in ("const", "enum")
            for number in _integers(part.get(key))
            if not _is_exact(number)
        ]
        for inclusive, exclusive, _ in BOUNDS:
            bound, open_bound = part.get(inclusive), part.get(exclusive)
            if _is_number(bound) and not _is_exact(bound, is_open=open_bound is True):
                wrong.append((inclusive, bound))
            if _is_number(open_bound) and not _is_exact(open_bound, is_open=True):
                wrong.append((exclusive, open_bound))
        if wrong:
            key, number = wrong[0]
            return (
                f"{key}: got {number}, expected an integer up to 2**53, beyond which it may be "
                "rounded; use a string with a pattern"
            )
    return ""


def _is_exact(number: float, is_open: bool = False) -> bool:
    """Return whether float64 keeps a number, and its neighbour if the bound is open."""
    if is_open or not isinstance(number, int):
        return not is_open or abs(number) < MAX_EXACT
    return abs(number) <= LIMIT and int(float(number)) == number


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers in a value."""
    found = [value]
    while found:
        inner = found.pop()
        if isinstance(inner, int) and not isinstance(inner, bool):
            yield inner
        elif isinstance(inner, dict | list):
            found += inner.values() if isinstance(inner, dict) else inner


# beginning of an output: the answer; `<think>` or the answer; reasoning that the prompt has opened.
# A grammar applies to the text after `</think>`.
Reasoning = Literal["none", "optional", "open"]
# beginning of the error of a row whose matcher has failed
GRAMMAR_FAILED = "structured_outputs: the grammar failed"
# maximum size of a schema, a regex, the choices or a grammar, as JSON
MAX_GRAMMAR_BYTES = 1 << 16
# llguidance's LLParserLimits for compiling a grammar. With these limits the slowest mask that was
# found takes 0.1 s; the time of compiling is not limited.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# llguidance's options for JSON: an optional space after `,` and `:`, and no other whitespace, which
# a small model may generate until its tokens are used up. A schema can't change these options:
# `lenient` would accept keywords that are not enforced.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class StructuredOutputs(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the text, exactly one of the fields, which are named as in vLLM."""

    json: Any | None = None  # a JSON schema: a map, or its text
    json_object: bool = False  # any JSON object
    # a regular expression for the whole text, in the syntax of Rust's `regex`
    regex: Annotated[str, Meta(min_length=1)] | None = None
    # the possible texts
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    # a Lark grammar in llguidance's dialect, which includes `%json {…}`
    grammar: Annotated[str, Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        fields = self.__struct_fields__
        given = [name for name in fields if getattr(self, name) is not None]
        if not self.json_object:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"got {' and '.join(given) or 'none'}, expected one of {', '.join(fields)}"
            )
        size = len(msgspec.json.encode(getattr(self, given[0])))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{given[0]}: got {size} bytes, expected up to {MAX_GRAMMAR_BYTES}")
        if self.json is not None:
            self.schema()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema as a map. Raises ValueError if `json` is not a JSON schema."""
        schema = {"type": "object"} if self.json_object else self.json
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                got = f"json: got {repr(schema)[:64]}, expected a JSON schema, a map or its text"
                raise ValueError(f"{got}; the text is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError(f"json: got {repr(schema)[:64]}, expected a JSON schema, a map")
        return schema

    def to_llguidance(self) -> str:
        """Return the grammar in llguidance's own format."""
        if self.json is not None or self.json_object:
            schema = self.schema() | {"x-guidance": JSON_STYLE}
            lark = f"start: %json {msgspec.json.encode(schema).decode()}"
        else:
            lark = self._lark()
        lark = within_limit(lark)
        if _has_token_name(lark):
            lark = f"{NO_FORCING}\n{lark}"
        return msgspec.json.encode({"grammars": [{"lark_grammar": lark}]}).decode()

    def _lark(self) -> str:
        if self.grammar is not None:
            return self.grammar
        if self.regex is not None:
            return f"start: /{re.sub(_UNSAFE, _escape, self.regex)}/"
        texts = (msgspec.json.encode(text).decode() for text in self.choice or [])
        return f"start: CHOICE\nCHOICE: {' | '.join(texts)}"


# names of Qwen's special tokens
_NAME = re.compile(r"<\|\w+\|>|</?(?:think|tool_call|tool_response)>|<tts_\w+>")
# a string or a regex in Lark, or a string in JSON. The last quote or slash may be missing:
# otherwise the search would begin again within the text, and take quadratic time.
_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*+)"?|/((?:[^/\\\n]|\\.)++)/?')
# an ASCII character by its number
_CODE = re.compile(r"\\(?:u00|x)([0-7][0-9a-fA-F])")
# Text that must follow may consist of any tokens. Otherwise llguidance forces the tokens of the
# tokenizer: the name of a special token would become that token instead of text.
NO_FORCING = '%llguidance {"no_forcing": true}'
# characters that would end a regex in Lark; escaped characters match first, and are not changed
_UNSAFE = re.compile(r"\\?\n|\\.|/")


def _escape(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _has_token_name(lark: str) -> bool:
    """Return whether texts in a grammar may combine to the name of a special token."""
    text = "".join(found[1] or found[2] or "" for found in _TEXT.finditer(lark))
    text = _CODE.sub(lambda found: chr(int(found[1], 16)), text)
    return bool(_NAME.search(re.sub(r"[\\()\[\]]", "", text)))
