"""Events of streams: their form, and errors before and after the first one."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from penstock.services.http.shared import event_stream
from penstock.services.http.shared.errors import ApiError
from penstock.services.http.shared.event_stream import (
    Chunks,
    EventForm,
    EventStream,
    while_connected,
)


def added(text: str) -> dict[str, str]:
    return {"type": "text.added", "text": text}


class Named(EventForm):
    def failed(self, error: ApiError) -> Iterable[dict[str, str]]:
        return [{"type": "failed", "message": error.body.error.message}]


def streamed(
    form: EventForm, produce: Callable[[EventStream], Coroutine[Any, Any, None]]
) -> tuple[bytes, bool]:
    """Return the body, and whether the response has ended."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    asyncio.run(EventStream(form, produce)({}, receive, send))
    head, *bodies = messages
    assert (head["status"], dict(head["headers"])[b"cache-control"]) == (200, b"no-cache")
    return b"".join(one["body"] for one in bodies), not bodies[-1]["more_body"]


@pytest.mark.parametrize("form", [Chunks(), Named()])
def test_silence_is_filled(form: EventForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first event and after it; then an error is an event."""
    monkeypatch.setattr(event_stream, "SILENCE", 0.001)
    data = b""

    async def run() -> None:
        nonlocal data
        kept = asyncio.Event()

        async def send(message: Message) -> None:
            nonlocal data
            data += message.get("body", b"")
            if message.get("body") == form.keep_alive:
                kept.set()

        async def slow(events: EventStream) -> None:
            await kept.wait()
            kept.clear()
            await events.send([added("a")])
            await kept.wait()
            raise ApiError(500, "broken")

        async def receive() -> Message:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        await EventStream(form, slow)({}, receive, send)

    asyncio.run(run())
    before, found, after = data.partition(form.encode([added("a")]))
    assert found
    assert before.replace(form.keep_alive, b"") == b""
    error = form.encode(form.failed(ApiError(500, "broken"))) + form.end
    assert after.replace(form.keep_alive, b"") == error


async def two(events: EventStream) -> None:
    await events.send([added("a\n"), added("b")])
    await events.send([])
    await events.send([], is_last=True)


async def failing(events: EventStream) -> None:
    await events.send([added("a")])
    raise ApiError(500, "broken")


def test_named_events() -> None:
    body, has_ended = streamed(Named(), two)
    assert has_ended
    first, second, rest = body.decode().split("\n\n")
    assert first == 'event: text.added\ndata: {"type":"text.added","text":"a\\n"}'
    assert second == 'event: text.added\ndata: {"type":"text.added","text":"b"}'
    assert not rest


def test_chunks_end_with_done() -> None:
    body, has_ended = streamed(Chunks(), two)
    assert has_ended
    assert body.decode().split("\n\n")[2:] == ["data: [DONE]", ""]


def test_an_error_after_the_first_event_is_an_event() -> None:
    body, has_ended = streamed(Named(), failing)
    assert has_ended
    expected = 'event: failed\ndata: {"type":"failed","message":"broken"}'
    assert body.decode().split("\n\n")[1:] == [expected, ""]


def test_an_error_before_the_first_event_is_raised() -> None:
    async def refuse(_: EventStream) -> None:
        raise ApiError(400, "no")

    with pytest.raises(ApiError, match="no"):
        streamed(Named(), refuse)


def test_a_disconnect_ends_the_work_and_not_its_task() -> None:
    async def run() -> None:
        lost, task = asyncio.Event(), asyncio.current_task()
        assert task

        async def receive() -> Message:
            await lost.wait()
            return {"type": "http.disconnect"}

        async def endless() -> None:
            assert asyncio.current_task() is task  # a task for each request would cost more
            lost.set()
            await asyncio.Event().wait()

        with pytest.raises(ClientDisconnect):
            await while_connected(receive, endless())
        assert not task.cancelling()

        async def done() -> str:
            return "done"

        assert await while_connected(receive, done()) == "done"  # although nobody reads it
        await asyncio.sleep(0)
        assert not task.cancelling()

    asyncio.run(run())


def test_work_ends_when_the_server_stops() -> None:
    async def run() -> None:
        begun = asyncio.Event()

        async def endless() -> Any:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(while_connected(endless, endless()))
        await begun.wait()
        task.cancel()
        with pytest.raises(ApiError, match="the server is stopping"):
            await task

    asyncio.run(run())
