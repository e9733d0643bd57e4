"""ASGI application: routes, the page and middleware."""

import asyncio
import logging
import mimetypes
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.protocol.client.session import RequestError
from penstock.protocol.config import DISTRIBUTION
from penstock.protocol.messages.chat import MessageError
from penstock.services.http.generation.schema import ApiRequest
from penstock.services.http.shared.access import Gate, caller, check_key
from penstock.services.http.shared.app_state import Models, Operation
from penstock.services.http.shared.body import decode_body, read_body
from penstock.services.http.shared.connections import WEIGH
from penstock.services.http.shared.errors import ApiError, ErrorBody, answer_error
from penstock.services.http.shared.event_stream import while_connected
from penstock.services.http.shared.places import decoded_bytes

_log = logging.getLogger("http")
LARGE_BODY_BYTES = 1 << 16  # a larger body may take tens of milliseconds to decode
_HANDLED = (ApiError, MessageError, RequestError, HTTPException, ClientDisconnect)
# the page neither loads from nor sends to other servers
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


def describe(operations: Sequence[Operation], version: str) -> bytes:
    """Return the description of operations in OpenAPI 3.1."""
    pairs = ((operation.body, operation.reply) for operation in operations)
    types = [ErrorBody, *(kind for pair in pairs for kind in pair if kind)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for schema in components.values():
        if schema.get("additionalProperties") is False:  # HTTP ignores unknown fields of Structs
            del schema["additionalProperties"]
    contents = {
        str(kind): {"application/json": {"schema": schema}}
        for kind, schema in zip(types, schemas, strict=True)
    }
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(
            operation, contents
        )
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _operation(operation: Operation, contents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the description of a route. contents: schemas of bodies by type name."""
    content = contents[str(operation.reply)] if operation.reply else {}
    if operation.media_type:
        content = content | {operation.media_type: {"schema": {"type": "string"}}}
    described: dict[str, Any] = {
        "summary": (operation.run.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {"description": "An error.", "content": contents[str(ErrorBody)]},
        },
    }
    if operation.body:
        described["requestBody"] = {"required": True, "content": contents[str(operation.body)]}
    if not operation.is_open:
        described["security"] = [{"key": []}, {}]
    return described


def make_app(models: Models, operations: Sequence[Operation]) -> ASGIApp:
    """Return the ASGI application of all operations."""
    openapi = describe(operations, version(DISTRIBUTION))
    page = _page_endpoint()

    async def answer_openapi(_: Request) -> Response:
        return Response(openapi, media_type="application/json")

    decoding = asyncio.Lock()
    routes: list[BaseRoute] = [_route(operation, models, decoding) for operation in operations]
    routes += [
        Route("/openapi.json", answer_openapi),
        Route("/", page),
        Route("/page/{name}", page),
    ]
    app: ASGIApp = Errors(Router(routes))
    if models.config.origins:
        app = CORSMiddleware(
            app,
            allow_origins=models.config.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "X-Ignored-Tools", "Retry-After"],
        )
    return Gate(app, models.config)


class Errors:
    """ASGI middleware that answers exceptions. After a response's start uvicorn disconnects.

    This class replaces three of starlette's, and saves a fifth of a request's cost.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises HTTPException
        try:
            await self._router(scope, receive, send)
        except Exception as error:  # noqa: BLE001  answered and logged
            # an error that is raised again makes uvicorn close the connection
            if not isinstance(error, _HANDLED):
                _log.exception("%r failed", scope["path"])
            if isinstance(error, HTTPException) and error.status_code == 405:
                error.headers = {"Allow": self._methods(scope)}
            response = await answer_error(HTTPConnection(scope), error)
            await response(scope, receive, send)

    def _methods(self, scope: Scope) -> str:
        """Return the methods of a path; each method may have its own route."""
        routes = (route for route in self._router.routes if isinstance(route, Route))
        found = [route.methods or () for route in routes if route.matches(scope)[0] != Match.NONE]
        return ", ".join(sorted({method for methods in found for method in methods}))


def _page_endpoint() -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for the files of the page, which are read once; `/` is `index.html`."""
    files = {path.name: path.read_bytes() for path in (Path(__file__).parent / "page").iterdir()}

    async def answer_file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404)
        media_type = mimetypes.guess_type(name)[0]
        return Response(files[name], headers=_PAGE_HEADERS, media_type=media_type)

    return answer_file


class Endpoint:
    """ASGI application of one route."""

    def __init__(self, operation: Operation, models: Models, decoding: asyncio.Lock) -> None:
        self._operation, self._models = operation, models
        self._decoding = decoding  # lock for decoding large bodies, shared by all endpoints
        self._key = "" if operation.is_open else models.config.api_key
        self._max_bytes = models.max_batch_bytes if operation.is_batch else models.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given = await self._given(request)
        response = await while_connected(request.receive, self._answer(given))
        await response(scope, receive, send)

    async def _given(self, request: Request) -> Any:
        """Return the body or the parameters of a request. Raises ApiError."""
        if self._key:
            check_key(caller.get().key, self._key)
        if not self._operation.body:
            return {**request.query_params, **request.path_params}
        content = await read_body(request, self._max_bytes)
        weigh: Callable[[int], bool] | None = request.scope.get(WEIGH)
        if weigh and not weigh(decoded_bytes(content)):
            raise ApiError(503, "the server has no room for this request now")
        if len(content) <= LARGE_BODY_BYTES:
            body: Any = decode_body(content, self._operation.body)
        else:
            async with self._decoding:
                await asyncio.sleep(0)  # other requests get a turn between two large bodies
                body = decode_body(content, self._operation.body)
        body.model = body.model or None  # as in vLLM
        if isinstance(body, ApiRequest) and body.request_id is None:
            body.request_id = caller.get().request_id or None
        return body

    async def _answer(self, given: Any) -> Response:
        run, models = self._operation.run, self._models
        if not self._operation.body:
            return await run(models, given)
        return await run(await models.started(given.model), given)


def _route(operation: Operation, models: Models, decoding: asyncio.Lock) -> Route:
    path = operation.path.replace("{model}", "{model:path}")
    return Route(path, Endpoint(operation, models, decoding), methods=[operation.method])
