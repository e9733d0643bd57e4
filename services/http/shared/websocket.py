"""Limits of WebSockets: uvicorn's protocol, which must neither grow nor wait for its client."""

from collections.abc import Iterable
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from penstock.services.http.shared.connections import LimitedProtocol, Limits, WriteTimer, refusal

CONNECTION = "penstock.websocket"
"""key of a WebSocket's `LimitedWebSocket` in its scope"""
MAX_FRAGMENTS = 1024
"""frames of a message"""
_HANDSHAKE = (
    "handshake: got a request that can't be read, expected no body, and up to 128 headers of "
    "up to 8192 bytes each"
)


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol with limits; `limited_websocket` makes a subclass for each server.

    Between two turns of its client, it counts as a connection without a running request.
    """

    limits: Limits
    without_request: dict[Any, None]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._is_stopping = False
        self._write_timer = WriteTimer(transport, self.limits)
        self.without_request[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._write_timer.stop()
        self.without_request.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:  # uvicorn would leave the client waiting
            self.transport.write(refusal(400, _HANDSHAKE))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Take the next frame of a message; empty ones would be taken without end."""
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAGMENTS:
            self.frames = []
            self.conn.fail(CloseCode.POLICY_VIOLATION, f"got over {MAX_FRAGMENTS} frames a message")
            self.handle_parser_exception()

    async def run_asgi(self) -> None:
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        await super().run_asgi()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.close_sent:  # meanwhile; uvicorn would call this a defect
            raise ClientDisconnected
        await super().send(message)

    def pause_writing(self) -> None:
        """Read nothing from a client that reads nothing: its pings would be answered, too."""
        super().pause_writing()
        self.transport.pause_reading()
        self._write_timer.start()

    def resume_writing(self) -> None:
        self._write_timer.stop()
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """Close the connection; a turn may end before."""
        self._is_stopping = True
        if self in self.without_request:
            super().shutdown()

    def begin_turn(self) -> None:
        self.without_request.pop(self, None)

    def end_turn(self) -> None:
        if self.disconnected or self.conn.state is not State.OPEN:
            return
        if self._is_stopping:
            super().shutdown()
        else:
            self.without_request[self] = None

    @property
    def is_ready(self) -> bool:
        """True while the client reads, and the connection is open."""
        is_open = self.conn.state is State.OPEN and not self.disconnected
        return is_open and self.writable.is_set()

    def write(self, messages: Iterable[bytes]) -> None:
        """Send messages in a row, where `is_ready`: without ASGI's coroutines."""
        for message in messages:
            self.conn.send_text(message)
        self.transport.write(b"".join(self.conn.data_to_send()))


def limited_websocket(http: type[LimitedProtocol]) -> type[LimitedWebSocket]:
    """Return the class of one server's WebSockets, which share the limits of its connections."""
    shared = {"limits": http.limits, "without_request": http.without_request}
    return type("LimitedWebSocket", (LimitedWebSocket,), shared)
