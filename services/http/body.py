"""Bodies of requests: bytes to structs, and what is wrong with them."""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from penstock.protocol.nesting import MAX_DEPTH, is_too_deep
from penstock.protocol.sockets import UNREADABLE
from penstock.services.http.errors import ApiError, explain
from penstock.services.http.neutral_fields import without_neutral

T = TypeVar("T", bound=Struct)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError where it is too long."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes, which is the limit")
    return bytes(body)


def decode_body(body: bytes, kind: type[T]) -> T:
    """A JSON map as `kind`; what is null in it counts as left out. Raises ApiError."""
    try:
        raw = decode_json(body)
    except UNREADABLE as error:
        raise ApiError(400, f"the body can't be decoded as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}; it is to be a map")
    for name, value in raw.items():
        if name != "prompt" and is_too_deep(value):  # its type is checked below
            message = f"{name} is nested more than {MAX_DEPTH} levels deep, which is the limit"
            raise ApiError(400, message, name)
    given = {name: value for name, value in raw.items() if value is not None}
    given = without_neutral(given, kind.__struct_fields__)
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise explain(str(error), given) from error


def decode_json(data: bytes | str) -> Any:
    """JSON that can be passed on in MessagePack. Raises one of UNREADABLE."""
    raw = msgspec.json.decode(data)
    msgspec.msgpack.encode(raw)
    return raw
