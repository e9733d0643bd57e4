"""Decoding of clients' requests: limits of size and nesting, and errors that name the field.

`has_too_many_parts` and `is_too_deep` bound untyped data on arrival. `explain` turns an error of
msgspec into the field's path, its value and the expected value.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

_SHOWN = 60  # characters of an invalid value that an error repeats
_MAX_ENTRIES = 2048  # entries of a map that are examined; each takes microseconds
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
    """Return a message, and the path of the field for which `raw` is not a valid `kind`.

    error: message of msgspec. The path is None if the error concerns the whole request.
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
    """Return path and problem of a value that the JSON decoder or MessagePack encoder refuses."""
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
    """Return the path of a map's invalid entry, which msgspec leaves out, and the reason."""
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
            if not where:  # the field can't be a map, or the whole map is checked
                return name, reason
            if where.startswith("`key"):
                inner = re.sub(r", got `\w+`$", "", inner[0].lower() + inner[1:])
                return name, f"got the key {key!r}, {inner}"
            return f"{name}.{key}{rest}", inner
    return path, reason


def _got(raw: object, path: str) -> str:
    """Return `got VALUE, ` for the value at a path such as `messages[0].role`; cut a long value.

    The result is empty if `raw` lacks the value: of a repeated key, `raw` has only the last value.
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
    """Return the values that are permitted at a path whose type is an enumeration."""
    (schema,), definitions = msgspec.json.schema_components([kind])
    options, parts = [schema], [*_parts(path), ""]
    for number, part in enumerate(parts):
        value = _value_at(raw, ".".join(parts[:number]))
        options = [inner for option in options for inner in _at(option, part, definitions, value)]
    return list(dict.fromkeys(value for option in options for value in option.get("enum", ())))


def _at(
    schema: dict[str, Any], part: str, definitions: dict[str, Any], value: object
) -> list[dict[str, Any]]:
    """Return the alternatives of a JSON schema, or of its property or item `part`.

    value: the value that the schema describes. A valid tag in the value selects an alternative.
    """
    name = schema.get("$ref", "").rpartition("/")[2]
    schema = definitions.get(name, schema)
    if part and "discriminator" in schema and isinstance(value, dict):
        tags = schema["discriminator"]
        chosen = tags["mapping"].get(str(value.get(tags["propertyName"])))
        if chosen:
            schema = definitions[chosen.rpartition("/")[2]]
    if "anyOf" in schema:
        options = schema["anyOf"]
        return [inner for option in options for inner in _at(option, part, definitions, value)]
    if not part:
        return [schema]
    inner = schema.get("properties", {}).get(part) or schema.get("items")
    inner = inner or schema.get("additionalProperties")
    return [inner] if inner else []


# maximum depth of lists and maps in a field. Encoders, chat templates and grammar compilers
# recurse over a request; their limits are many times this depth.
MAX_DEPTH = 64
# maximum number of lists and maps in a request. A list of one byte takes 64 bytes of memory and up
# to a microsecond.
MAX_CONTAINERS = 1 << 16
MAX_STRINGS = 1 << 18  # maximum number of strings in a JSON request, with field names
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_FIXED = {0: b"\x00-\x7f\xc0\xc2\xc3\xe0-\xff", 1: b"\xcc\xd0", 2: b"\xcd\xd1\xd4"}
# number of bytes after a head of MessagePack → heads, except heads of strings
_FIXED |= {3: b"\xd5", 4: b"\xca\xce\xd2", 5: b"\xd6", 8: b"\xcb\xcf\xd3", 9: b"\xd7", 17: b"\xd8"}
# consecutive scalars of MessagePack, short strings included
_SHORT = re.compile(
    b"(?:%b)*+"
    % b"|".join(
        [b"[%b].{%d}" % (heads, size) for size, heads in _FIXED.items()]
        + [b"%b.{%d}" % (bytes((0xA0 + size,)), size) for size in range(32)]
    ),
    re.DOTALL,
)
_CONTAINERS = re.compile(rb"[\x80-\x9f]++|[\xdc\xde]..|[\xdd\xdf]....", re.DOTALL)
# head of a long string, binary or extension → size of its length, bytes
_SIZES = {0xD9: 1, 0xC4: 1, 0xC7: 1, 0xDA: 2, 0xC5: 2, 0xC8: 2, 0xDB: 4, 0xC6: 4, 0xC9: 4}
TOO_MANY_PARTS = (
    f"got more than {MAX_CONTAINERS} lists and maps, or {MAX_STRINGS} strings, expected fewer"
)
_SCALARS = frozenset({str, int, float, bool, type(None), bytes})


def has_too_many_parts(frame: bytes) -> bool:
    """Return whether JSON or MessagePack has more parts than a request may, without decoding it.

    Malformed frames are left to the decoder.
    """
    if len(frame) <= MAX_CONTAINERS:
        return False
    return _is_over_in_msgpack(frame) if frame[:1] >= b"\x80" else _is_over_in_json(frame)


def _is_over_in_json(text: bytes) -> bool:
    # the first quote of a string never follows a backslash
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_STRINGS:
        return True
    if text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS:
        return False
    rest = _JSON_STRING.sub(b"", text)
    return rest.count(b"[") + rest.count(b"{") > MAX_CONTAINERS


def _is_over_in_msgpack(frame: bytes) -> bool:
    position = number = 0
    while (position := _SHORT.match(frame, position).end()) < len(frame):  # type: ignore[union-attr]
        if size := _SIZES.get(frame[position]):
            begin = position + 1
            length = int.from_bytes(frame[begin : begin + size])
            position = begin + size + length + (0xC7 <= frame[position] <= 0xC9)
            continue
        found = _CONTAINERS.match(frame, position)
        if not found:
            return False
        number += found.end() - position if frame[position] < 0xA0 else 1
        position = found.end()
        if number > MAX_CONTAINERS:
            return True
    return False


def is_too_deep(value: object) -> bool:
    """Return True if `value`, as msgspec decodes it, has more than MAX_DEPTH levels."""
    level = [] if type(value) in _SCALARS else [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        children = chain.from_iterable(map(_children, level))
        level = [child for child in children if type(child) not in _SCALARS]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return value.values()
    return astuple(value) if hasattr(value, "__struct_fields__") else ()
