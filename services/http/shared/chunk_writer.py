"""Pieces of streamed responses, written without ASGI's coroutines, which cost more.

The pieces of all streams that a message from the gateway has are written in a row: a client that
shares the host wakes up once for many of them, and each costs about half.
"""

import asyncio

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# key of a response's `ChunkWriter` in the scope of its request, if the server has one
WRITER = "penstock.writer"


class WriteBurst:
    """Writers of one server that have pieces; all are flushed in the loop's next turn."""

    def __init__(self) -> None:
        self._writers: list[ChunkWriter] = []

    def add(self, writer: "ChunkWriter") -> None:
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()


class ChunkWriter:
    """Writer of one response, once it has begun."""

    def __init__(self, cycle: RequestResponseCycle, burst: WriteBurst) -> None:
        self._cycle = cycle
        self._burst = burst
        self._pieces: list[bytes] = []

    @property
    def is_ready(self) -> bool:
        """True while the client reads; a response without chunks must be sent by ASGI."""
        return bool(self._cycle.chunked_encoding) and not self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._burst.add(self)
        self._pieces.append(data)

    def flush(self) -> None:
        """Write what waits, unless the client has disconnected."""
        if not self._pieces:
            return
        data, self._pieces = b"".join(self._pieces), []
        if not (self._cycle.disconnected or self._cycle.response_complete):
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def send_without_chunks(cycle: RequestResponseCycle, message: Message) -> None:
    """Send a part of a response to a client of HTTP/1.0, which does not know chunks.

    A body without a length lasts until the connection closes.
    """
    if message["type"] == "http.response.start":
        if all(name != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False  # otherwise uvicorn adds Transfer-Encoding
    else:
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares both
    await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]
