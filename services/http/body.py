"""Bodies of requests: bytes to structs, and what is wrong with them."""

import zlib
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from penstock.protocol.field_errors import explain, out_of_range_field
from penstock.protocol.nesting import MAX_DEPTH, is_too_deep
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.errors import ApiError
from penstock.services.http.neutral_fields import without_neutral

T = TypeVar("T", bound=Struct)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, decompressed; neither form is longer than `max_bytes`. Raises ApiError."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        sentence = f"Content-Encoding: got {encoding!r}, expected gzip or identity"
        raise ApiError(415, sentence, headers={"Accept-Encoding": "gzip, identity"})
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body) if encoding == "identity" else _decompress(bytes(body), max_bytes)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    """Raises ApiError for what is not gzip, and as soon as the text is too long."""
    text = b""
    while body:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            text += member.decompress(body, max_bytes - len(text) + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body can't be decompressed as gzip: {error}") from error
        if len(text) > max_bytes:
            raise _too_long(max_bytes)
        if not member.eof:
            raise ApiError(400, "the body can't be decompressed as gzip: its end is missing")
        body = member.unused_data
    return text


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes, which is the limit")


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a JSON object as `kind`; a field that is null is left out. Raises ApiError."""
    raw = _decode_object(body)
    for name, value in raw.items():
        if name != "prompt" and is_too_deep(value):  # its type is checked below
            message = f"{name} is nested more than {MAX_DEPTH} levels deep, which is the limit"
            raise ApiError(400, message, name)
    given = {name: value for name, value in raw.items() if value is not None}
    given = without_neutral(given, kind.__struct_fields__)
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), given, kind)
        raise ApiError(400, message, path) from error


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        body.decode()  # msgspec counts bytes from the start of a string, not of the body
        raw = decode_json(body)
    except DECODE_ERRORS as error:
        if path := out_of_range_field(body):
            sentence = f"{path}: got a number out of range, expected at most 64 bits"
            raise ApiError(400, sentence, path) from error
        raise ApiError(400, f"the body can't be decoded as JSON: {error}") from error
    if not isinstance(raw, dict):
        kind = type(raw).__name__
        raise ApiError(400, f"the body: got a JSON {kind}, expected an object of the fields")
    return raw


def decode_json(data: bytes | str) -> Any:
    """Decode JSON that MessagePack can encode. Raises one of DECODE_ERRORS."""
    raw = msgspec.json.decode(data)
    msgspec.msgpack.encode(raw)
    return raw
