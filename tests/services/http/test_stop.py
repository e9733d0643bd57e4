"""The end of a server: connections whose request has not arrived, and a gateway that ends first."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from penstock.services.http import process
from penstock.services.http.shared import connections
from tests.services.http.conftest import NUM_AT_START, Serve, Served, silent
from tests.services.http.shared.test_connections import (
    GET,
    Connect,
    connect,
    get_version,
    rest,
)

pytestmark = pytest.mark.slow

__all__ = ["connect"]
REQUEST = GET + b"\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\n"


def test_a_connection_that_waits_is_served(serve: Serve) -> None:
    """The server stops while its listener has a connection that the event loop has not seen."""
    served = serve()

    async def connect_and_stop() -> socket.socket:
        client = socket.create_connection(served.address, timeout=60)
        client.sendall(REQUEST)
        await served.server.shutdown([served.listener])
        return client

    stopping = asyncio.run_coroutine_threadsafe(connect_and_stop(), served.loop)
    with closing(stopping.result()) as client:
        answer = rest(client)
    assert answer.startswith(ANSWER)
    assert b"connection: close" in answer


def test_a_connection_that_comes_while_the_server_closes_is_served(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has accepted it when the event loop lets go of the listener."""
    served, late = serve(), []
    close = asyncio.base_events.Server.close

    def connect_and_close(self: asyncio.base_events.Server) -> None:
        if not late:
            late.append(connect(served))
            late[0].sendall(REQUEST)
        close(self)

    monkeypatch.setattr(asyncio.base_events.Server, "close", connect_and_close)
    served.stop()
    served.join()
    assert rest(late[0]).startswith(ANSWER)


@pytest.mark.parametrize("beginning", [0, 1, len(GET)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_is_arriving_is_answered(
    serve: Serve,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    beginning: int,
    is_first: bool,
) -> None:
    monkeypatch.setattr(connections, "LAST_REQUEST", 60.0)
    served = serve(drain_timeout=60)
    client, idle = connect(served), connect(served)
    get_version(idle)
    if not is_first:
        get_version(client)
    client.sendall(REQUEST[:beginning])
    get_version(idle)  # so the server has read the bytes above
    stopping = shutdowns(served)
    served.stop()
    for _ in served.server.server_state.connections.copy():
        assert stopping.acquire(timeout=60)
    client.sendall(REQUEST[beginning:])
    idle.sendall(REQUEST)  # as a client does that has not seen the end of its connection
    for answer in (rest(client), rest(idle)):
        assert answer.startswith(ANSWER)
        assert b"connection: close" in answer


def shutdowns(served: Served) -> threading.Semaphore:
    """Return what is released once for each open connection that the server has asked to end."""
    asked = threading.Semaphore(0)
    for connection in served.server.server_state.connections:

        def shutdown(end: Callable[[], None] = connection.shutdown) -> None:
            end()
            asked.release()

        connection.shutdown = shutdown
    return asked


def test_a_request_does_not_wait_for_a_gateway_that_has_drained(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_GRACE", 3600)
    served = serve(silent, drain_timeout=3600)
    connection, has_disconnected = served.server._client._connection, threading.Event()
    on_event = connection._on_event

    def note(event: int) -> bool:
        is_change = on_event(event)
        if not connection.is_connected:
            has_disconnected.set()
        return is_change

    monkeypatch.setattr(connection, "_on_event", note)
    with served.client() as client, ThreadPoolExecutor() as threads:
        answer = threads.submit(client.post, "/v1/completions", json={"prompt": "one"})
        served.asked.wait_for(NUM_AT_START + 1)
        served.asked.close()
        has_disconnected.wait()
        served.stop()
        assert answer.result().status_code == 503


def test_a_connection_without_a_request_is_closed(serve: Serve, connect: Connect) -> None:
    served = serve()
    idle = connect(served)
    get_version(connect(served))
    served.stop()
    assert rest(idle) == b""
    served.join()
