"""Pieces of streamed responses, on real connections: their order, and how they are joined."""

import socket
import threading

import msgspec
import pytest

from penstock.protocol.messages.client import GenerateRequest, Reply, Request, TextDelta
from penstock.services.http.shared.connections import ChunkWriter
from tests.launch.fake_gateway import reply
from tests.services.http.conftest import Serve, Served, behave

LENGTH = 300
NUM_DISCONNECTED = 10
"""clients that disconnect during one stream"""


def letters(request: Request) -> list[Reply]:
    """Answer a stream with LENGTH numbers in as many pieces, and other requests as usual."""
    if not (isinstance(request, GenerateRequest) and request.stream):
        return behave(request)
    texts = [f"{number}," for number in range(LENGTH)]
    offsets = [sum(map(len, texts[:number])) for number in range(LENGTH)]
    made: list[Reply] = [
        TextDelta(
            request_id=request.request_id or "",
            token_offset=number,
            char_offset=offset,
            token_ids=[number],
            text=text,
        )
        for number, (offset, text) in enumerate(zip(offsets, texts, strict=True))
    ]
    whole = reply(request, "".join(texts))
    whole.token_ids = list(range(LENGTH))
    return [*made, whole]


def streamed(served: Served) -> str:
    """Return the text of a stream, read from its events."""
    with (
        served.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response,
    ):
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [msgspec.json.decode(line) for line in lines[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(one["choices"][0]["finish_reason"] is None for one in events[:-1])
    return "".join(one["choices"][0]["text"] for one in events)


@pytest.fixture
def num_flushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of pieces that each flush has joined."""
    found: list[int] = []
    flush = ChunkWriter.flush

    def counted(self: ChunkWriter) -> None:
        found.append(len(self._pieces))
        flush(self)

    monkeypatch.setattr(ChunkWriter, "flush", counted)
    return found


def test_a_stream_is_whole_and_in_order(serve: Serve, num_flushed: list[int]) -> None:
    served = serve(letters)
    expected = "".join(f"{number}," for number in range(LENGTH))
    for _ in range(5):
        assert streamed(served) == expected
    assert sum(num_flushed) > 0  # the writer was used
    assert max(num_flushed) > 1  # and pieces of one turn of the loop left together


@pytest.mark.slow
def test_clients_that_disconnect_in_a_burst_harm_nobody(serve: Serve) -> None:
    served = serve(letters)
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"

    def disconnect() -> None:
        for _ in range(NUM_DISCONNECTED):
            with socket.create_connection(served.address) as one:
                one.sendall(head % len(body) + body)
                one.recv(100)

    expected = "".join(f"{number}," for number in range(LENGTH))
    for _ in range(20):
        thread = threading.Thread(target=disconnect)
        thread.start()
        assert streamed(served) == expected
        thread.join()
