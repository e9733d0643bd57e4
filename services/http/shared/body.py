"""Bodies of requests: from bytes to structs."""

import re
import zlib
from codecs import BOM_UTF8
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
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
from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.unknown_fields import FIELDS, drop_unknown

T = TypeVar("T", bound=Struct)

_JSON_NAMES = {type(None): "null", list: "an array", str: "a string", bool: "a boolean"}
_JSON_NAMES |= {int: "a number", float: "a number"}
_GZIP = 16 + zlib.MAX_WBITS  # the format for `decompressobj`
# of a body in gzip; an empty one takes 20 bytes, and as much time as 10,000 bytes of text
MAX_MEMBERS = 16
_TOOL_TYPE = re.compile(r"tools\[\d+\]\.type")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the decompressed body, up to `max_bytes` long in either form. Raises ApiError."""
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

    Fields that `kind` does not have are ignored or refused, see `unknown_fields`.
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
