"""Errors in Anthropic's shape."""

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
STATUSES = {503: 529}
"""status → Anthropic's for the same error"""
_PREFIX = "/v1/messages"
_VERSION_HEADER = "anthropic-version"


def is_for_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request expects Anthropic's shapes: of models, and of errors."""
    return path.startswith(_PREFIX) or _VERSION_HEADER in headers


def messages_error(
    status: int, message: str, code: str | None, too_long: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the body of an error, or its event in a stream.

    status: of HTTP. code: clients act on `thread_unsupported_request`.
    too_long: tokens of a prompt, and how many fit; clients look for Anthropic's sentence.
    """
    if too_long:
        message = "prompt is too long: {} tokens > {} maximum".format(*too_long)
    kind = _TYPES.get(status, "invalid_request_error")
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
