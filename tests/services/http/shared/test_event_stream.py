"""Events of streams in silence, and work whose client disconnects."""

import asyncio
from collections.abc import Iterable

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

ADDED = {"type": "text.added", "text": "a\n"}


class Named(EventForm):
    def failed(self, error: ApiError) -> Iterable[dict[str, str]]:
        return [{"type": "failed", "message": error.body.error.message}]


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
            await events.send([ADDED])
            await kept.wait()
            raise ApiError(500, "broken")

        async def receive() -> Message:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        await EventStream(form, slow)({}, receive, send)

    asyncio.run(run())
    before, found, after = data.partition(form.encode([ADDED]))
    assert found
    assert before.replace(form.keep_alive, b"") == b""
    error = form.encode(form.failed(ApiError(500, "broken"))) + form.end
    assert after.replace(form.keep_alive, b"") == error


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
