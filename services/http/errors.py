"""What goes wrong, in OpenAI's shape."""

import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.protocol.client.errors import RequestError
from penstock.services.http.replies import ErrorBody, ErrorDetail, json_response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 60
"""characters of a bad value that an error repeats"""


class ApiError(Exception):
    """A request that is not answered: status, a sentence, the field and OpenAI's code."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def as_api_error(error: Exception) -> ApiError:
    """Any exception, as the client is to see it."""
    match error:
        case ApiError():
            return error
        case RequestError(code="invalid"):
            return ApiError(400, error.message, error.field)
        case RequestError(code="overloaded", retry_after=float() as seconds):
            headers = {"Retry-After": str(math.ceil(seconds))}
            return ApiError(429, error.message, None, "rate_limit_exceeded", headers)
        case RequestError(code="overloaded"):
            return ApiError(503, error.message)  # it stops
        case RequestError():
            return ApiError(500, error.message, error.field)  # `failed`: not the client's fault
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            return ApiError(500, "something went wrong here; the server's log says what")


async def answer_error(_: Request, error: Exception) -> Response:
    """An exception handler of starlette."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    api_error = as_api_error(error)
    response = json_response(api_error.body, api_error.status)
    response.headers.update(api_error.headers)
    return response


def explain(error: str, raw: Any) -> ApiError:
    """msgspec's sentence about `raw`, with the name of the field and its value."""
    limit, _, path = error.partition(" - at `")
    if unknown := re.search(r"unknown field `(.*)`", limit):
        return ApiError(400, f"{unknown[1]} is not a field of this request", unknown[1])
    if missing := re.search(r"missing required field `(.*)`", limit):
        return ApiError(400, f"{missing[1]} is missing", missing[1])
    path = path.rpartition("$.")[2].rstrip("`")
    field = re.split(r"[.\[]", path)[0]
    if not field:
        return ApiError(400, error)
    sentence = f"{path}{_shown(raw, path)}: {limit[0].lower()}{limit[1:]}"
    return ApiError(400, sentence, field)


def _shown(raw: Any, path: str) -> str:
    """The value at msgspec's path `messages[0].role`, cut where it is long."""
    try:
        for part in re.findall(r"[^.\[\]]+", path):
            raw = raw[int(part) if isinstance(raw, list) else part]
        value = repr(raw)
    except (LookupError, RecursionError, TypeError, ValueError):
        return ""  # msgspec shows keys of maps as dots
    return f" is {value}" if len(value) <= _SHOWN else f" is {value[:_SHOWN]}…"
