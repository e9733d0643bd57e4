"""Streams of responses in the background: resumed at each event, within bounds."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from penstock.protocol.messages.client import AbortRequest, GenerateRequest, Reply, Request
from penstock.services.http.responses import event_log
from penstock.services.http.responses.event_log import EventLog
from penstock.services.http.responses.store import ResponseStore
from penstock.services.http.shared.errors import ApiError
from tests.launch.fake_gateway import TEXT, delta, reply
from tests.services.http.conftest import Served, behave

pytestmark = pytest.mark.slow

Serve = Callable[..., Served]
PATH = "/v1/responses"
ASKED = {"input": "hi", "store": True, "background": True, "stream": True}


class Halting:
    """Generate the beginning of TEXT, and note the end of its request."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def __call__(self, request: Request) -> list[Reply]:
        match request:
            case GenerateRequest(stream=True):
                return [delta(request, n, n + 1) for n in range(3)]
            case AbortRequest():
                self.is_aborted.set()
        return behave(request)


def whole(request: Request) -> list[Reply]:
    if not isinstance(request, GenerateRequest):
        return behave(request)
    return [*(delta(request, n, n + 1) for n in range(len(TEXT))), reply(request)]


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield events until the end of the stream, which must be `[DONE]`."""
    last = ""
    for line in lines:
        if line.startswith("data: "):
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield msgspec.json.decode(last)
    assert last == "[DONE]"


def resumed(client: httpx.Client, name: str, after: int | None) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"stream": "true"} | (
        {} if after is None else {"starting_after": after}
    )
    with client.stream("GET", f"{PATH}/{name}", params=params) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events_of(response.iter_lines()))


def test_a_stream_is_resumed_after_each_event(serve: Serve) -> None:
    with serve(whole).client() as client:
        with client.stream("POST", PATH, json=ASKED) as response:
            found = list(events_of(response.iter_lines()))
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
        assert [found[0]["type"], found[-1]["type"]] == ["response.created", "response.completed"]
        assert "".join(one["delta"] for one in found if one["type"].endswith("text.delta")) == TEXT
        name = found[0]["response"]["id"]
        assert resumed(client, name, None) == found
        for after in range(len(found)):
            assert resumed(client, name, after) == found[after + 1 :]
        assert client.get(f"{PATH}/{name}").json() == found[-1]["response"]


def test_a_client_that_disconnects_leaves_the_response_running(serve: Serve) -> None:
    halting = Halting()
    with serve(halting).client() as client:
        with client.stream("POST", PATH, json=ASKED) as response:
            name = next(events_of(response.iter_lines()))["response"]["id"]
        assert client.get(f"{PATH}/{name}").json()["status"] == "in_progress"
        assert not halting.is_aborted.is_set()
        with client.stream("GET", f"{PATH}/{name}?stream=true&starting_after=1") as again:
            events = events_of(again.iter_lines())
            first = next(events)
            assert (first["sequence_number"], first["type"]) == (2, "response.output_item.added")
            cancelled = client.post(f"{PATH}/{name}/cancel").json()
            *_, last = events
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        assert cancelled["status"] == "cancelled"
        assert halting.is_aborted.wait(60)


def test_openais_client_resumes(serve: Serve) -> None:
    served = serve(whole)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="qwen3-demo", **ASKED)  # type: ignore[call-overload]
        begun = next(iter(first))
        first.close()
        with client.responses.retrieve(
            begun.response.id, stream=True, starting_after=begun.sequence_number
        ) as stream:
            found = list(stream)
    assert found[0].sequence_number == begun.sequence_number + 1
    assert found[-1].type == "response.completed"


@pytest.mark.parametrize(
    ("fields", "query", "path"),
    [
        ({"stream": False}, "?stream=true", "stream"),
        ({"background": False, "stream": False}, "?stream=true", "stream"),
        ({"stream": False}, "?starting_after=1", "starting_after"),
        ({"stream": False}, "?stream=2", "stream"),
        ({"stream": False}, "?stream=true&starting_after=-1", "starting_after"),
    ],
)
def test_streams_that_can_not_be(
    serve: Serve, fields: dict[str, Any], query: str, path: str
) -> None:
    with serve(whole).client() as client:
        name = client.post(PATH, json=ASKED | fields).json()["id"]
        refused = client.get(f"{PATH}/{name}{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, path)


def test_an_event_that_is_not_there_yet(serve: Serve) -> None:
    with serve(whole).client() as client:
        with client.stream("POST", PATH, json=ASKED) as response:
            *_, last = events_of(response.iter_lines())
        name, number = last["response"]["id"], last["sequence_number"]
        refused = client.get(f"{PATH}/{name}?stream=true&starting_after={number + 1}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")
        assert client.get(f"{PATH}/resp_x?stream=true").status_code == 404


def test_logs_have_a_place_in_the_store(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has room for one response; a second one is refused while it runs."""
    monkeypatch.setattr(ResponseStore.__init__, "__defaults__", (event_log.MAX_LOG_BYTES + 20_000,))
    with serve(Halting()).client() as client, client.stream("POST", PATH, json=ASKED) as response:
        assert response.status_code == 200
        full = client.post(PATH, json=ASKED)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def followed(log: EventLog, number: int, actions: list[Callable[[], None]]) -> bytes:
    """Return what a stream sends that follows the log, while the actions happen one by one."""
    sent = b""

    async def run() -> None:
        nonlocal sent
        waiting = iter(actions)

        async def send(message: Message) -> None:
            nonlocal sent
            sent += message.get("body", b"")
            for action in waiting:
                action()
                return

        async def receive() -> Message:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        await log.follow(number)({}, receive, send)

    asyncio.run(run())
    return sent


def piece(number: int, length: int) -> dict[str, Any]:
    delta = "x" * length + "\n\n"
    return {"type": "response.output_text.delta", "sequence_number": number, "delta": delta}


def numbers(sent: bytes) -> list[int]:
    lines = [one for one in sent.decode().split("\n") if one.startswith("data: {")]
    return [msgspec.json.decode(one.removeprefix("data: "))["sequence_number"] for one in lines]


@given(
    lengths=st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
    num_before=st.integers(0, 30),
    number=st.integers(0, 30),
)
def test_a_log_that_grows_while_it_is_read(
    lengths: list[int], num_before: int, number: int
) -> None:
    log = EventLog()
    pieces = [piece(number, length) for number, length in enumerate(lengths)]
    log.write(pieces[:num_before])
    if number > len(pieces[:num_before]):
        with pytest.raises(ApiError, match="starting_after"):
            log.follow(number)
        return
    rest: list[Callable[[], None]] = [
        lambda one=one: log.write([one])
        for one in pieces[num_before:]  # type: ignore[misc]
    ]
    if number == len(pieces[:num_before]) and rest:
        rest.pop(0)()
    if rest:
        *_, last = rest
        rest[-1] = lambda: (last(), log.end())  # type: ignore[func-returns-value]
    else:
        log.end()
    assert numbers(followed(log, number, rest)) == list(range(number, len(pieces)))


def test_the_oldest_events_of_a_long_log_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LOG_BYTES", 4000)
    log = EventLog()
    log.write(piece(number, 1000) for number in range(50_000))
    assert log.num_bytes < 4000 + 70_000
    with pytest.raises(ApiError, match="starting_after: got 4, expected a number from"):
        log.follow(5)
    log.end()
    first = log._blocks[0][0]
    assert 40_000 < first < 50_000
    assert numbers(followed(log, first, [])) == list(range(first, 50_000))
