"""ASGI application: routes, the page and middleware."""

import asyncio
import logging
import mimetypes
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.chat import MessageError
from penstock.services.http.access import Gate, caller, check_key
from penstock.services.http.app_state import Models
from penstock.services.http.body import decode_body, read_body
from penstock.services.http.errors import ApiError, answer_error, as_api_error
from penstock.services.http.openapi import describe
from penstock.services.http.routes import Operation, Routes
from penstock.services.http.schema import ApiRequest

_log = logging.getLogger("http")
_HANDLED = (ApiError, MessageError, RequestError, HTTPException, ClientDisconnect)
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; font-src 'self'; img-src 'self' data:; "
        "script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""the page loads nothing from, and sends nothing to, other servers"""


def make_app(models: Models) -> ASGIApp:
    """Return the ASGI application."""
    operations = Routes(models).table()
    openapi = describe(operations, version("penstock"))
    page = _page_endpoint()

    async def answer_openapi(_: Request) -> Response:
        return Response(openapi, media_type="application/json")

    routes = [_route(operation, models) for operation in operations]
    routes += [
        Route("/openapi.json", answer_openapi),
        Route("/", page),
        Route("/page/{name}", page),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=models.config.origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys((*_HANDLED, Exception), answer_error),
        middleware=[cors] if models.config.origins else [],
    )
    return Gate(app, models.config)


def _page_endpoint(
    folder: Path = Path(__file__).parent / "page",
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for the files of a folder, read once; `/` is `index.html`."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def answer_file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404)
        media_type = mimetypes.guess_type(name)[0]
        return Response(files[name], headers=_PAGE_HEADERS, media_type=media_type)

    return answer_file


def _route(operation: Operation, models: Models) -> Route:
    key = "" if operation.is_open else models.config.api_key

    async def endpoint(request: Request) -> Response:
        if key:
            check_key(request.headers, key)
        given: Any = {**request.query_params, **request.path_params}
        if operation.body:
            is_batch = operation.is_batch
            limit = models.max_batch_bytes if is_batch else models.max_request_bytes
            body = await read_body(request, limit)
            given = decode_body(body, operation.body)
            if isinstance(given, ApiRequest) and given.request_id is None:
                given.request_id = caller.get().request_id or None
        try:
            return await operation.run(given, request.receive)
        except asyncio.CancelledError:  # uvicorn cancels what is not finished in time
            raise ApiError(503, "the server is stopping") from None
        except _HANDLED:
            raise
        except Exception as error:  # noqa: BLE001  answered and logged
            # starlette would raise it again after its answer, and uvicorn close the connection
            _log.exception("%s failed", operation.path)
            raise as_api_error(error) from None

    path = operation.path.replace("{model}", "{model:path}")
    return Route(path, endpoint, methods=[operation.method])
