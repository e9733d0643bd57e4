"""Decoding errors in terms of the field: its path, its value and what is expected there."""

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

_SHOWN = 60  # characters of an invalid value that an error repeats
_MAX_ENTRIES = 2048  # of a map that are examined: each takes microseconds
_NO_VALUE = object()
_MIN_INT, _MAX_INT, _MAX_DIGITS = -(2**63), 2**64, 20
_WHOLE = r"the request: got `\1`, expected an object of the fields"
FINITE = "got NaN or a number beyond 64 bits, expected a finite number of up to 64 bits"
UNICODE = "got an invalid UTF-16 surrogate, expected Unicode text"
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_any(content: bytes) -> Any:
    """Decode JSON, with infinity for numbers beyond 64 bits."""
    return msgspec.json.Decoder(float_hook=float).decode(content)


def explain(error: str, raw: object, kind: type[Struct]) -> tuple[str | None, str]:
    """Return the path of an invalid field of `raw`, which is not a `kind`, and a message.

    error: msgspec's. The path is None where the error is of the whole.
    """
    reason, _, path = error.partition(" - at ")
    path = path.rpartition("$")[2].strip("`.")
    if unknown := re.search(r"unknown field `(.*)`", reason):
        name = _joined(path, unknown[1])
        known = f"one of {', '.join(kind.__struct_fields__)}" if not path else "a known one"
        return name, f"{name}: got an unknown field, expected {known}"
    if missing := re.search(r"missing required field `(.*)`", reason):
        name = _joined(path, missing[1])
        got = "null" if _value_at(raw, name) is None else "nothing"
        return name, f"{name}: got {got}, expected a value; the field is required"
    if not path:
        return None, re.sub("^Expected `object`, got `(.*)`$", _WHOLE, error)
    if "out of range" in reason:
        return path, f"{path}: {FINITE}"
    path, reason = _entry(path, reason, raw, kind)
    if inner := re.match(r"(\w+): got ", reason):
        return f"{path}.{inner[1]}", f"{path}.{reason}"
    if reason.startswith("Invalid") and (allowed := _permitted(kind, path, raw)):
        reason = f"Expected {' or '.join(map(repr, allowed))}"
    reason = re.sub(r"`str` matching regex '\^\(\?!.*", "no control characters", reason)
    reason = reason[0].lower() + reason[1:]
    if not reason.startswith("got ") and (got := _got(raw, path)):
        reason = got + re.sub(r", got `\w+`$", "", reason)
    return path, f"{path}: {reason}"


def undecodable_value(body: bytes) -> tuple[str, str] | None:
    """Return path and problem of a value that JSON's decoder or MessagePack's encoder refuses."""
    try:
        return next(_undecodable(json.loads(body, parse_int=_decimal), ""), None)
    except (RecursionError, ValueError):
        return None


def _decimal(digits: str) -> float:
    """Return infinity for an integer that MessagePack can't encode."""
    number = int(digits) if len(digits) <= _MAX_DIGITS else math.inf
    return number if _MIN_INT <= number < _MAX_INT else math.inf


def _undecodable(raw: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(raw, float) and not math.isfinite(raw):
        yield path, FINITE
    elif isinstance(raw, str) and _SURROGATE.search(raw):
        yield path, UNICODE
    elif isinstance(raw, dict):
        for name, value in raw.items():
            yield from _undecodable(name, path)
            yield from _undecodable(value, _joined(path, name))
    elif isinstance(raw, list):
        for number, value in enumerate(raw):
            yield from _undecodable(value, f"{path}[{number}]")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _entry(path: str, reason: str, raw: object, kind: type[Struct]) -> tuple[str, str]:
    """Return the path of the invalid entry of a map, which msgspec leaves out, and its reason."""
    name, _, rest = path.partition("[...]")
    entries = _value_at(raw, name)
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    if not isinstance(entries, dict) or name not in types:
        return path, reason
    for key, value in islice(entries.items(), _MAX_ENTRIES):
        try:
            msgspec.convert({key: value}, types[name], str_keys=True)
        except msgspec.ValidationError as error:
            inner, _, where = str(error).partition(" - at ")
            if not where:  # the field is not to be a map, or its check is of the whole
                return name, reason
            if where.startswith("`key"):
                inner = re.sub(r", got `\w+`$", "", inner[0].lower() + inner[1:])
                return name, f"got the key {key!r}, {inner}"
            return f"{name}.{key}{rest}", inner
    return path, reason


def _got(raw: object, path: str) -> str:
    """Return `got VALUE, ` for the value at a path `messages[0].role`, cut where it is long.

    Empty where `raw` lacks the value: of a key that stands twice `raw` has the last one only.
    """
    value = _value_at(raw, path)
    if value is _NO_VALUE:
        return ""
    try:
        shown = repr(value)
    except (RecursionError, ValueError):
        return "got a value that is nested too deep, "
    return f"got {shown}, " if len(shown) <= _SHOWN else f"got {shown[:_SHOWN]}…, "


def _parts(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _value_at(raw: Any, path: str) -> Any:
    try:
        for part in _parts(path):
            if isinstance(raw, dict):  # MessagePack has integers as keys
                raw = raw[part] if part in raw else raw[int(part)]
            else:
                raw = raw[int(part)]
    except (LookupError, TypeError, ValueError):
        return _NO_VALUE
    return raw


def _permitted(kind: type[Struct], path: str, raw: object) -> list[object]:
    """Return the values that are permitted at a path, where it is an enumeration."""
    (schema,), definitions = msgspec.json.schema_components([kind])
    options, parts = [schema], [*_parts(path), ""]
    for number, part in enumerate(parts):
        value = _value_at(raw, ".".join(parts[:number]))
        options = [inner for one in options for inner in _at(one, part, definitions, value)]
    return list(dict.fromkeys(value for one in options for value in one.get("enum", ())))


def _at(
    schema: dict[str, Any], part: str, definitions: dict[str, Any], value: object
) -> list[dict[str, Any]]:
    """Return the alternatives of a JSON schema, or of its property or item `part`.

    value: what the schema describes. Its tag chooses one of the alternatives, if it is valid.
    """
    name = schema.get("$ref", "").rpartition("/")[2]
    schema = definitions.get(name, schema)
    if part and "discriminator" in schema and isinstance(value, dict):
        tags = schema["discriminator"]
        chosen = tags["mapping"].get(str(value.get(tags["propertyName"])))
        if chosen:
            schema = definitions[chosen.rpartition("/")[2]]
    if "anyOf" in schema:
        return [inner for one in schema["anyOf"] for inner in _at(one, part, definitions, value)]
    if not part:
        return [schema]
    inner = schema.get("properties", {}).get(part) or schema.get("items")
    inner = inner or schema.get("additionalProperties")
    return [inner] if inner else []
