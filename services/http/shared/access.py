"""The outermost layer of HTTP: sender, access and id of each request."""

import contextlib
import hmac
import logging
import re
import time
import uuid
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.protocol.config import Config
from penstock.protocol.messages.client import NO_CONTROL
from penstock.protocol.transport.context import is_loopback
from penstock.protocol.transport.process import FailureLog
from penstock.protocol.transport.socket_info import MAX_KNOWN, network_of
from penstock.services.http.shared.errors import (
    FAILURE,
    ApiError,
    error_response,
    is_for_anthropic,
)

_log = logging.getLogger("http")
_failures = FailureLog(_log)
_MAX_SHOWN = 100  # characters of a path in the log
_MAX_ID = 128  # characters of X-Request-Id; a longer id is replaced


class Caller(NamedTuple):
    """Sender of the request that this task handles."""

    client: str | None  # the remote address: fairness between clients depends on it
    request_id: str  # the header X-Request-Id; empty without this header
    unique_id: str
    key: str = ""  # the API key that was sent, valid or not; empty without a server key
    is_for_anthropic: bool = False  # True if the client expects Anthropic's shapes
    headers: dict[bytes, bytes] | None = None  # additional headers of the response


caller: ContextVar[Caller] = ContextVar("caller")


class Gate:
    """ASGI middleware that sets `caller` and refuses web pages that are not allowed.

    A slash at the end of a path is ignored, because not all clients follow redirections. Each
    response has the header X-Request-Id with the client's id or a new id; for Anthropic's clients,
    also as Request-Id.
    """

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._pages = PageRules(config)
        self._has_key = bool(config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scope["path"] = scope["path"].rstrip("/") or "/"
        request_id, encoding = _request_id(headers)
        key = _key_of(headers) if self._has_key else ""
        form = is_for_anthropic(scope["path"], headers)
        sender = Caller(_client_name(scope), request_id, uuid.uuid4().hex, key, form, {})
        caller.set(sender)
        begin, status = time.monotonic(), 0
        name = (request_id or sender.unique_id).encode(encoding)
        own = {b"x-request-id": name} | ({b"request-id": name} if form else {})

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = own | (sender.headers or {})
                message["headers"] = [*message.get("headers", ()), *added.items()]
            await send(message)

        refusal = self._pages.refusal(headers)
        app = error_response(refusal, form) if refusal else self._app
        await app(scope, receive, send_with_id)
        failure = scope.get(FAILURE) or (status >= 400 and status != 499 and "refused")
        if failure or _log.isEnabledFor(logging.DEBUG):
            _write_line(scope, sender, status, time.monotonic() - begin, failure)


def _write_line(
    scope: Scope, sender: Caller, status: int, seconds: float, failure: str | bool
) -> None:
    """Log a request without its text, at level `info` if it failed, otherwise at `debug`."""
    request_id = sender.request_id or sender.unique_id
    text = "%s %s %r: %d after %.0f ms, X-Request-Id %r"
    method, path = scope["method"], scope["path"][:_MAX_SHOWN]
    values = (sender.client, method, path, status, seconds * 1000, request_id)
    if failure:
        _failures.write(f"{text}: %s", *values, failure, request_id=request_id)
    else:
        _log.debug(text, *values, extra={"request_id": request_id})


class PageRules:
    """Rules against web pages that access a server without a key through its user's browser.

    Any page may send requests to this machine; the browser adds the page's `Origin`. A page whose
    name was pointed at this machine (DNS rebinding) has the server's origin, but its own `Host`.
    """

    def __init__(self, config: Config) -> None:
        self._origins = frozenset(map(str.lower, config.origins))
        self._is_off = bool(config.api_key) or "*" in self._origins
        host = config.http_host
        self._checks_host = is_loopback(host)
        self._hosts = {"localhost", host.lower(), *map(_host_of, self._origins)}

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return the error for a request from a page that is not allowed; None if it is allowed."""
        if self._is_off:
            return None
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        is_own = host and origin.partition("://")[2] == host
        if origin and not is_own and origin not in self._origins:
            return ApiError(
                403,
                f"Origin: got {origin!r}, expected this server's or one of --allowed-origins: a "
                "server without --api-key refuses other web pages",
            )
        if host and self._checks_host and not self._is_known(_host_of(f"//{host}")):
            return ApiError(
                403,
                f"Host: got {host!r}, expected an IP address, localhost or a host of "
                "--allowed-origins: a server without --api-key has no other name",
            )
        return None

    def _is_known(self, host: str) -> bool:
        host = host.rstrip(".")
        return host in self._hosts or host.endswith(".localhost") or _is_address(host)


@lru_cache(MAX_KNOWN)
def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ip_address(host))
    return False


@lru_cache(MAX_KNOWN)
def _host_of(url: str) -> str:
    """Return the host's name in lower case, without brackets; empty for a malformed URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _request_id(headers: Headers) -> tuple[str, str]:
    """Return the header X-Request-Id, and its encoding: UTF-8, or HTTP's older Latin-1.

    The id is empty if the header is too long or has control characters.
    """
    value, encoding = headers.get("x-request-id", ""), "latin-1"
    with contextlib.suppress(UnicodeDecodeError):
        value, encoding = value.encode("latin-1").decode(), "utf-8"
    is_valid = len(value) <= _MAX_ID and re.match(NO_CONTROL, value)
    return value if is_valid else "", encoding


def _client_name(scope: Scope) -> str | None:
    """Return the remote address, or its network for IPv6; None for a Unix socket.

    For a proxy on this machine, uvicorn has already set the address from `X-Forwarded-For`.
    """
    return network_of(scope["client"][0] if scope.get("client") else "") or None


def _key_of(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def check_key(given: str, key: str) -> None:
    """Raise ApiError for a wrong key. Clients send a key in UTF-8 or Latin-1.

    Both comparisons take constant time.
    """
    forms = [key.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    matches = [hmac.compare_digest(given.encode("latin-1"), form) for form in forms]
    if not any(matches):
        sentence = "API key: got a wrong one or none; send `Authorization: Bearer KEY`"
        sentence += " or `X-API-Key: KEY`"
        raise ApiError(401, sentence, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
