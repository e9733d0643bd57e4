"""Requests with `Upgrade`, with `Connection: close`, without `Host`, to a proxy, or of HTTP/1.0."""

import json

import pytest

from tests.launch.fake_gateway import TEXT
from tests.services.http.shared.test_connections import (
    BODY,
    GET,
    POST,
    Connect,
    Serve,
    connect,
    rest,
)
from tests.services.http.test_apis import answering

__all__ = ["connect"]


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


def test_a_websocket_is_refused(serve: Serve, connect: Connect) -> None:
    connection = connect(serve())
    head = GET.replace(b"/version", b"/v1/responses") + b"Connection: Upgrade, close\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    connection.sendall(head + b"Upgrade: websocket\r\n" + key + b"\r\n")
    answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"got GET /v1/responses, expected POST" in answer


@pytest.mark.parametrize("header", [b"", b"Upgrade: h2c\r\n"])
def test_the_last_request_is_answered_whatever_follows_it(
    serve: Serve, connect: Connect, header: bytes
) -> None:
    connection = connect(serve())
    last = GET + header + b"Connection: close\r\n\r\n"
    connection.sendall(last + GET + b"\r\n" + b"zz\r\n\r\n")
    answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_request_to_a_proxy_is_refused(serve: Serve, connect: Connect) -> None:
    connection = connect(serve())
    connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert rest(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("header", [b"", b"Host: a\r\nhost: a\r\n", b"Upgrade: h2c\r\n"])
def test_a_request_has_one_host(serve: Serve, connect: Connect, header: bytes) -> None:
    """A request of HTTP/1.0 needs no host."""
    served = serve()
    new, old = connect(served), connect(served)
    new.sendall(b"GET /version HTTP/1.1\r\n" + header + b"\r\n")
    assert rest(new).startswith(b"HTTP/1.1 400 ")
    old.sendall(b"GET /version HTTP/1.0\r\n\r\n")
    assert rest(old).startswith(b"HTTP/1.1 200 ")


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
