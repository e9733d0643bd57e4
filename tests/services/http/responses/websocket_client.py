"""A client of `/v1/responses` over a WebSocket, in JSON."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.services.http.conftest import Served

CREATE = {"type": "response.create", "input": "hi"}


@contextlib.contextmanager
def connected(served: Served, **fields: Any) -> Iterator["Socket"]:
    url = f"ws://127.0.0.1:{served.address[1]}/v1/responses"
    with connect(url, **fields) as connection:
        yield Socket(connection)


class Socket:
    """A WebSocket that sends and receives JSON."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **fields: Any) -> None:
        self.connection.send(json.dumps(CREATE | fields))

    def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        return event

    def turn(self) -> list[dict[str, Any]]:
        """Return the events of the response that is due."""
        events = [self.receive()]
        while events[-1]["type"] not in ("response.completed", "response.failed", "error"):
            events.append(self.receive())
        return events

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Return the last event of a response."""
        self.send(**fields)
        return self.turn()[-1]

    def close_code(self) -> int:
        """Return the code with which the server closes, which it does next."""
        with pytest.raises(ConnectionClosed) as caught:
            self.connection.recv(timeout=60)
        assert caught.value.rcvd
        return caught.value.rcvd.code


def error_of(event: dict[str, Any]) -> tuple[int, str, str | None]:
    error = event["error"]
    assert event["type"] == "error"
    assert error["message"]
    return event["status"], error["code"], error["param"]
