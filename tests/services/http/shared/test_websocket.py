"""WebSockets that send too much, junk or nothing, read nothing, or are too many."""

import socket
import threading
from typing import Any

import pytest

from penstock.protocol.client import session
from penstock.services.http.responses.session import Session
from penstock.services.http.shared.connections import Limits
from penstock.services.http.shared.websocket import LimitedWebSocket
from tests.services.http.conftest import NUM_AT_START, Served
from tests.services.http.flood import flood
from tests.services.http.shared.test_connections import (
    FAR_TOO_MUCH,
    GET,
    Connect,
    Serve,
    connect,
    get_version,
    rest,
    sent_until_closed,
    silent,
)

pytestmark = pytest.mark.slow

__all__ = ["connect"]
UPGRADE = (
    b"Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
OPEN = GET.replace(b"/version", b"/v1/responses/?x=y") + UPGRADE
MASK = bytes(4)
CREATE = b'{"type": "response.create", "input": "hi"}'


def frame(head: int, data: bytes = b"") -> bytes:
    """Return a client's frame. head: the final bit and the opcode."""
    length = len(data)
    if length < 126:
        return bytes([head, 0x80 | length]) + MASK + data
    if length < 1 << 16:
        return bytes([head, 0xFE]) + length.to_bytes(2) + MASK + data
    return bytes([head, 0xFF]) + length.to_bytes(8) + MASK + data


def opened(served: Served, connect: Connect) -> socket.socket:
    """Return a connection after its handshake."""
    connection = connect(served)
    connection.sendall(OPEN + b"\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += connection.recv(1)
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"Sec-WebSocket-Extensions" not in answer
    return connection


def close_code(connection: socket.socket) -> int:
    """Return the code of the only frame that comes before the end."""
    data = rest(connection)
    assert data[0] == 0x88
    return int.from_bytes(data[2:4])


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
        (frame(0x80), 1002),
        (bytes([0x81, 2]) + b"{}", 1002),  # not masked
        (frame(0x83), 1002),
        (frame(0x81, b"\xff"), 1007),
        (frame(0x81, b"a" * 1001), 1009),
        (frame(0x01, b"a" * 600) + frame(0x80, b"a" * 600), 1009),
        (bytes([0x81, 0xFF]) + (1 << 62).to_bytes(8), 1009),
        (frame(0x88, (1000).to_bytes(2)), 1000),
    ],
)
def test_frames_that_end_the_connection(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture, sent: bytes, code: int
) -> None:
    connection = opened(serve(max_request_bytes=1000), connect)
    connection.sendall(sent)
    assert close_code(connection) == code
    assert caplog.messages == []


@pytest.mark.parametrize("piece", [frame(0x00), frame(0x00) + frame(0x89, b"ping")])
def test_a_message_of_endless_frames(serve: Serve, connect: Connect, piece: bytes) -> None:
    connection = opened(serve(), connect)
    connection.sendall(frame(0x01))
    assert sent_until_closed(connection, piece * 1000) < FAR_TOO_MUCH


@pytest.mark.parametrize("piece", [frame(0x89, b"x" * 125), frame(0x81)])
def test_a_client_that_sends_and_does_not_read(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    """Replies to pings and errors must not pile up for a client that does not read.

    It does not answer the end of the connection, either, for which uvicorn waits 10 s.
    """

    def connection_made(self: LimitedWebSocket, transport: Any) -> None:
        made(self, transport)
        self.close_timeout = 0.3

    made = LimitedWebSocket.connection_made
    monkeypatch.setattr(LimitedWebSocket, "connection_made", connection_made)
    connection = opened(serve(limits=Limits(write_seconds=0.3)), connect)
    assert sent_until_closed(connection, piece * 1000) < FAR_TOO_MUCH


def test_nothing_is_read_while_the_client_reads_nothing(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when a message is taken that came before: pings could follow it."""
    is_reading: list[bool] = []
    is_taken = threading.Event()

    async def write_and_take(one: Session) -> None:
        connection = one._connection
        await connection.receive()
        is_reading.append(connection.transport.is_reading())
        while connection.is_ready:
            connection.write([bytes(1 << 16)])
        await connection.receive()
        is_reading.append(connection.transport.is_reading())
        is_taken.set()

    monkeypatch.setattr(Session, "run", write_and_take)
    served = serve()
    connection = opened(served, connect)
    with served.standing_still():
        connection.sendall(frame(0x81) + frame(0x81))
    assert is_taken.wait(60)
    assert is_reading == [False, False]  # the first one is followed by another


def test_a_client_that_does_not_read_its_events(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PATIENCE", 0.0)
    is_aborted = threading.Event()
    served = serve(flood(is_aborted), max_unread_bytes=1 << 20)
    opened(served, connect).sendall(frame(0x81, CREATE))
    assert is_aborted.wait(60)
    with served.client() as client:
        assert client.get("/version").status_code == 200


def test_idle_websockets_give_way_to_new_connections(serve: Serve, connect: Connect) -> None:
    served = serve(silent, limits=Limits(max_connections=2), drain_timeout=0)
    busy, idle = opened(served, connect), opened(served, connect)
    busy.sendall(frame(0x81, CREATE))
    served.asked.wait_for(NUM_AT_START + 1)
    get_version(connect(served))
    assert rest(idle) == b""
    served.stop()
    assert b'"status":503' in rest(busy)


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /version HTTP/1.1\r\n",
        b"GET /v1/models HTTP/1.1\r\n",
        b"GET /version HTTP/1.0\r\n",
    ],
)
def test_other_routes_ignore_the_upgrade(
    serve: Serve, connect: Connect, request_line: bytes
) -> None:
    connection = connect(serve())
    connection.sendall(request_line + b"Host: localhost\r\n" + UPGRADE + b"\r\n")
    assert connection.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (OPEN.replace(b"dGhl", b"?"), b"400"),
        (OPEN.replace(b"13", b"12"), b"400"),
        (OPEN.replace(b"GET", b"PUT"), b"405"),
        (OPEN.replace(b"1.1", b"1.0"), b"405"),
        (OPEN.replace(b"Host: localhost\r\n", b""), b"400"),
        (OPEN + b"Host: b\r\n", b"400"),
        (OPEN + b"X: a\r\n" * 150, b"400"),
        (OPEN + b"X: " + b"a" * 9000 + b"\r\n", b"400"),
    ],
)
def test_handshakes_that_are_refused(
    serve: Serve, connect: Connect, headers: bytes, status: bytes
) -> None:
    connection = connect(serve())
    connection.sendall(headers + b"\r\n")
    assert connection.recv(12) == b"HTTP/1.1 " + status


def test_a_request_before_the_handshake_is_answered_first(serve: Serve, connect: Connect) -> None:
    """The upgrade that follows it at once is ignored: both would write."""
    served = serve()
    connection = connect(served)
    with served.standing_still():
        connection.sendall(GET + b"\r\n" + OPEN + b"\r\n" + GET + b"Connection: close\r\n\r\n")
    statuses = [one[:3] for one in rest(connection).split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"405", b"200"]


def test_an_open_websocket_may_be_silent(serve: Serve, connect: Connect) -> None:
    served = serve(limits=Limits(read_seconds=0.2))
    connection, late = opened(served, connect), connect(served)
    late.sendall(OPEN)
    assert rest(late).startswith(b"HTTP/1.1 408 ")  # so that the limit of requests has gone by
    connection.sendall(frame(0x81, b"{"))
    assert connection.recv(1) == b"\x81"  # a text frame
