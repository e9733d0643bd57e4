"""Ends of WebSockets: by the client, by limits, and by the server."""

import socket as sockets
import threading
from collections.abc import Callable

import pytest
from websockets.exceptions import ConnectionClosed

from penstock.protocol.messages.client import AbortRequest, GenerateRequest, Reply, Request
from penstock.services.http.responses import session
from tests.launch.fake_gateway import delta
from tests.services.http.conftest import NUM_AT_START, Served, behave
from tests.services.http.responses.test_server import (
    Unfinished,
    answering,
)
from tests.services.http.responses.websocket_client import connected, error_of

Serve = Callable[..., Served]


def test_too_many_messages_end_the_connection_and_its_request(serve: Serve) -> None:
    unfinished = Unfinished()
    served = serve(unfinished)
    with connected(served) as socket:
        socket.send()
        served.asked.wait_for(NUM_AT_START + 1)
        for _ in range(session.MAX_WAITING + 1):
            socket.send()
        with pytest.raises(ConnectionClosed) as caught:
            while True:
                socket.receive()
        assert caught.value.rcvd
        assert caught.value.rcvd.code == 1008
        assert unfinished.is_aborted.wait(60)


def test_a_closed_connection_leaves_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    run, stores = session.Session.run, []

    async def run_and_tell(self: session.Session) -> None:
        stores.append(self._responses)
        try:
            await run(self)
        finally:
            closed.set()

    monkeypatch.setattr(session.Session, "run", run_and_tell)
    with connected(serve(answering)) as socket:
        first = socket.ask(store=False)["response"]["id"]
        assert stores[0].num_bytes > 0
        socket.ask(store=False, previous_response_id=first)
    assert closed.wait(60)
    assert (stores[0].num_bytes, stores[0]._entries) == (0, {})


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_a_client_that_leaves_ends_the_generation(serve: Serve, how: str) -> None:
    unfinished = Unfinished()
    with connected(serve(unfinished)) as socket:
        socket.send()
        assert socket.receive()["type"] == "response.created"
        if how == "close":
            socket.connection.close()
        else:
            # `close` alone sends nothing while the client's thread waits in `recv`
            socket.connection.socket.shutdown(sockets.SHUT_RDWR)
        assert unfinished.is_aborted.wait(60)


def test_a_connection_ends_after_its_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is completed before."""
    monkeypatch.setattr(session, "MAX_SECONDS", 0.3)
    with connected(serve(behave)) as socket:
        last = socket.receive()
        assert error_of(last) == (400, session.LIMIT_REACHED, None)
        assert socket.close_code() == 1012


def test_an_idle_connection_ends_with_the_server(serve: Serve) -> None:
    served = serve(answering)
    with connected(served) as socket:
        socket.ask()
        served.stop()
        assert socket.close_code() == 1012
    served.join()


def test_a_turn_is_completed_before_the_server_ends(serve: Serve) -> None:
    release = threading.Event()

    def halting(request: Request) -> list[Reply]:
        if not isinstance(request, GenerateRequest):
            return behave(request)
        release.wait()
        return answering(request)

    served = serve(halting, drain_timeout=60)
    with connected(served) as socket:
        socket.send()
        served.asked.wait_for(NUM_AT_START + 1)
        served.stop()
        release.set()
        assert socket.turn()[-1]["type"] == "response.completed"
        assert socket.close_code() == 1012
    served.join()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_turn_that_is_not_finished_when_the_server_stops(
    serve: Serve, caplog: pytest.LogCaptureFixture, has_begun: bool
) -> None:
    def begun(request: Request) -> list[Reply]:
        if not isinstance(request, GenerateRequest):
            return behave(request)
        return [delta(request, 0, 3)] if has_begun else []

    served = serve(begun, drain_timeout=0)
    with connected(served) as socket:
        socket.send()
        served.asked.wait_for(NUM_AT_START + 1)
        if has_begun:
            assert socket.receive()["type"] == "response.created"
        served.stop()
        last = socket.turn()[-1]
        if has_begun:
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["message"] == "the server is stopping"
        else:
            assert error_of(last) == (503, "server_error", None)
            assert last["error"]["headers"] == {"Retry-After": "1"}
        assert socket.close_code() == 1012
    served.join()
    assert isinstance(served.asked.heard[-1], AbortRequest)
    assert caplog.messages == []
