"""JSON schemas in grammars, and their large integers: llguidance reads numbers as float64."""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

MAX_EXACT = 1 << 53
# the largest float64 among the integers that llguidance takes
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
        except (ValueError, RecursionError):  # llguidance says more
            continue
        yield position, end, schema
        position = end


def maps_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas in a schema, as far as they are maps, and itself."""
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
    """Return a grammar whose schemas have bounds that llguidance knows: those of int64 are usual.

    A bound beyond `LIMIT` becomes `LIMIT`: integers between them are valid, but never generated.
    """
    if not _LARGE.search(lark):
        return lark
    parts, begin = [], 0
    for start, end, schema in schemas_in(lark):
        for part in maps_in(schema):
            _limit(part)
        parts += [lark[begin:start], json.dumps(schema)]  # may have half characters
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
    """Return which number of a schema would be rounded, or an empty string."""
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
    """Return whether a number, and its neighbour if the bound is open, are as in the schema."""
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
