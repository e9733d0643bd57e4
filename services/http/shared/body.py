"""Bodies of requests: from bytes to structs.

Each field that Penstock does not have is ignored and named, or refused. A field in
`neutral_fields.json` is accepted with values that change nothing. Other values of the field would
change the answer, and are refused. A name that is similar to a known name is refused as mistyped.
All other fields are ignored: the log names each field once, and a response header names all of
them. Tools that a server may run itself, such as web search, are ignored in the same way.

Schemas and the arguments of calls and templates belong to the user, and are not examined.
"""

import logging
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, inspect
from starlette.requests import Request

from penstock.protocol.decoding import (
    MAX_DEPTH,
    TOO_MANY_PARTS,
    explain,
    has_too_many_parts,
    is_too_deep,
    undecodable_value,
)
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import ApiError, invalid

_log = logging.getLogger("http")
_VALUES = {"any value": object, "string": str, "boolean": bool, "object": dict}
MAX_UNKNOWN = 100  # in one request; clients that send every field of their API send 60
MAX_LOGGED = 256  # in one process: a client can invent any number of names
_MAX_NAME = 64  # characters of a name that are shown
_MAX_HEADER = 512
# places of objects that clients received and send back unchanged, or take from documents
_DATA = ("messages[]", "input[]", "system[]", "documents[]")
_logged: dict[str, set[str]] = {}  # sentence → logged names
# tools that a server may run itself; a date or a variant may follow: `web_search_20250305`
_DECLINED = re.compile(
    "(advisor|apply_patch|bash|browser_toolset|code_execution|code_interpreter|computer"
    "|file_search|image_generation|local_shell|mcp|memory|programmatic_tool_calling|shell"
    "|text_editor|tool_search|web_fetch|web_search)(_[a-z0-9_]*)?"
)
T = TypeVar("T", bound=Struct)

_JSON_NAMES = {type(None): "null", list: "an array", str: "a string", bool: "a boolean"}
_JSON_NAMES |= {int: "a number", float: "a number"}
_GZIP = 16 + zlib.MAX_WBITS  # the format for `decompressobj`
# members of a body in gzip; an empty member of 20 bytes takes as much time as 10,000 bytes of text
MAX_MEMBERS = 16
_TOOL_TYPE = re.compile(r"tools\[\d+\]\.type")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the decompressed body; both forms may have up to `max_bytes`. Raises ApiError."""
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip"):
        sentence = f"Content-Encoding: got {encoding!r}, expected gzip or identity"
        raise ApiError(415, sentence, headers={"Accept-Encoding": "gzip, identity"})
    _check_length(int(request.headers.get("content-length", 0)), max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        _check_length(len(body), max_bytes)
    text = bytes(body) if encoding == "identity" else _decompressed(bytes(body), max_bytes)
    text = text.removeprefix(BOM_UTF8)
    if has_too_many_parts(text):
        raise ApiError(400, f"the body: {TOO_MANY_PARTS}")
    return text


def _decompressed(body: bytes, max_bytes: int) -> bytes:
    """Return the text of up to MAX_MEMBERS members of gzip. Raises ApiError."""
    text = b""
    try:
        for _ in range(MAX_MEMBERS):
            unzip = zlib.decompressobj(_GZIP)
            text += unzip.decompress(body, max_bytes + 1 - len(text))
            _check_length(len(text), max_bytes)
            if not unzip.eof:
                raise zlib.error("its end is missing")
            body = unzip.unused_data
            if not body:
                return text
        raise zlib.error(f"got more than {MAX_MEMBERS} members")
    except zlib.error as error:
        raise ApiError(400, f"the body can't be decompressed as gzip: {error}") from error


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        sentence = f"the body: got more than {max_bytes} bytes, expected at most {max_bytes}"
        raise ApiError(413, sentence)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a JSON object as `kind`; a field that is null is left out. Raises ApiError.

    Fields that `kind` does not have are ignored or refused, as the module's docstring says.
    """
    raw = _decode_object(body)
    for name, value in raw.items():
        if name != "prompt" and is_too_deep(value):  # the type of `prompt` is checked below
            raise invalid(name, f"got more than {MAX_DEPTH} levels of nesting, which is the limit")
    names = FIELDS.renamed
    given = {names.get(name, name): value for name, value in raw.items() if value is not None}
    drop_unknown(given, kind)
    try:
        return _converted(given, kind)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), given, kind)
        if path and _TOOL_TYPE.fullmatch(path):
            message += "; only functions that the client runs are supported: leave other tools out"
        raise ApiError(400, message, path) from error


def _converted(given: dict[str, Any], kind: type[T]) -> T:
    """Convert fields. JSON has one type of numbers: `8.0` is an integer. Raises ValidationError."""
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError:
        floats = {name: value for name, value in given.items() if isinstance(value, float)}
        whole = {name: int(value) for name, value in floats.items() if value.is_integer()}
        return msgspec.convert(given | whole, kind, str_keys=True)


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        body.decode()  # msgspec counts bytes from the start of a string, not of the body
        raw = decode_json(body.removeprefix(BOM_UTF8))
    except DECODE_ERRORS as error:
        if found := undecodable_value(body):
            path, problem = found
            raise ApiError(400, f"{path or 'the body'}: {problem}", path or None) from error
        raise ApiError(400, f"the body: got invalid JSON ({error}), expected an object") from error
    if not isinstance(raw, dict):
        kind = _JSON_NAMES[type(raw)]
        raise ApiError(400, f"the body: got {kind}, expected a JSON object of the fields")
    return raw


def decode_json(data: bytes | str) -> Any:
    """Decode JSON that MessagePack can encode. Raises one of DECODE_ERRORS."""
    raw = msgspec.json.decode(data)
    msgspec.msgpack.encode(raw)
    return raw


class _NeutralFields(Struct, forbid_unknown_fields=True):
    # SGLang's name → ours
    renamed: dict[str, str]
    # fields about accounting, caches, back ends and missing parts of models → type of the value
    ignored: dict[str, Literal["any value", "string", "boolean", "object"]]
    # fields that change nothing in all objects of the body
    ignored_inside: frozenset[str]
    # field or path → values that change nothing, in addition to null
    neutral: dict[str, list[Any]]


FIELDS = msgspec.json.decode(
    Path(__file__).with_name("neutral_fields.json").read_bytes(), type=_NeutralFields
)
_Kinds = dict[Any, "_Known"]  # fields of the objects at a place, by tag; None: the only kind
_Path = tuple[Any, str, int | None] | None  # object's place: path of the parent, field, index
# (id of the object's known names, name of a field) → the field's path; empty: not reported
_Ignored = dict[tuple[int, str], str]


class _Place(NamedTuple):
    """A field whose value is an object, or a list of objects."""

    name: str
    tag: str | None
    kinds: _Kinds


class _Known(NamedTuple):
    """Known fields of an object, and the places among them that have objects inside."""

    names: frozenset[str]
    places: list[_Place]


def drop_unknown(body: dict[str, Any], kind: type[Struct]) -> None:
    """Remove and report the fields that `kind` does not have. Raises ApiError."""
    ignored: _Ignored = {}
    _drop(body, _known(kind), None, ignored)
    named = sorted(set(filter(None, ignored.values())))
    _report(b"x-ignored-fields", named, "the unknown request field %r is ignored")


def _drop(value: dict[str, Any], known: _Known, path: _Path, ignored: _Ignored) -> None:
    names, places = known
    if not names.issuperset(value):
        for name in [name for name in value if name not in names]:  # the first one is reported
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
    """Add an unknown field to `ignored`, unless its value matters. Raises ApiError."""
    path = _text(above, name)
    place = re.sub(r"\[\d+\]", "[]", path)
    expected, accepted = FIELDS.ignored.get(place), FIELDS.neutral.get(place)
    if expected:
        if not isinstance(value, _VALUES[expected]):
            raise invalid(path, f"got {_shown(value)}, expected {expected}")
    elif accepted is not None:
        if value not in accepted:
            neutral = " or ".join(repr(other) for other in accepted if other not in ({}, [], ""))
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


def _report(header: bytes, names: list[str], sentence: str) -> None:
    """Report left-out names: in a header of the response, and once in the log."""
    sender = caller.get(None)
    if names and sender and sender.headers is not None:
        shown = re.sub(r"[^\w.\[\], -]", "?", ", ".join(names), flags=re.ASCII)
        cut = shown if len(shown) <= _MAX_HEADER else f"{shown[:_MAX_HEADER]}..."
        sender.headers[header] = cut.encode()
    for name in names:
        logged = _logged.setdefault(sentence, set())
        if name not in logged and len(logged) < MAX_LOGGED:
            logged.add(name)
            _log.warning(sentence, name)


def near_miss(name: str, names: frozenset[str]) -> str | None:
    """Return the known name that a client has mistyped, or None."""
    return _near_miss(name, names) if len(name) <= _MAX_NAME else None


@lru_cache(MAX_LOGGED)
def _near_miss(name: str, names: frozenset[str]) -> str | None:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    most = 0 if len(name) < 4 else 1 if len(name) < 8 else 2
    near = [
        known
        for known in sorted(names)
        if known[0] == name[:1] and len({*known} ^ {*name}) <= 2 * most
    ]
    pairs = ((edits, known) for edits in range(most + 1) for known in near)
    return next((known for edits, known in pairs if _is_near(name, known, edits)), None)


def _is_near(name: str, other: str, edits: int) -> bool:
    """Return whether at most `edits` edits make names equal. A swap of two letters is an edit."""
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
    if len(structs) == 1:  # the tag may be missing
        kinds[None] = kinds[structs[0].tag]
    return kinds


def _structs(kind: inspect.Type) -> list[inspect.StructType]:
    """Return the possible structs of a value, or of the items of a list."""
    match kind:
        case inspect.StructType():
            return [kind]
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            return _structs(inner)
        case inspect.UnionType(types=types):
            return [struct for kind in types for struct in _structs(kind)]
    return []


def is_declined(kind: str | None) -> bool:
    """Return whether a tool of this type (OpenAI's or Anthropic's) is left out."""
    return kind is not None and _DECLINED.fullmatch(kind) is not None


def report_declined(kinds: Iterable[str]) -> None:
    """Report left-out tools: in a header of the response, and once in the log."""
    names = sorted({found[1] for kind in kinds if (found := _DECLINED.fullmatch(kind))})
    sentence = "requests have tools of type %s: left out, as Penstock runs none"
    _report(b"x-ignored-tools", names, sentence)


def refuse_forced(field: str, got: str, kinds: Iterable[str]) -> None:
    """Raise ApiError if a call is forced, but its tools (of types `kinds`) are left out."""
    if which := ", ".join(sorted(set(kinds))):
        problem = f"got {got!r:.200}, expected 'auto' or 'none'"
        raise invalid(field, f"{problem}: Penstock does not run tools of type {which:.200}")
