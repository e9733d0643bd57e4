"""Conversion of a tool's argument from the model's text to JSON, by the argument's schema."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from penstock.protocol.transport.channel import DECODE_ERRORS

# limit of subschemas and their list entries in the check of one text's readings; at the limit, the
# current reading is taken
MAX_CHECKS = 4096
MAX_PYTHON = 1 << 16  # characters to parse as Python, whose parser takes much memory
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "object": (dict,),
    "array": (list,),
}
# type name that clients use in schemas → type of JSON Schema
_ALIASES = {
    "none": "null",
    "nonetype": "null",
    "bool": "boolean",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "str": "string",
    "text": "string",
    "dict": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
}
_NAMES = {"true": True, "false": False, "null": None, "none": None}
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_COMBINED = ("enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not")
_LISTS = ("enum", "required", "type", "allOf", "anyOf", "oneOf", "prefixItems")
_ONLY_STRING = {"type": "string"}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZES: dict[type, tuple[str, str]] = {
    str: ("minLength", "maxLength"),
    list: ("minItems", "maxItems"),
    dict: ("minProperties", "maxProperties"),
}
# level of checking a value: integers have no `.0`; as in JSON Schema; by its type alone
Level = Literal["strict", "exact", "types"]


class ArgumentSchema:
    """Schemas of a function's arguments. Malformed and unknown keywords have no effect.

    Some keywords are not examined, because a check can take any time: `pattern`, `format`,
    `uniqueItems`, `multipleOf`, `contains`, `if`, and references into other documents.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema

    def of(self, key: str) -> Any:
        """Return the schema of an argument; an undescribed argument is a string."""
        waiting, seen = [self._root], set()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
            waiting += [self.target(schema.get("$ref")), *_parts(schema)]
        return _ONLY_STRING

    def is_text(self, schema: Any) -> bool:
        """Return whether every text, unchanged, is a value of this schema."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return False
            if "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        is_string = _type_names(schema) == {"string"}
        return is_string and not any(key in schema for key in _COMBINED)

    def value(self, schema: Any, text: str) -> str:
        """Return the JSON text of the first reading that the schema permits.

        Without such a reading, return the first reading of a permitted type, or else the text.
        """
        readings = list(_readings(text, is_json="string" not in permitted_types(schema)))
        check = _Check(self)
        for check.level in ("strict", "exact", "types"):
            for value, encoded_value in readings:
                if check.permits(schema, value):
                    return encoded_value
        return encoded(text)

    def target(self, reference: Any) -> Any:
        """Return the schema to which a reference points; a missing schema permits all values."""
        path = str(reference).removeprefix("#").split("/")[1:]
        target: Any = self._root if str(reference).startswith("#") else True
        for name in path:
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name, True) if isinstance(target, Mapping) else True
        return target


class _Check:
    """Check of the readings of a text, with a limited number of steps."""

    def __init__(self, schemas: ArgumentSchema) -> None:
        self._schemas = schemas
        self.level: Level = "strict"
        self._num_left = MAX_CHECKS

    def permits(self, schema: Any, value: Any) -> bool:
        try:
            return self._permits(schema, value)
        except (RecursionError, TypeError, ValueError, AttributeError):  # not a schema, or endless
            return True

    def _permits(self, schema: Any, value: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        self._num_left -= 1 + sum(len(_list(schema.get(key))) for key in _LISTS)
        if self._num_left < 0:
            raise RecursionError
        if "$ref" in schema and not self._permits(self._schemas.target(schema["$ref"]), value):
            return False
        names = _type_names(schema)
        if names and not any(self._is_of(value, name) for name in names):
            return False
        return self._combined(schema, value) and (
            self.level == "types" or (self._is_listed(schema, value) and self._fits(schema, value))
        )

    def _is_of(self, value: Any, name: str) -> bool:
        if name == "integer" and type(value) is float and self.level != "strict":
            return value.is_integer()
        return type(value) in _TYPES.get(name, (type(value),))

    def _combined(self, schema: Mapping[str, Any], value: Any) -> bool:
        if not all(self._permits(part, value) for part in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self._permits(part, value) for part in schema["anyOf"]):
            return False
        if self.level == "types":
            parts = schema.get("oneOf", [True])
            return any(self._permits(part, value) for part in parts)
        number = sum(self._permits(part, value) for part in schema.get("oneOf", [True]))
        return number == 1 and not ("not" in schema and self._permits(schema["not"], value))

    def _is_listed(self, schema: Mapping[str, Any], value: Any) -> bool:
        if "const" in schema and not _is_equal(value, schema["const"]):
            return False
        return "enum" not in schema or any(_is_equal(value, other) for other in schema["enum"])

    def _fits(self, schema: Mapping[str, Any], value: Any) -> bool:
        """Check the limits of a value, and its items or members."""
        if type(value) in (int, float):
            given = [(holds, schema[key]) for key, holds in _LIMITS.items() if key in schema]
            return all(holds(value, limit) for holds, limit in given)
        if type(value) not in _SIZES:
            return True
        least, most = _SIZES[type(value)]
        if not schema.get(least, 0) <= len(value) <= schema.get(most, len(value)):
            return False
        if isinstance(value, dict):
            return self._has_members(schema, value)
        return not isinstance(value, list) or self._has_items(schema, value)

    def _has_items(self, schema: Mapping[str, Any], value: list[Any]) -> bool:
        first = schema.get("prefixItems", [])
        others = schema.get("items", True)
        schemas = [*first[: len(value)], *[others] * (len(value) - len(first))]
        return all(map(self._permits, schemas, value))

    def _has_members(self, schema: Mapping[str, Any], value: dict[str, Any]) -> bool:
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not value.keys() >= set(schema.get("required", ())):
            return False
        others = True if "patternProperties" in schema else others
        return all(self._permits(known.get(key, others), member) for key, member in value.items())


def permitted_types(schema: Any) -> set[str]:
    """Return the types of values that a schema names itself; "any" without such a type."""
    if not isinstance(schema, Mapping):
        return {"any"}
    parts = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return _type_names(schema) or set().union(*map(permitted_types, parts)) or {"any"}


def encoded(value: object) -> str:
    """Return a value as JSON."""
    return msgspec.json.encode(value).decode()


def _readings(text: str, is_json: bool) -> Iterator[tuple[Any, str]]:
    """Yield the possible readings of a text, likeliest first, each with its JSON text.

    Arrays, objects and null come before strings, because they would be odd texts. Numbers and
    booleans come after strings, because texts keep all their characters. is_json: strings may be
    quoted.
    """
    word = text.strip()
    whole = _json(word) or _python(word)
    if whole and isinstance(whole[0], (dict, list, type(None))):
        yield whole
        whole = None
    if whole and isinstance(whole[0], str) and is_json:
        yield whole
    yield text, encoded(text)
    if whole:
        yield whole
    if word.lower() in _NAMES:
        value = _NAMES[word.lower()]
        yield value, encoded(value)
    if _INTEGER.fullmatch(word):
        number = int(word.partition(".")[0])
        yield number, str(number)
    elif _NUMBER.fullmatch(word) and abs(float(word)) < float("inf"):
        yield float(word), encoded(float(word))


def _json(word: str) -> tuple[Any, str] | None:
    """Parse JSON, and keep its text; JSON with line breaks in strings is written again."""
    try:
        return msgspec.json.decode(word), word
    except DECODE_ERRORS:
        pass
    try:
        value = json.loads(word, strict=False) if word[:1] in ("[", "{") else None
        return (value, _dumped(value)) if value is not None else None
    except (ValueError, RecursionError):
        return None


def _python(word: str) -> tuple[Any, str] | None:
    """Parse a Python list, tuple, dict or None."""
    if word == "None":
        return None, "null"
    if word[:1] not in ("[", "{", "(") or len(word) > MAX_PYTHON:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes
            dumped = _dumped(ast.literal_eval(word))
        return msgspec.json.decode(dumped), dumped
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _dumped(value: Any) -> str:
    """Return a value as JSON. Raises ValueError for infinite numbers and lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _type_names(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _list(given)
    return {_ALIASES.get(str(name).lower(), str(name).lower()) for name in names}


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    return [part for key in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(key))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_equal(value: Any, other: Any) -> bool:
    """Compare values as in JSON: 1.0 equals 1, and true does not."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            _is_equal(value[key], other[key]) for key in value
        )
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
