"""The application: routes, the key, errors."""

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.protocol.client.errors import RequestError
from penstock.services.http.app_state import Service
from penstock.services.http.body import decode_body, read_body
from penstock.services.http.caller import caller, name_of
from penstock.services.http.errors import ApiError, answer_error
from penstock.services.http.openapi import describe
from penstock.services.http.page import Page
from penstock.services.http.routes import Operation, Routes
from penstock.services.http.schema import ApiRequest

Endpoint = Callable[[Request], Awaitable[Response]]
_MAX_ID = 128
"""characters of X-Request-Id that a reply's id repeats"""
_HANDLED = (ApiError, RequestError, HTTPException, ClientDisconnect, Exception)


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    operations = Routes(service).table()
    openapi = describe(operations, version("penstock"))
    page = Page()

    async def describe_all(_: Request) -> Response:
        return Response(openapi, media_type="application/json")

    routes = [_route(operation, service) for operation in operations]
    routes += [
        Route("/openapi.json", describe_all),
        Route("/", page.answer),
        Route("/page/{name}", page.answer),
    ]
    return Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(_HANDLED, answer_error),
        middleware=_middleware(service.config.origins),
    )


def _middleware(origins: list[str]) -> list[Middleware]:
    middleware = [Middleware(TrailingSlashes)]
    if origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    return middleware


class TrailingSlashes:
    """Answers `/v1/models/` as `/v1/models`: not all clients follow a redirection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def _route(operation: Operation, service: Service) -> Route:
    config = service.config

    async def endpoint(request: Request) -> Response:
        if config.api_key and not operation.is_open:
            _check_key(request, config.api_key)
        caller.set(name_of(request))
        given: Any = request.path_params
        if operation.body:
            body = await read_body(request, service.max_request_bytes)
            given = decode_body(body, operation.body)
            if isinstance(given, ApiRequest) and given.request_id is None:
                given.request_id = request.headers.get("x-request-id", "")[:_MAX_ID] or None
        try:
            return await operation.run(given, request.receive)
        except asyncio.CancelledError:  # uvicorn does that to what is not finished in time
            raise ApiError(503, "this server stops") from None

    path = operation.path.replace("{model}", "{model:path}")
    return Route(path, endpoint, methods=[operation.method])


def _check_key(request: Request, key: str) -> None:
    """Raises ApiError. A key comes in UTF-8 or, from some clients, in Latin-1; both are compared in
    the same time, whatever the key that was given is."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    forms = [key.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    matches = [hmac.compare_digest(given.encode("latin-1"), form) for form in forms]
    if not any(matches):
        headers = {"WWW-Authenticate": "Bearer"}
        sentence = "the key is wrong, or missing: `Authorization: Bearer KEY`"
        raise ApiError(401, sentence, None, "invalid_api_key", headers)
