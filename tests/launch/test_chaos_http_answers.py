"""Answers of the HTTP APIs, as `launch chaos` reads them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.launch.chaos.load import Content, Received, read_answer
from penstock.launch.chaos.mix import HttpCall

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


class Pieces(httpx.AsyncByteStream):
    """A body that arrives in pieces of a few bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), 7):
            yield self._body[start : start + 7]


def read(path: str, reply: Any, *, status: int = 200, stream: bool = False) -> Received:
    """Return what is read of a reply: a map, or the events of a stream."""

    def respond(_: httpx.Request) -> httpx.Response:
        if not stream:
            return httpx.Response(status, json=reply)
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in reply]
        return httpx.Response(status, stream=Pieces("".join(lines).encode() + b"data: [DONE]\n\n"))

    async def run() -> Received:
        received = Received(is_stream=stream)
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(base_url="http://x", transport=transport) as client:
            async for _ in read_answer(client, HttpCall(path, {"stream": stream}), received):
                pass
        return received

    return asyncio.run(run())


def chunk(reason: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


def test_a_streamed_chat() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a'}}
    chunks = [
        *(chunk(reasoning_content="so"), chunk(content="a\u2028b\x85c\x00")),
        *(chunk(content="d", index=1), chunk(tool_calls=[call])),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '":1}'}}]),
        *(chunk("tool_calls"), chunk("stop", index=1)),
    ]
    received = read(CHAT, chunks, stream=True)
    parts = {
        "0.reasoning": "so",
        "0.content": "a\u2028b\x85c\x00",
        "1.content": "d",
        "0.call.0.name": "f",
        "0.call.0.arguments": '{"a":1}',
    }
    assert received.reply == Content(parts, {0: "tool_calls", 1: "stop"})


def test_a_streamed_response_has_its_end_to_compare() -> None:
    output = [{"type": "message", "content": [{"text": "42"}]}]
    events = [
        {"type": "response.output_text.delta", "output_index": 0, "delta": "4"},
        {"type": "response.completed", "response": {"status": "completed", "output": output}},
    ]
    received = read(RESPONSES, events, stream=True)
    assert received.streamed == Content({"0.text": "4"})
    assert received.reply == Content({"0.text": "42"}, ["completed", None])


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, {"error": {"message": "no luck"}}),
        (MESSAGES, {"type": "error", "error": {"message": "no luck"}}),
        (RESPONSES, {"type": "response.failed", "response": {"error": {"message": "no luck"}}}),
    ],
)
def test_an_error_in_a_stream_is_a_loss(path: str, event: dict[str, Any]) -> None:
    received = read(path, [event], stream=True)
    assert received.reply is None
    assert "no luck" in received.error


def test_a_refusal_is_a_loss() -> None:
    assert read(CHAT, {"error": "busy"}, status=503).error.startswith("503: ")
