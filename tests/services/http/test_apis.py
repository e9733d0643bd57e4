"""What all APIs that generate text have in common, over real connections."""

import contextlib
import json
import threading
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any, NamedTuple

import pytest

from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    Reply,
    Request,
)
from tests.launch.fake_gateway import TEXT, delta, reply
from tests.services.http.conftest import Serve, behave

pytestmark = pytest.mark.slow

REFUSED = "got 9, expected less"


class Api(NamedTuple):
    """An API: a request, and where its replies have their text."""

    path: str
    body: dict[str, Any]
    limit: str  # field of the most tokens
    text: tuple[str | int, ...]  # path of the text in a reply
    piece: tuple[str | int, ...]  # path of a piece of the text in an event
    error: tuple[str, ...]  # path of the error in an event

    def asked(self, **fields: Any) -> dict[str, Any]:
        return self.body | {self.limit: 9} | fields


CHAT = {"model": "qwen3-demo", "messages": [{"role": "user", "content": "hi"}]}
APIS = [
    Api(
        *("/v1/chat/completions", CHAT, "max_completion_tokens"),
        *(("choices", 0, "message", "content"), ("choices", 0, "delta", "content"), ("error",)),
    ),
    Api(
        *("/v1/completions", {"prompt": "hi"}, "max_tokens"),
        *(("choices", 0, "text"), ("choices", 0, "text"), ("error",)),
    ),
    Api(
        *("/v1/messages", CHAT, "max_tokens"),
        *(("content", 0, "text"), ("delta", "text"), ("error",)),
    ),
    Api(
        *("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        *(("output", 0, "content", 0, "text"), ("delta",), ("response", "error")),
    ),
]
of_each_api = pytest.mark.parametrize("api", APIS, ids=[api.path for api in APIS])


def at(value: Any, path: Sequence[str | int]) -> Any:
    """Return what stands at a path; None where the path does not exist."""
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def events_in(text: str) -> list[Any]:
    """Return the bodies of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def answering(request: Request) -> list[Reply]:
    """Generate TEXT."""
    if not isinstance(request, GenerateRequest):
        return behave(request)
    deltas: list[Reply] = [delta(request, n, n + 1) for n in range(len(TEXT))]
    return [*(deltas if request.stream else []), reply(request)]


def failing(request: Request) -> list[Reply]:
    """Fail, in a stream after the beginning of a text."""
    if not isinstance(request, GenerateRequest):
        return behave(request)
    failed = ErrorReply(
        request_id=request.request_id,
        code="invalid",
        message=f"max_tokens: {REFUSED}",
        field="max_tokens",
    )
    return [delta(request, 0, 3), failed] if request.stream else [failed]


class Unfinished:
    """Generate the beginning of a text, and note the end of its request."""

    def __init__(self) -> None:
        self.is_begun = threading.Event()
        self.is_aborted = threading.Event()

    def __call__(self, request: Request) -> list[Reply]:
        match request:
            case GenerateRequest(stream=stream):
                self.is_begun.set()
                return [delta(request, 0, 3)] if stream else []
            case AbortRequest():
                self.is_aborted.set()
        return behave(request)


@of_each_api
def test_the_pieces_of_a_stream_are_the_whole_answer(serve: Serve, api: Api) -> None:
    with serve(answering).client() as client:
        assert at(client.post(api.path, json=api.asked()).json(), api.text) == TEXT
        events = events_in(client.post(api.path, json=api.asked(stream=True)).text)
    assert "".join(at(event, api.piece) or "" for event in events) == TEXT


@of_each_api
def test_an_error_before_the_answer_has_a_status(serve: Serve, api: Api) -> None:
    """The error has the name of the field that the client has sent."""
    with serve(failing).client() as client:
        answer = client.post(api.path, json=api.asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"] == f"{api.limit}: {REFUSED}"
    assert answer.json()["error"].get("param", api.limit) == api.limit


@of_each_api
def test_an_error_in_a_stream_is_its_last_event(serve: Serve, api: Api) -> None:
    with serve(failing).client() as client:
        answer = client.post(api.path, json=api.asked(stream=True))
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    *_, last = events_in(answer.text)
    assert at(last, api.error)["message"] == f"{api.limit}: {REFUSED}"


@of_each_api
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_the_generation(serve: Serve, api: Api, is_stream: bool) -> None:
    unfinished = Unfinished()
    connection = HTTPConnection(*serve(unfinished).address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", api.path, json.dumps(api.asked(stream=is_stream)))
        assert unfinished.is_begun.wait(60)
        if is_stream:
            connection.getresponse().readline()
    assert unfinished.is_aborted.wait(60)


@of_each_api
def test_a_stream_that_has_begun_when_the_server_stops_ends_with_an_error(
    serve: Serve, api: Api
) -> None:
    served = serve(Unfinished(), drain_timeout=0)
    with (
        served.client() as client,
        client.stream("POST", api.path, json=api.asked(stream=True)) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        served.stop()
        text = "\n".join([first, *lines])
    assert at(events_in(text)[-1], api.error)["message"] == "the server is stopping"
