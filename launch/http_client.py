"""HTTP/1.1 as far as `launch batch` and the benchmarks need it, on httptools.

A general client costs some 100 µs for each piece of a stream, many times what is to be measured.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from penstock.protocol.client.errors import ClientError


class HttpError(ClientError):
    """No whole answer came: nobody listens, or the connection was lost."""


CONNECT_SECONDS = 5.0
"""for which a connection is tried: a process that is restarted listens again by then"""
CONNECT_INTERVAL = 0.1


class Answered(NamedTuple):
    """The head of an answer."""

    status: int
    headers: dict[str, str]
    """by their names in lower case"""


class UnreachableError(HttpError):
    """There is no server, and none has come for CONNECT_SECONDS."""


class HttpClient(asyncio.Protocol):
    """One request at a time, over a connection that is kept."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        self._where = parts.hostname or "", parts.port or 80
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"
        self._transport: asyncio.Transport | None = None

    async def post(self, path: str, body: bytes, on_body: Callable[[bytes], None]) -> Answered:
        """Sends JSON; `on_body` gets the pieces of the answer as they come. Raises HttpError."""
        loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[Answered] = loop.create_future()
        self._headers: dict[str, str] = {}
        self.on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        try:
            if self._transport is None:
                await self._connect()
            length = f"Content-Length: {len(body)}\r\n\r\n"
            head = f"POST {path} HTTP/1.1\r\n{self._head}{length}"
            self._transport.write(head.encode() + body)  # type: ignore[union-attr]
            return await self._answered
        except asyncio.CancelledError:
            self.close()  # for the server a sign to end the request
            raise

    def close(self) -> None:
        """Ends the connection; the next request makes another one."""
        if self._transport:
            self._transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + CONNECT_SECONDS
        while True:
            try:
                await loop.create_connection(lambda: self, *self._where)
                return
            except OSError as error:
                if loop.time() > end:
                    where = "http://{}:{}".format(*self._where)
                    raise UnreachableError(f"{where} can't be reached: {error.strerror}") from error
            await asyncio.sleep(CONNECT_INTERVAL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        """asyncio's."""
        self._transport = None
        if not self._answered.done():
            self._answered.set_exception(HttpError("{}:{} hung up".format(*self._where)))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools's."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_message_complete(self) -> None:
        """httptools's."""
        answered = Answered(self._parser.get_status_code(), self._headers)
        if not self._parser.should_keep_alive():
            self.close()
        if not self._answered.done():
            self._answered.set_result(answered)
