"""Bodies of requests: bytes to structs, and what is wrong with them."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from penstock.protocol.sockets import UNREADABLE
from penstock.services.http.errors import ApiError, explain

T = TypeVar("T")
_SPARE_DEPTH = 64
"""levels of nesting that a request may gain on its way"""


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
    except (*UNREADABLE, OverflowError) as error:
        raise ApiError(400, f"the body is no JSON that can be read: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}; it is to be a map")
    given = {name: value for name, value in raw.items() if value is not None}
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise explain(str(error), given) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep") from error


def decode_json(data: bytes | str) -> Any:
    """JSON that can be passed on in MessagePack. Raises as msgspec does, and OverflowError."""
    raw = deep = msgspec.json.decode(data)
    for _ in range(_SPARE_DEPTH):
        deep = [deep]
    msgspec.msgpack.encode(deep)
    return raw
