"""Fields of requests that Penstock does not have: each is ignored and named, or refused.

A field in `neutral_fields.json` is accepted with values that change nothing. Other values would
change the answer, so they are refused. A name that is nearly a known one is mistyped, and refused.
All other fields are ignored: the log names each once, and the response's header names them.

Schemas and the arguments of calls and templates belong to the user; nobody looks into them.
"""

import logging
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, inspect

from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import ApiError, invalid

_log = logging.getLogger("http")
_TYPES = {"any value": object, "string": str, "boolean": bool, "object": dict}
MAX_UNKNOWN = 100  # of one request; clients that write every field of their API send 60
MAX_LOGGED = 256  # of one process: a client can invent names without end
_MAX_NAME = 64  # characters of a name that are shown
_MAX_HEADER = 512
_HEADER = b"x-ignored-fields"
# places of objects that clients send back as they were received, or take from documents
_DATA = ("messages[]", "input[]", "system[]", "documents[]")
_logged: set[str] = set()


class _NeutralFields(Struct, forbid_unknown_fields=True):
    # SGLang's name → ours
    renamed: dict[str, str]
    # fields about accounting, caches, back ends and missing parts of models → type of the value
    ignored: dict[str, Literal["any value", "string", "boolean", "object"]]
    # fields of objects in the body that change nothing, wherever they are
    ignored_inside: frozenset[str]
    # field or path → values that change nothing, in addition to null
    neutral: dict[str, list[Any]]


FIELDS = msgspec.json.decode(
    Path(__file__).with_name("neutral_fields.json").read_bytes(), type=_NeutralFields
)
_Kinds = dict[Any, "_Known"]  # of the objects at a place, by their tag; None: the only kind
_Path = tuple[Any, str, int | None] | None  # of an object: of the one around it, field, number
# by the known names of its object and its name: the place of a field, empty where it is not shown
_Ignored = dict[tuple[int, str], str]


class _Place(NamedTuple):
    """A field whose value is an object, or a list of objects."""

    name: str
    tag: str | None
    kinds: _Kinds


class _Known(NamedTuple):
    """Known fields of an object, and those of them that have objects inside."""

    names: frozenset[str]
    places: list[_Place]


def drop_unknown(body: dict[str, Any], kind: type[Struct]) -> None:
    """Remove the fields that `kind` does not have, and name those. Raises ApiError."""
    ignored: _Ignored = {}
    _drop(body, _known(kind), None, ignored)
    if named := set(filter(None, ignored.values())):
        _report(sorted(named))


def _drop(value: dict[str, Any], known: _Known, path: _Path, ignored: _Ignored) -> None:
    names, places = known
    if not names.issuperset(value):
        for name in value.keys() - names:
            given = value.pop(name)
            if given is not None and (id(names), name) not in ignored:
                _examine(path, name, given, names, ignored)
    for field, tag, kinds in places:
        inner = value.get(field)
        if type(inner) is list:
            for number, item in enumerate(inner):
                if type(item) is dict and (found := kinds.get(_tag(item, tag))):
                    _drop(item, found, (path, field, number), ignored)
        elif type(inner) is dict and (found := kinds.get(_tag(inner, tag))):
            _drop(inner, found, (path, field, None), ignored)


def _tag(value: dict[str, Any], tag: str | None) -> str | None:
    found = value.get(tag) if tag else None
    return found if isinstance(found, str) else None


def _text(path: _Path, name: str) -> str:
    """Return the path of a field as text."""
    while path:
        path, field, number = path
        name = f"{field}.{name}" if number is None else f"{field}[{number}].{name}"
    return name


def _examine(above: _Path, name: str, value: Any, known: frozenset[str], ignored: _Ignored) -> None:
    """Add an unknown field to `ignored` unless its value has to be looked at. Raises ApiError."""
    path = _text(above, name)
    place = re.sub(r"\[\d+\]", "[]", path)
    expected, accepted = FIELDS.ignored.get(place), FIELDS.neutral.get(place)
    if expected:
        if not isinstance(value, _TYPES[expected]):
            raise invalid(path, f"got {_shown(value)}, expected {expected}")
    elif accepted is not None:
        if value not in accepted:
            neutral = " or ".join(repr(one) for one in accepted if one not in ({}, [], ""))
            sentence = f"got {_shown(value)}, expected {neutral or 'null'}: it is not supported; "
            raise invalid(path, f"{sentence}leave it out")
    elif above and name in FIELDS.ignored_inside:
        ignored[id(known), name] = ""
    elif not place.startswith(_DATA) and (meant := near_miss(name, known)):
        raise invalid(path, f"got an unknown field; did you mean `{meant}`?")
    else:
        ignored[id(known), name] = place[:_MAX_NAME]
        if len(ignored) > MAX_UNKNOWN:
            limit = f"expected at most {MAX_UNKNOWN}"
            raise ApiError(400, f"the body: got more than {MAX_UNKNOWN} unknown fields, {limit}")


def _shown(value: object) -> str:
    text = repr(value)
    return text[:60] + "…" * (len(text) > 60)


def _report(names: list[str]) -> None:
    sender = caller.get(None)
    if sender and sender.headers is not None:
        shown = re.sub(r"[^\w.\[\], -]", "?", ", ".join(names), flags=re.ASCII)
        cut = shown if len(shown) <= _MAX_HEADER else f"{shown[:_MAX_HEADER]}..."
        sender.headers[_HEADER] = cut.encode()
    for name in names:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            _log.warning("the unknown request field %r is ignored", name)


def near_miss(name: str, names: frozenset[str]) -> str | None:
    """Return the known name that a client has mistyped, if it has."""
    return _near_miss(name, names) if len(name) <= _MAX_NAME else None


@lru_cache(MAX_LOGGED)
def _near_miss(name: str, names: frozenset[str]) -> str | None:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    most = 0 if len(name) < 4 else 1 if len(name) < 8 else 2
    near = [
        one for one in sorted(names) if one[0] == name[:1] and len({*one} ^ {*name}) <= 2 * most
    ]
    pairs = ((edits, one) for edits in range(most + 1) for one in near)
    return next((one for edits, one in pairs if _is_near(name, one, edits)), None)


def _is_near(name: str, other: str, edits: int) -> bool:
    """Return whether up to `edits` edits make names equal; a swap of two letters is one edit."""
    if not name or not other or name == other:
        return abs(len(name) - len(other)) <= edits
    if name[0] == other[0]:
        return _is_near(name[1:], other[1:], edits)
    rests = [(name[1:], other), (name, other[1:]), (name[1:], other[1:])]
    if name[:2] == other[1::-1]:
        rests.append((name[2:], other[2:]))
    return edits > 0 and any(_is_near(*rest, edits - 1) for rest in rests)


@cache
def _known(kind: type[Struct]) -> _Known:
    (known, *_) = _kinds([inspect.type_info(kind)]).values()
    return known


def _kinds(structs: list[Any]) -> _Kinds:
    kinds: _Kinds = {}
    for struct in structs:
        fields = {field.encode_name: _structs(field.type) for field in struct.fields}
        names = frozenset([*fields, struct.tag_field] if struct.tag_field else fields)
        places = [
            _Place(name, inner[0].tag_field, _kinds(inner))
            for name, inner in fields.items()
            if inner
        ]
        kinds[struct.tag] = _Known(names, places)
    if len(structs) == 1:  # its tag may be missing
        kinds[None] = kinds[structs[0].tag]
    return kinds


def _structs(kind: inspect.Type) -> list[inspect.StructType]:
    """Return the structs that a value, or each item of it, may be."""
    match kind:
        case inspect.StructType():
            return [kind]
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            return _structs(inner)
        case inspect.UnionType(types=types):
            return [struct for one in types for struct in _structs(one)]
    return []
