"""Server-sent events, and work that ends when its client disconnects."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.protocol.client.session import RequestError, gather
from penstock.services.http.shared.connections import WRITER, ChunkWriter
from penstock.services.http.shared.errors import ENCODER, ApiError, as_api_error, note_failure

_log = logging.getLogger("http")
S = TypeVar("S")
T = TypeVar("T")
Body = Any  # body of an event: a Struct, or a map
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
# concurrent requests to the pipeline for one HTTP request: more would shut out other clients
MAX_OPEN = 256
DONE = b"data: [DONE]\n\n"
# seconds. `EventForm.keep_alive` is sent after one to two times as long without an event, because
# proxies close silent connections.
SILENCE = 15.0


class EventForm(ABC):
    """Form of an API's events. By default, events are maps, whose `type` is the event's name."""

    end = b""  # after the last event
    keep_alive = b": keep-alive\n\n"  # sent in silence; also starts the response

    def encode(self, bodies: Iterable[Body]) -> bytes:
        """Return the text of events with these bodies."""
        form = b"event: %b\ndata: %b\n\n"
        return b"".join([form % (body["type"].encode(), ENCODER.encode(body)) for body in bodies])

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[Body]:
        """Return the bodies of an error after the first event."""


class Chunks(EventForm):
    """OpenAI's chunks of chats and completions: events without a name."""

    end = DONE

    def encode(self, bodies: Iterable[Body]) -> bytes:
        return b"".join([b"data: %b\n\n" % ENCODER.encode(body) for body in bodies])

    def failed(self, error: ApiError) -> Iterable[Body]:
        return [error.body]


class EventStream(Response):
    """Server-sent events.

    The response starts with the first event. An earlier error has its own status; a later
    error is an event.
    """

    def __init__(
        self, form: EventForm, produce: Callable[["EventStream"], Coroutine[Any, Any, None]]
    ) -> None:
        """Prepare the stream. produce: coroutine that sends all events with `send`."""
        self._form = form
        self._produce = produce
        self._is_started = False
        self._num_sending = 0
        self._writer: ChunkWriter | None = None
        self._is_silent = True  # True if no event was sent since the timer was started
        self._keeper: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._writer = scope.get(WRITER)
        self._start_timer()
        try:
            await while_connected(receive, self._produce(self))
        except ClientDisconnect:
            return
        except Exception as error:
            if not self._is_started:
                raise
            if not isinstance(error, RequestError | ApiError):
                _log.exception("%r failed in its stream", scope["path"])
            note_failure(scope, as_api_error(error))
            await self.send(self._form.failed(as_api_error(error)), is_last=True)
        finally:
            self._timer.cancel()
            if self._keeper:
                self._keeper.cancel()

    async def send(self, bodies: Iterable[Body], is_last: bool = False) -> None:
        """Send each body as an event; after the last body, also the end of the stream."""
        data = self._form.encode(bodies)
        if is_last:
            data += self._form.end
        elif not data:
            return
        await self._send_encoded(data, is_last)

    @property
    def is_ready(self) -> bool:
        """True once the stream has begun, while its client reads: `write` need not wait then."""
        return self._is_started and self._writer is not None and self._writer.is_ready

    def write(self, bodies: Iterable[Body]) -> None:
        """Send each body as an event; to be called if `is_ready`."""
        if data := self._form.encode(bodies):
            self._is_silent = False
            self._writer.write(data)  # type: ignore[union-attr]

    async def _send_encoded(self, data: bytes, is_last: bool = False) -> None:
        """Send encoded events, or the end of the stream."""
        self._is_silent = False
        if self._writer:
            self._writer.flush()
        self._num_sending += 1  # a slow client may block this method
        if not self._is_started:
            self._is_started = True
            head = {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._num_sending -= 1

    def _start_timer(self) -> None:
        self._is_silent = True
        self._timer = asyncio.get_running_loop().call_later(SILENCE, self._end_timer)

    def _end_timer(self) -> None:
        if self._is_silent:
            self._keeper = asyncio.ensure_future(self._keep_alive())
        self._start_timer()

    async def _keep_alive(self) -> None:
        if self._is_silent and not self._num_sending:
            await self._send_encoded(self._form.keep_alive)


async def bounded(function: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S]) -> list[T]:
    """Return the results of all items like `gather`; at most MAX_OPEN are awaited at a time."""
    places = asyncio.Semaphore(MAX_OPEN)

    async def result(item: S) -> T:
        async with places:
            return await function(item)

    return await gather(map(result, items))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Raises ClientDisconnect if the client disconnects, and ApiError if the server stops.
    """
    task, is_lost = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal is_lost
        while not (await receive())["type"].endswith(".disconnect"):
            pass
        is_lost = bool(task and task.cancel())

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if task and is_lost and not task.uncancel():
            raise ClientDisconnect from None
        raise ApiError(503, "the server is stopping") from None
    finally:
        watcher.cancel()
