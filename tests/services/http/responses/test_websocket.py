"""Responses over WebSockets: turns, continuations, errors and access."""

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus

from penstock.protocol.messages.client import GenerateRequest, Reply, Request
from penstock.services.http.responses import session
from tests.launch.fake_gateway import TEXT
from tests.services.http.conftest import NUM_AT_START, Served
from tests.services.http.responses.assembled import assembled
from tests.services.http.responses.test_server import (
    PATH,
    answering,
    events_in,
    failing,
    text_of,
)
from tests.services.http.responses.websocket_client import CREATE, connected, error_of

pytestmark = pytest.mark.slow

Serve = Callable[..., Served]
ORPHAN = {"type": "function_call_output", "call_id": "missing", "output": "x"}


def asked(served: Served) -> list[GenerateRequest]:
    return [one for one in served.asked.heard if isinstance(one, GenerateRequest)]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events; deltas in a row count once, as they depend on time."""
    return [kind for kind, _ in itertools.groupby(one["type"] for one in events)]


def test_the_events_are_those_of_a_stream(serve: Serve) -> None:
    served = serve(answering)
    with served.client() as client, connected(served) as socket:
        streamed = events_in(client.post(PATH, json={"input": "hi", "stream": True}).text)
        for _ in range(2):
            socket.send()
            events = socket.turn()
            assert kinds(events) == kinds(streamed)
            assert text_of(assembled(events)) == TEXT
    names = [one.request_id for one in asked(served)]
    assert len(set(names)) == 3


def test_messages_wait_for_their_turn(serve: Serve) -> None:
    """Two requests are never in the pipeline at once, and are answered in order."""
    release = threading.Event()

    def waiting(request: Request) -> list[Reply]:
        if isinstance(request, GenerateRequest):
            release.wait()
        return answering(request)

    served = serve(waiting)
    numbers = [str(number) for number in range(1 + session.MAX_WAITING)]
    with connected(served) as socket:
        with served.standing_still():
            for number in numbers:
                socket.send(metadata={"n": number})
        served.asked.wait_for(NUM_AT_START + 1)
        assert len(asked(served)) == 1
        release.set()
        ends = [socket.turn()[-1]["response"]["metadata"]["n"] for _ in numbers]
    assert ends == numbers


@pytest.mark.parametrize("store", [None, False])
def test_the_last_response_is_continued_by_its_connection_alone(
    serve: Serve, store: bool | None
) -> None:
    served = serve(answering)
    with connected(served) as socket:
        first = socket.ask(store=store)["response"]["id"]
        second = socket.ask(store=store, previous_response_id=first)["response"]["id"]
        roles = [one.role for one in asked(served)[-1].messages or ()]
        assert roles == ["user", "assistant", "user"]
        lost = 400, "previous_response_not_found", "previous_response_id"
        assert error_of(socket.ask(previous_response_id=first)) == lost  # it is not the last one
        with served.client() as client, connected(served) as other:
            assert error_of(other.ask(previous_response_id=second)) == lost
            body = {"input": "x", "previous_response_id": second}
            assert client.post(PATH, json=body).json()["error"]["code"] == lost[1]
            assert client.get(f"{PATH}/{second}").status_code == 404
            assert client.delete(f"{PATH}/{second}").status_code == 404
        socket.ask(previous_response_id=second)
        assert len(asked(served)[-1].messages or ()) == 5


def test_a_continuation_that_fails_forgets_the_response(serve: Serve) -> None:
    with connected(serve(answering)) as socket:
        first = socket.ask(store=False)["response"]["id"]
        failed = socket.ask(store=False, previous_response_id=first, input=[ORPHAN])
        assert error_of(failed) == (400, "invalid_request_error", "input[0].call_id")
        again = socket.ask(store=False, previous_response_id=first)
        assert error_of(again)[1] == "previous_response_not_found"
        assert socket.ask()["type"] == "response.completed"


def test_a_stored_response_outlives_its_connection(serve: Serve) -> None:
    served = serve(answering)
    with connected(served) as socket:
        first = socket.ask(store=True)["response"]["id"]
        assert socket.ask(previous_response_id=first, input=[ORPHAN])["type"] == "error"
    with served.client() as client, connected(served) as socket:
        assert client.get(f"{PATH}/{first}").json()["id"] == first
        assert socket.ask(previous_response_id=first)["type"] == "response.completed"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("", None),
        ("{", None),
        ("[]", None),
        ('"response.create"', None),
        (b'{"type": "response.create"}', None),
        ("[" * 100_000, None),
        ('{"type": "response.create", "tools": ' + "[" * 200 + "]" * 200 + "}", "tools"),
        ('{"input": "hi"}', "type"),
        ('{"type": "response.cancel", "input": "hi"}', "type"),
        ('{"type": "response.create"}', "input"),
        (json.dumps(CREATE | {"background": True, "store": True}), "background"),
        (json.dumps(CREATE | {"stream": False}), "stream"),
        (json.dumps(CREATE | {"generate": False}), "generate"),
        (json.dumps(CREATE | {"temperature": -1}), "temperature"),
    ],
)
def test_invalid_messages(serve: Serve, message: str | bytes, param: str | None) -> None:
    with connected(serve(answering)) as socket:
        socket.connection.send(message)
        assert error_of(socket.receive()) == (400, "invalid_request_error", param)
        assert socket.ask(stream=True)["type"] == "response.completed"


def test_an_empty_model_is_the_first_one(serve: Serve) -> None:
    with connected(serve(answering)) as socket:
        assert socket.ask(model="")["type"] == "response.completed"


def test_errors_of_the_pipeline(serve: Serve) -> None:
    with connected(serve(failing)) as socket:
        failed = socket.ask()
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["message"] == "max_output_tokens: got 9, expected less"
        unknown = socket.ask(model="x")
        assert error_of(unknown) == (404, "model_not_found", "model")


def test_a_defect_is_an_event_and_is_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with connected(serve(answering)) as socket:
        with monkeypatch.context() as patch:
            patch.setattr(session, "submit", fail)
            event = socket.ask()
        assert error_of(event) == (500, "server_error", None)
        assert "secret" not in json.dumps(event)
        assert socket.ask()["type"] == "response.completed"
    assert caplog.text.count("ZeroDivisionError: secret") == 1


def test_the_key(serve: Serve) -> None:
    served = serve(answering, api_key="key")
    for headers in ({}, {"Authorization": "Bearer x"}):
        with pytest.raises(InvalidStatus) as caught, connected(served, additional_headers=headers):
            pass
        response = caught.value.response
        assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": "Bearer key", "X-Request-Id": "mine"}
    with connected(served, additional_headers=headers) as socket:
        assert socket.connection.response
        assert socket.connection.response.headers["X-Request-Id"] == "mine"
        assert socket.ask()["type"] == "response.completed"


def test_web_pages_of_other_origins_are_refused(serve: Serve) -> None:
    served = serve(answering)
    with pytest.raises(InvalidStatus) as caught, connected(served, origin="http://evil.test"):
        pass
    assert caught.value.response.status_code == 403
    with connected(served, origin=served.url) as socket:
        assert socket.ask()["type"] == "response.completed"


def test_openais_client(serve: Serve) -> None:
    served = serve(answering)
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        previous = None
        for _ in range(2):
            connection.response.create(
                model="qwen3-demo", input="hi", previous_response_id=previous
            )
            for event in connection:
                if event.type == "response.completed":
                    break
            assert event.type == "response.completed"
            assert event.response.output_text == TEXT
            previous = event.response.id
    assert len(asked(served)[-1].messages or ()) == 3
