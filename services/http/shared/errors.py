"""Errors in OpenAI's shape, or in Anthropic's."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.chat import MessageError

ENCODER = msgspec.json.Encoder()
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ANTHROPIC_STATUSES = {503: 529}  # status → Anthropic's status of the same error
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_HEADER = "anthropic-version"
_RETRY = {"Retry-After": "1"}
FAILURE = "penstock.failure"  # key of a scope: type and field of the error of its request
# OpenAI's code for a prompt that is too long, which clients look for
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
FieldAsSent = Callable[[str], str | None]


def json_response(body: object, status: int = 200) -> Response:
    """Return a response with a body in JSON."""
    return Response(ENCODER.encode(body), status, media_type="application/json")


class ErrorDetail(Struct, kw_only=True):
    """Message, OpenAI's type, name of the invalid field, and OpenAI's code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, kw_only=True):
    """Body of every response with an error."""

    error: ErrorDetail


class ApiError(Exception):
    """A refused or failed request: HTTP status, message, invalid field and OpenAI's code.

    too_long: for a prompt that exceeds the context: number of its tokens, and the number that fit.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        too_long: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.too_long = too_long
        code = CONTEXT_LENGTH_EXCEEDED if too_long else code
        self.headers = headers or (_RETRY if status == 503 else {})
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def invalid(field: str, problem: str) -> ApiError:
    """Return the error of an invalid field. problem: `got X, expected Y`."""
    return ApiError(400, f"{field}: {problem}", field)


def as_api_error(error: Exception) -> ApiError:
    """Return the error that the client gets for any exception."""
    match error:
        case ApiError():
            return error
        case MessageError():
            return ApiError(400, str(error), error.field)
        case RequestError(code="invalid"):
            return ApiError(400, error.message, error.field, too_long=error.too_long)
        case RequestError(code="overloaded", retry_after=float() as seconds):
            headers = {"Retry-After": str(math.ceil(seconds))}
            return ApiError(429, error.message, None, "rate_limit_exceeded", headers)
        case RequestError(code="overloaded"):
            return ApiError(503, error.message)  # the pipeline is stopping
        case RequestError():
            return ApiError(500, error.message, error.field)  # `failed`: not the client's fault
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case _:
            return ApiError(500, "internal error; the server's log has the details")


async def answer_error(request: HTTPConnection, error: Exception) -> Response:
    """Return the response to an exception, like an exception handler of starlette."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads the response
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        expected = f"expected {error.headers['Allow']}" if error.headers else "which is not a route"
        where = f"{request['method']} {request.url.path}"
        error.detail = f"got {where}, {expected}; /openapi.json lists the routes"
    form = is_for_anthropic(request.url.path, request.headers)
    known = as_api_error(error)
    note_failure(request.scope, known)
    return error_response(known, form)


def note_failure(scope: Scope, error: ApiError) -> None:
    """Keep the error's type and field for the log; the message may have text of the client."""
    detail = error.body.error
    field = f" of {detail.param[:100]!r}" if detail.param else ""
    scope[FAILURE] = f"{detail.code or detail.type}{field}"


def error_response(error: ApiError, for_anthropic: bool) -> Response:
    """Return the response of an error, in OpenAI's or Anthropic's shape."""
    if for_anthropic:
        status = _ANTHROPIC_STATUSES.get(error.status, error.status)
        response = json_response(messages_error(error), status)
    else:
        response = json_response(error.body, error.status)
    response.headers.update(error.headers)
    return response


@contextmanager
def fields_as_sent(field_as_sent: FieldAsSent) -> Iterator[None]:
    """Rename the fields of errors. field_as_sent: maps our name of a field to the client's name."""
    try:
        yield
    except (ApiError, MessageError, RequestError) as error:
        old = as_api_error(error)
        detail = old.body.error
        name = detail.param and field_as_sent(detail.param)
        if not detail.param or not name or name == detail.param:
            raise
        message = detail.message.replace(detail.param, name, 1)
        raise ApiError(old.status, message, name, detail.code, old.headers, old.too_long) from error


def is_for_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request expects Anthropic's shapes of models and errors."""
    return path.startswith(_ANTHROPIC_PATH) or _ANTHROPIC_HEADER in headers


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's shape, or its event in a stream."""
    message, code = str(error), error.body.error.code
    if error.too_long:  # clients look for this sentence
        message = "prompt is too long: {} tokens > {} maximum".format(*error.too_long)
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    # clients act on `thread_unsupported_request`
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
