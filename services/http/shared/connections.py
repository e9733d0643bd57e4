"""Limits of HTTP connections: size of headers, time of arrival, and number of connections.

The limits apply to every client that reaches the port, before a key is checked.
"""

import asyncio
import resource
from functools import partial
from typing import Any

import httptools
import msgspec
from msgspec import Struct
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.protocol.transport.socket_info import network_of
from penstock.services.http.shared.errors import ApiError
from penstock.services.http.shared.places import Places

# key of a response's `ChunkWriter` in the scope of its request, if the server has a writer
WRITER = "penstock.writer"
MIN_READ_RATE = 1000  # bytes/s at which a request must arrive
_CHUNK_FRAMING = 8  # framing bytes for each byte of a body in the smallest chunks
_HEADER_FRAMING = len(b": \r\n")
# seconds within which a request may still arrive on a connection of a stopping server
LAST_REQUEST = 0.5
_RESERVE = 128  # descriptors that are not for connections
WEIGH = "penstock.weigh"  # key of `Places.grow` for this connection in the scope of its request
_OVERLOADED = "the server has no room for more requests; the slowest one to arrive gives way"


class WriteBurst:
    """Writers of a server with waiting pieces; all are flushed in the loop's next turn."""

    def __init__(self) -> None:
        self._writers: list[ChunkWriter] = []

    def add(self, writer: "ChunkWriter") -> None:
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class ChunkWriter:
    """Writer of a response that has begun."""

    def __init__(self, cycle: RequestResponseCycle, burst: WriteBurst) -> None:
        self._cycle = cycle
        self._burst = burst
        self._pieces: list[bytes] = []

    @property
    def is_ready(self) -> bool:
        """True while the client reads; a response without chunks must be sent by ASGI."""
        return bool(self._cycle.chunked_encoding) and not self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._burst.add(self)
        self._pieces.append(data)

    def flush(self) -> None:
        """Write the waiting pieces, unless the client has disconnected."""
        if not self._pieces:
            return
        data, self._pieces = b"".join(self._pieces), []
        if not (self._cycle.disconnected or self._cycle.response_complete):
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def send_without_chunks(cycle: RequestResponseCycle, message: Message) -> None:
    """Send a part of a response to an HTTP/1.0 client, which does not support chunks.

    A body without a length lasts until the connection closes.
    """
    if message["type"] == "http.response.start":
        if all(name != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False  # otherwise uvicorn adds Transfer-Encoding
    else:
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares both
    await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of each connection, and of their number in this process."""

    max_header_bytes: int = 1 << 16  # size of the headers and of a chunked body's trailers
    max_body_bytes: int = 1 << 30  # size at which a client that ignores its refusal is disconnected
    # time for a request to arrive, in addition to its size / MIN_READ_RATE
    read_seconds: float = 20.0
    # time within which a client must read something while its output waits
    write_seconds: float = 75.0
    max_connections: int = 1 << 16
    max_open_bytes: int = 1 << 30  # bytes of requests that arrive or are being answered
    open_paths: frozenset[bytes] = frozenset()  # paths of health checks, which are never refused

    @property
    def max_requests(self) -> int:
        """Limit of open requests, to which a reserve is added; the other connections are idle."""
        return max(1, self.max_connections * 3 // 4)


def limits_for(max_request_bytes: int, max_answers: int, **fields: Any) -> Limits:
    """Return limits with several connections for each request, if there are enough descriptors.

    fields: further fields of Limits.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1024 + 4 * max_answers
    return Limits(
        max_body_bytes=max_request_bytes + (1 << 20),
        max_connections=max(1, min(most, soft - _RESERVE)) if soft >= 0 else most,
        **fields,
    )


class RequestParser(httptools.HttpRequestParser):
    """Parser that ignores the header `Upgrade`, with which httptools skips the request's body.

    Java's HttpClient and `curl --http2` send this header with each request. As in uvicorn, bytes
    after a request with `Connection: close` are not an error: the request is answered.
    """

    def __init__(self, protocol: "LimitedProtocol") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._protocol.parse_without_upgrade(data[upgrade.args[0] :])


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; `limited_protocol` makes a subclass for each server.

    The arrival of a request lasts from its first byte, or the start of the connection, to its last
    byte. A new connection beyond the limit closes the oldest connection without a request. A new
    request beyond the limit closes the connection of the slowest request that is still arriving.
    """

    limits: Limits
    places: Places
    burst: WriteBurst

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = RequestParser(self)
        self._read_timer: asyncio.TimerHandle | None = None
        # disconnects a client that does not read while its output waits
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # URL and complete headers of the arriving request
        self._is_stopping = False
        self._cycles: list[Any] = []
        self._is_refused = False
        self.host = network_of(self.client[0]) if self.client else ""
        self._begin_arrival()
        if too_many := self.places.connect(self):
            self.places.leave(too_many)
            too_many.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_arrival()
        if self._write_timer:
            self._write_timer.cancel()
        self.places.leave(self)
        for cycle in self._cycles:  # uvicorn notifies only the last cycle
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begin_arrival()
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        overhead = self._num_bytes - self._num_body_bytes
        if overhead > self.limits.max_header_bytes + _CHUNK_FRAMING * self._num_body_bytes:
            self._refuse_headers()
        elif self._num_body_bytes > self.limits.max_body_bytes:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._begin_arrival()

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value) + _HEADER_FRAMING
        if self._num_header_bytes > self.limits.max_header_bytes:
            raise ValueError  # stops the parser, which calls `send_400_response`
        super().on_header(name, value)

    def parse_without_upgrade(self, rest: bytes) -> None:
        """Parse a request's headers again, without `Upgrade`, and the bytes after the headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is for proxies")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = RequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and self.parser.get_http_version() == "1.1":
            raise ValueError  # as in `on_header`
        is_health_check = self.url.partition(b"?")[0] in self.limits.open_paths
        if not self.places.begin(self, must_have=is_health_check):
            self._is_refused = True
            raise ValueError  # as in `on_header`
        super().on_headers_complete()
        unanswered = (cycle for cycle in self._cycles if not cycle.response_complete)
        self._cycles = [*unanswered, self.cycle]
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_stopping
        self.scope[WRITER] = ChunkWriter(self.cycle, self.burst)  # type: ignore[literal-required]
        self.scope[WEIGH] = partial(self.places.grow, self)  # type: ignore[literal-required]
        if self.scope["http_version"] != "1.1":
            self.cycle.send = partial(send_without_chunks, self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if not self.places.grow(self, len(body)):
            self._is_refused = True
            raise ValueError  # as in `on_header`
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_arrival()
        self.places.arrived(self)
        super().on_message_complete()
        if self.cycle.response_complete:  # uvicorn has stopped the timer of idle connections
            self._begin_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.places.leave(self)
        elif self.cycle.response_complete:
            self.places.rest(self)
        elif self.cycle.more_body and not self.pipeline:
            self.places.arrives(self)

    def shutdown(self) -> None:
        """Close the connection after its requests, including a request that may be arriving.

        A client that keeps its connection open may send the next request at this moment.
        """
        self._is_stopping = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(LAST_REQUEST, super().shutdown)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer:
            self._write_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse an unreadable request; uvicorn's own answer is always 400, in plain text."""
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
        elif self._is_refused:
            self.give_way()
        else:
            self._refuse(400, "the request is not valid HTTP/1.1, with one header Host")

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def give_way(self) -> None:
        """Refuse the arriving request, and close the connection."""
        self._refuse(503, _OVERLOADED)

    @property
    def due(self) -> float:
        """The time by which the request must have arrived."""
        return self.began + self.limits.read_seconds + self._num_bytes / MIN_READ_RATE

    def _begin_arrival(self) -> None:
        if self._read_timer is None:
            self._num_bytes = self._num_body_bytes = 0
            self.began = self.loop.time()
            self._read_timer = self.loop.call_later(self.limits.read_seconds, self._check_time)

    def _end_arrival(self) -> None:
        if self._read_timer:
            self._read_timer.cancel()
            self._read_timer = None
            self._num_bytes = self._num_body_bytes = 0

    def _check_time(self) -> None:
        now, limit = self.loop.time(), self.limits.read_seconds
        due = now + limit  # no bytes are read now
        if not self.flow.read_paused:
            due = self.due
        if now < due:
            self._read_timer = self.loop.call_at(due, self._check_time)
        elif self._num_bytes:
            self._refuse(408, f"the request did not arrive within {due - self.began:.3g} s")
        else:
            self.transport.close()

    def _refuse_headers(self) -> None:
        most = self.limits.max_header_bytes
        self._refuse(431, f"headers: got more than {most} bytes, expected at most {most}")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, if no other response is due, and close the connection.

        A response is due if its request has arrived completely, or if the response has begun.
        """
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if is_idle or (cycle.more_body and not cycle.response_started and not self.pipeline):
            self.transport.write(refusal(status, message))
            if cycle is not None:
                cycle.disconnected = True  # so that the cycle's task stops sending
        self.transport.close()


def refusal(status: int, message: str) -> bytes:
    """Return the bytes of an error response that closes the connection."""
    error = ApiError(status, message)
    body = msgspec.json.encode(error.body)
    head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    head += b"".join(f"{name}: {value}\r\n".encode() for name, value in error.headers.items())
    return b"%b%bconnection: close\r\n\r\n%b" % (STATUS_LINE[status], head, body)


def limited_protocol(limits: Limits) -> type[LimitedProtocol]:
    """Return the protocol class for the connections of a server."""
    places = Places(limits.max_connections, limits.max_requests, limits.max_open_bytes)
    shared: dict[str, Any] = {"limits": limits, "places": places, "burst": WriteBurst()}
    return type("LimitedProtocol", (LimitedProtocol,), shared)
