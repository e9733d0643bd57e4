"""Connections that send too much, too slowly, or nothing, and how many there may be."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus

import pytest

from penstock.protocol.client import session
from penstock.protocol.messages.client import AbortRequest
from penstock.services.http.shared.connections import LimitedProtocol, Limits, limits_for
from tests.launch.fake_gateway import TEXT
from tests.services.http.conftest import NUM_AT_START, Serve, Served, silent
from tests.services.http.flood import flood
from tests.services.http.test_apis import answering

pytestmark = pytest.mark.slow

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "one"}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SHORT = Limits(read_seconds=0.3, write_seconds=0.3)
FAR_TOO_MUCH = 64 << 20


@pytest.fixture
def connect() -> Iterator[Callable[[Served], socket.socket]]:
    with ExitStack() as stack:

        def one(served: Served, host: str = "127.0.0.1") -> socket.socket:
            made = socket.create_connection(served.address, 60, source_address=(host, 0))
            return stack.enter_context(closing(made))

        yield one


def rest(connection: socket.socket) -> bytes:
    """Return the bytes that come until the server closes the connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionError:
        pass
    return data


def sent_until_closed(connection: socket.socket, piece: bytes) -> int:
    """Bytes that the server takes; FAR_TOO_MUCH if it does not mind."""
    sent = 0
    try:
        while sent < FAR_TOO_MUCH:
            connection.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


Connect = Callable[..., socket.socket]


def connect_and_send(served: Served, connect: Connect, data: bytes) -> socket.socket:
    """Return a connection on which data is sent before a time limit of the server begins."""
    with served.standing_still():
        connection = connect(served)
        connection.sendall(data)
    return connection


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 65_536),
        (GET + b"X-Long: ", b"a" * 65_536),
        (GET, b"X-Many: a\r\n" * 5000),
        (CHUNKED + b"0\r\n", b"X-Trailer: a\r\n" * 5000),
        (CHUNKED + b"1;", b"extension" * 5000),
        (CHUNKED, b"1000\r\n" + b"a" * 4096 + b"\r\n"),
        (GET + b"Content-Length: 999999999999\r\n\r\n", b"a" * 65_536),
        (b"", b"\r\n" * 30_000),
    ],
)
def test_endless_requests(serve: Serve, connect: Connect, begin: bytes, piece: bytes) -> None:
    connection = connect(serve(max_request_bytes=10_000))
    connection.sendall(begin)
    assert sent_until_closed(connection, piece) < FAR_TOO_MUCH


NO_HOST = b"GET /version HTTP/1.1\r\n"
NOT_HTTP = (400, "the request is not valid HTTP/1.1, with one header Host")
SOCKET = GET.replace(b"/version", b"/v1/responses") + b"Connection: Upgrade, close\r\n"
SOCKET += b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
SOCKET += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
TOO_LONG = (431, "headers: got more than 65536 bytes, expected at most 65536")
LONG = b"X: " + b"a" * (1 << 16)
CLOSE = b"Connection: close\r\n"
LAST = CLOSE + b"\r\n" + GET + b"\r\n" + b"zz\r\n\r\n"
SMALLEST = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(5000)) + b"0\r\n\r\n"
CLOSING_CHUNKED = POST + CLOSE + CHUNKED.removeprefix(POST)
ANSWERS: dict[str, tuple[bytes, tuple[int, str]]] = {
    "half a long header": (GET + LONG, TOO_LONG),
    "a long header": (GET + LONG + b"\r\n\r\n", TOO_LONG),
    "many headers": (GET + b"X: a\r\n" * 12_000 + b"\r\n", TOO_LONG),
    "a very long header": (GET + LONG + LONG[3:] + b"\r\n\r\n", TOO_LONG),
    "a long URL": (b"GET /version?" + LONG[3:] + GET[12:] + b"\r\n", TOO_LONG),
    "as long as it may be": (GET + CLOSE + LONG[:60_000] + b"\r\n\r\n", (200, "")),
    "TLS": (b"\x16\x03\x01 not HTTP\r\n\r\n", NOT_HTTP),
    "a chunk that is none": (CHUNKED + b"5\r\nabcde\r\nzz\r\n", (400, "")),
    "the smallest chunks": (CLOSING_CHUNKED + SMALLEST, (200, "")),
    "a WebSocket": (SOCKET + b"\r\n", (405, "got GET /v1/responses, expected POST")),
    "a proxy": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, "")),
    "no host": (NO_HOST + b"\r\n", NOT_HTTP),
    "two hosts": (NO_HOST + b"Host: a\r\nhost: a\r\n\r\n", NOT_HTTP),
    "an upgrade without host": (NO_HOST + b"Upgrade: h2c\r\n\r\n", NOT_HTTP),
    "HTTP/1.0 without host": (b"GET /version HTTP/1.0\r\n\r\n", (200, "")),
    "more after the last": (GET + LAST, (200, "")),
    "more after the last, which upgrades": (GET + b"Upgrade: h2c\r\n" + LAST, (200, "")),
}
OPTIONS = {
    "a chunk that is none": {"api_key": "key"},
    "the smallest chunks": {"limits": Limits(max_header_bytes=200)},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_to_what_is_odd(serve: Serve, connect: Connect, name: str) -> None:
    data, (status, sentence) = ANSWERS[name]
    connection = connect(serve(**OPTIONS.get(name, {})))
    connection.sendall(data)
    answer = rest(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode()))
    assert b"content-type: application/json" in head
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status == 200 or sentence in json.loads(body)["error"]["message"]


def test_a_running_request_is_not_answered_with_the_next_ones_error(
    serve: Serve, connect: Connect
) -> None:
    served = serve(silent)
    connection = connect(served)
    connection.sendall(WHOLE)
    served.asked.wait_for(NUM_AT_START + 1)
    connection.sendall(CHUNKED + b"zz\r\n")
    assert rest(connection) == b""
    served.asked.wait_for(NUM_AT_START + 2)
    assert isinstance(served.asked.heard[-1], AbortRequest)  # it ends with its connection


def test_a_content_length_above_the_limit_is_a_413_at_once(serve: Serve, connect: Connect) -> None:
    connection = connect(serve(max_request_bytes=10_000))
    connection.sendall(POST + b"Content-Length: 10001\r\n\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (b"", b""),
        (b"GET /vers", b"HTTP/1.1 408 Request Timeout\r\n"),
        (GET, b"HTTP/1.1 408 Request Timeout\r\n"),
        (WHOLE[:-3], b"HTTP/1.1 408 Request Timeout\r\n"),
        (CHUNKED + b"0\r\n", b"HTTP/1.1 408 Request Timeout\r\n"),
    ],
)
def test_requests_that_do_not_arrive(
    serve: Serve, connect: Connect, begin: bytes, answer: bytes
) -> None:
    connection = connect_and_send(serve(limits=SHORT), connect, begin)
    assert rest(connection)[: len(answer) or None] == answer


def test_the_second_request_of_a_connection_has_a_limit(serve: Serve, connect: Connect) -> None:
    connection = connect_and_send(serve(limits=SHORT), connect, GET + b"\r\n")
    receive_version(connection)
    connection.sendall(b"\r\n")
    assert rest(connection).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_after_its_answer(serve: Serve, connect: Connect) -> None:
    connection = connect_and_send(serve(limits=SHORT, api_key="key"), connect, WHOLE[:-3])
    assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")
    connection.sendall(WHOLE[-3:])
    assert b"HTTP/1.1 " not in rest(connection)


def test_an_answer_may_take_longer(serve: Serve, connect: Connect) -> None:
    served = serve(silent, limits=SHORT, drain_timeout=0)
    patient = connect_and_send(served, connect, WHOLE)
    slow = connect_and_send(served, connect, WHOLE[:-3])
    assert rest(slow).startswith(b"HTTP/1.1 408 ")
    late = connect(served)
    assert rest(late) == b""  # so that much more than the limit has gone by
    served.stop()
    assert rest(patient).startswith(b"HTTP/1.1 503 ")


def test_a_stream_that_its_client_does_not_read_is_aborted(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of its streams is limited, and others are answered."""
    monkeypatch.setattr(session, "PATIENCE", 0.0)
    is_aborted = threading.Event()
    served = serve(flood(is_aborted), max_unread_bytes=1 << 20)
    body = b'{"prompt": "one", "stream": true}'
    connect(served).sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert is_aborted.wait(60)
    with served.client() as client:
        assert client.post("/v1/completions", json={"prompt": "two"}).status_code == 200


def test_a_client_that_does_not_read(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    lost = LimitedProtocol.connection_lost

    def connection_lost(self: LimitedProtocol, error: Exception | None) -> None:
        lost(self, error)
        closed.set()

    monkeypatch.setattr(LimitedProtocol, "connection_lost", connection_lost)
    connection = connect(serve(limits=Limits(write_seconds=0.3)))
    connection.sendall((GET.replace(b"version", b"openapi.json") + b"\r\n") * 2000)
    assert closed.wait(60)
    assert 0 < rest(connection).count(b"HTTP/1.1 200 OK\r\n") < 2000


def get_version(connection: socket.socket) -> None:
    connection.sendall(GET + b"\r\n")
    receive_version(connection)


def receive_version(connection: socket.socket) -> None:
    answer = b""
    while not answer.endswith(b"}"):
        piece = connection.recv(1000)
        assert piece
        answer += piece


def test_a_new_connection_takes_the_place_of_the_oldest_without_request(
    serve: Serve, connect: Connect
) -> None:
    served = serve(silent, limits=Limits(max_connections=3), drain_timeout=0)
    busy = connect(served)
    busy.sendall(WHOLE)
    served.asked.wait_for(NUM_AT_START + 1)
    first, second = connect(served), connect(served)
    third = connect(served)
    assert rest(first) == b""
    get_version(second)
    get_version(third)
    fourth = connect(served)
    assert rest(second) == b""
    get_version(fourth)
    served.stop()
    assert rest(busy).startswith(b"HTTP/1.1 503 ")


def begin_body(connection: socket.socket, body: bytes = b"{", size: int = 200_000) -> socket.socket:
    """Send a part of a body, of which the server has taken note."""
    head = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % size
    connection.sendall(head)
    assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
    connection.sendall(body)
    return connection


def is_open(connection: socket.socket) -> bool:
    """Return whether the server, which has handled all before, has neither answered nor closed."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


def test_slow_bodies_give_way(serve: Serve, connect: Connect) -> None:
    served = serve(limits=Limits(max_connections=8))
    slow = [begin_body(connect(served)) for _ in range(12)]
    for connection in slow[:6]:
        assert b"HTTP/1.1 503 " in (answer := rest(connection))
        assert b"Retry-After: 1\r\n" in answer
    new = connect(served)
    get_version(new)
    new.sendall(WHOLE)
    assert new.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert sum(map(is_open, slow[6:])) == 5


def test_the_slowest_body_gives_way(serve: Serve, connect: Connect) -> None:
    served = serve(limits=Limits(max_connections=8))
    fast = begin_body(connect(served), BODY + b" " * 100_000)
    for _ in range(12):
        begin_body(connect(served))
    fast.sendall(b" " * (200_000 - 100_000 - len(BODY)))
    assert fast.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_bodies_of_one_address_do_not_push_out_those_of_another(
    serve: Serve, connect: Connect
) -> None:
    served = serve(limits=Limits(max_connections=8))
    other = begin_body(connect(served, host="127.0.0.2"), BODY)
    for _ in range(20):
        begin_body(connect(served))
    other.sendall(b" " * (200_000 - len(BODY)))
    assert other.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_a_health_check_has_a_place_where_all_are_taken(serve: Serve, connect: Connect) -> None:
    limits = Limits(max_connections=8, open_paths=frozenset([b"/version"]))
    served = serve(silent, limits=limits, drain_timeout=0)
    for _ in range(limits.max_requests):
        connect(served).sendall(WHOLE)
    served.asked.wait_for(NUM_AT_START + limits.max_requests)
    refused = connect(served)
    refused.sendall(WHOLE)
    assert b"HTTP/1.1 503 " in (answer := rest(refused))
    assert b"Retry-After: 1\r\n" in answer
    get_version(connect(served))
    other = connect(served, host="127.0.0.2")
    other.sendall(WHOLE)
    served.asked.wait_for(NUM_AT_START + limits.max_requests + 1)


def test_a_body_after_a_request_on_one_connection_gives_way(serve: Serve, connect: Connect) -> None:
    served = serve(limits=Limits(max_connections=8))
    for _ in range(12):
        connection = connect(served)
        head = POST + b"Content-Length: 100\r\n\r\n"
        connection.sendall(GET + b"\r\n" + head)
        receive_version(connection)
    new = connect(served)
    new.sendall(WHOLE)
    assert new.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_the_bytes_of_arriving_bodies_have_a_limit(serve: Serve, connect: Connect) -> None:
    served = serve(limits=Limits(max_open_bytes=200_000))
    slow = [begin_body(connect(served), b" " * 90_000) for _ in range(4)]
    for connection in slow[:2]:
        assert b"HTTP/1.1 503 " in rest(connection)
    new = connect(served)
    body = BODY + b" " * 20_000
    new.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert new.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 503 " in rest(slow[2])
    assert is_open(slow[3])


def test_what_a_body_becomes_counts_until_it_is_answered(serve: Serve, connect: Connect) -> None:
    served = serve(silent, limits=Limits(max_open_bytes=8_000_000), drain_timeout=0)
    untyped = b",".join([b"{}"] * 60_000)
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": [%b]}}'
    body %= untyped
    head = POST.replace(b"completions", b"chat/completions")
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    first, second = connect(served), connect(served)
    first.sendall(whole)
    served.asked.wait_for(NUM_AT_START + 1)
    second.sendall(whole)
    assert second.recv(1000).startswith(b"HTTP/1.1 503 ")
    connect(served).sendall(WHOLE)
    served.asked.wait_for(NUM_AT_START + 2)


def test_there_are_fewer_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (1 << 20, 1024 + 4 * 1280), (-1, 1024 + 4 * 1280), (10, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert limits_for(1 << 20, 1280).max_connections == most


@pytest.mark.parametrize("split", [0, 30, len(POST) + 60, len(POST) + 110, len(POST) + 150])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_a_request_that_would_upgrade_is_answered_as_any_other(
    serve: Serve, connect: Connect, protocol: bytes, split: int
) -> None:
    """Java's HttpClient sends such requests; the connection is kept for the next ones."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAAB\r\n"
    request = POST + upgrade % protocol + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    connection = connect(serve())
    for _ in range(2):
        connection.sendall(request[:split])
        connection.sendall(request[split:])
    connection.sendall(GET + b"Connection: close\r\n\r\n")
    answers = rest(connection)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answers.count(b'"text":"one"') == 2
    assert b'{"version":' in answers


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(
    serve: Serve, connect: Connect, is_stream: bool
) -> None:
    """The end of the connection is that of a stream."""
    body = BODY[:-1] + b', "stream": true}' if is_stream else BODY
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    connection = connect(serve(answering))
    connection.sendall(head + body)
    got, _, answer = rest(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in got
    assert b"transfer-encoding" not in got
    if not is_stream:
        assert b"content-length: %d\r\n" % len(answer) in got
        assert json.loads(answer)["choices"][0]["text"] == TEXT
        return
    *events, done, end = answer.decode().split("\n\n")
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    assert "".join(one["choices"][0]["text"] for one in chunks) == TEXT
    assert (done, end) == ("data: [DONE]", "")
