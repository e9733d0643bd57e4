"""`/v1/responses` as a WebSocket: several responses, one after the other, an event a message."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine, Iterable
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.chat import MessageError
from penstock.services.http.responses.events import Event, ResponseEvents
from penstock.services.http.responses.routes import Submitted, submit
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.responses.store import ResponseStore
from penstock.services.http.shared.access import caller, check_key
from penstock.services.http.shared.app_state import Models
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ApiError, as_api_error, invalid
from penstock.services.http.shared.event_stream import while_connected
from penstock.services.http.shared.json_response import ENCODER
from penstock.services.http.shared.websocket import CONNECTION, LimitedWebSocket

MAX_SECONDS = 3600.0
"""life of a connection, after which its client has to connect again"""
MAX_WAITING = 4
"""messages that arrive during a turn"""
LIMIT_REACHED = "websocket_connection_limit_reached"
_DISCONNECTED = (ClientDisconnect, ClientDisconnected)
_log = logging.getLogger("http")
T = TypeVar("T")


class CreateEvent(ResponsesRequest, kw_only=True, forbid_unknown_fields=True):
    """A client's message: the fields of `POST /v1/responses`, always for a stream."""

    type: Literal["response.create"]
    stream: bool = True


class ResponsesSocket:
    """ASGI application of WebSockets at `/v1/responses`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if key := self._models.config.api_key:
            check_key(caller.get().key, key)
        caller.set(caller.get()._replace(websocket=caller.get().unique_id))
        with contextlib.suppress(*_DISCONNECTED):
            await receive()  # the handshake
            await send({"type": "websocket.accept"})
            await Session(self._models, scope[CONNECTION], receive, send).run()


class Session:
    """One WebSocket: takes messages at any time, and answers them one after the other."""

    def __init__(
        self, models: Models, connection: LimitedWebSocket, receive: Receive, send: Send
    ) -> None:
        self._models = models
        self._responses = models.singletons.get(ResponseStore)
        self._connection = connection
        self._receive, self._send = receive, send
        self._end = asyncio.get_running_loop().time() + MAX_SECONDS
        self._waiting: asyncio.Queue[Message] = asyncio.Queue()
        self._num_unanswered = 0
        self._last = ""
        """id of the last response, which can be continued even without `store`"""

    async def run(self) -> None:
        """Answer messages until the time is over. Raises one of _DISCONNECTED before."""
        try:
            while True:
                await self._answer(await self._next())
        except ApiError as error:
            await self._send_error(error)
            await self._send({"type": "websocket.close", "code": 1012})
        finally:
            self._responses.forget(self._last)

    async def _next(self) -> Message:
        """Return the next message. Raises ApiError when the connection has lived long enough."""
        seconds = self._end - asyncio.get_running_loop().time()
        try:
            return await self._while_connected(asyncio.wait_for(self._waiting.get(), seconds))
        except TimeoutError:
            sentence = f"the connection was open for {MAX_SECONDS:g} s, which is the limit; "
            raise ApiError(400, f"{sentence}open a new one", None, LIMIT_REACHED) from None

    async def _while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        return await while_connected(self._take, work)

    async def _take(self) -> Message:
        """Receive a message, which waits for its turn; too many end the connection."""
        message = await self._receive()
        if message["type"] == "websocket.receive":
            if self._num_unanswered > MAX_WAITING:
                reason = f"got more than {MAX_WAITING} messages during a response"
                with contextlib.suppress(ClientDisconnected):
                    await self._send({"type": "websocket.close", "code": 1008, "reason": reason})
                return {"type": "websocket.disconnect"}
            self._num_unanswered += 1
            self._waiting.put_nowait(message)
        return message

    async def _answer(self, message: Message) -> None:
        """Make the response of a message. An error is an event; the connection stays."""
        caller.set(caller.get()._replace(unique_id=uuid.uuid4().hex))
        request, events = None, None
        self._connection.begin_turn()
        try:
            request = _decode(message)
            generation, events, _ = await self._while_connected(self._submit(request))
            await self._while_connected(generation.send_events(events, self))
        except _DISCONNECTED:
            raise
        except Exception as error:  # noqa: BLE001  sent and logged
            if not isinstance(error, ApiError | MessageError | RequestError):
                _log.exception("a response over a WebSocket failed")
            await self._fail(as_api_error(error), request, events)
        finally:
            if events and events.has_begun:
                self._responses.forget(self._last)
                self._last = events.response.id
            self._connection.end_turn()
            self._num_unanswered -= 1

    async def _submit(self, request: CreateEvent) -> Submitted:
        return submit(await self._models.started(request.model or None), request)

    async def _fail(
        self, error: ApiError, request: CreateEvent | None, events: ResponseEvents | None
    ) -> None:
        """Send an error, and forget the response that was to be continued."""
        if events and events.has_begun:
            await self.send(events.failed(error))
            return
        if request and request.previous_response_id:
            self._responses.forget(request.previous_response_id)
        await self._send_error(error)

    async def _send_error(self, error: ApiError) -> None:
        detail = error.body.error
        fields = msgspec.structs.asdict(detail) | {"code": detail.code or detail.type}
        if error.headers:
            fields["headers"] = dict(error.headers)
        await self.send([{"type": "error", "status": error.status, "error": fields}])

    @property
    def is_ready(self) -> bool:
        """True while `write` need not wait."""
        return self._connection.is_ready

    def write(self, bodies: Iterable[Event]) -> None:
        """Send events, where `is_ready`."""
        self._connection.write(map(ENCODER.encode, bodies))

    async def send(self, bodies: Iterable[Event], is_last: bool = False) -> None:  # noqa: ARG002
        """Send events; a slow client makes it wait. The last one has no mark."""
        for one in bodies:
            await self._send({"type": "websocket.send", "text": ENCODER.encode(one).decode()})


def _decode(message: Message) -> CreateEvent:
    """Return the request of a message. Raises ApiError."""
    text = message.get("text")
    if text is None:
        raise ApiError(400, "the message: got a binary one, expected text: a JSON object")
    request = decode_body(text.encode(), CreateEvent)
    if not request.stream:
        raise invalid("stream", "got false, expected true or nothing: a WebSocket always streams")
    if request.background:
        raise invalid("background", "got true, expected false or nothing over a WebSocket")
    return request
