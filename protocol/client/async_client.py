"""The client for asyncio. The module of the blocking client, `client.py`, has an introduction."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from copy import copy
from pathlib import Path
from typing import Any, Self

import zmq

from penstock.protocol.client.connection import DEFAULT_ENDPOINT, Connection, Kind, expect
from penstock.protocol.client.scoring import result_of
from penstock.protocol.client.session import (
    ClientError,
    PendingRequest,
    Take,
    ask_n,
    gather,
    ignore_change,
)
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerateReply,
    GenerateRequest,
    Request,
    StatusRequest,
    TextDelta,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.sampling import Pooling
from penstock.protocol.messages.status import StatusReply
from penstock.protocol.transport.context import Context


class AsyncStream:
    """One request of an `AsyncClient`: iterate with `async for`, or await its `result()`.

    Cancelling the task that waits for the request aborts the request.
    """

    def __init__(self, client: "AsyncClient", pending: PendingRequest) -> None:
        self.request_id = pending.request_id
        self._client = client
        self._answer = pending

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        while delta := await self.next_delta():
            yield delta

    async def next_delta(self, take: Take | None = None) -> TextDelta | None:
        """Wait for output; return all that has arrived, or None after the end of the stream.

        take: called with output as it arrives, without waking this task. If it returns False, the
        piece is refused, and this method returns the piece.
        """
        while self._answer.offer(take):
            if self._answer.final:
                self._answer.result()
                return None
            await self._change(take)
        return self._answer.take_delta()

    def block(self) -> None:
        """Note that the task may wait for its own client from now on, until `unblock`."""
        self._answer.blocked_since = time.monotonic()

    def unblock(self) -> None:
        self._answer.blocked_since = math.inf

    async def result(self) -> GenerateReply:
        """Wait for the whole answer. Raises RequestError."""
        while not self._answer.final:
            await self._change()
        return expect(self._answer, GenerateReply)

    async def abort(self) -> None:
        """End the request early; `result()` has the output until then."""
        await self._client.abort(self.request_id)

    async def _change(self, take: Take | None = None) -> None:
        try:
            await self._client.change(self._answer, take)
        except asyncio.CancelledError:
            self._client.ask(AbortRequest(request_id=self.request_id))
            raise


class AsyncClient:
    """A client for asyncio, for any number of tasks; to be entered with `async with`."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        keys: str | Path | None = None,
        client: str = DEFAULT_CLIENT,
        context: Context | None = None,
        max_unread_bytes: float = math.inf,
    ) -> None:
        """Prepare; `async with` connects.

        context: shared ZeroMQ context; None: a new context, which ends with the block.
        max_unread_bytes: limit of the unread output of a stream while its task is blocked. A
        stream that exceeds the limit fails; many open streams divide the limit.
        """
        self._where = endpoint, keys, client, context, max_unread_bytes
        self._rest: asyncio.Handle | None = None
        self._model: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_connection":
            raise ClientError("AsyncClient: not connected, enter it with `async with` first")
        raise AttributeError(name)

    def of_model(self, name: str) -> Self:
        """Return this client with a default for the `model` of requests; for use in the block."""
        client = copy(self)
        client._model = name
        return client

    async def __aenter__(self) -> Self:
        """Connect. Raises ClientError for unreadable keys and an invalid address."""
        self._connection = Connection(*self._where)
        self._connection.on_rest = self._take_rest
        for descriptor in self._descriptors():
            asyncio.get_running_loop().add_reader(descriptor, self._connection.take)
        return self

    def _take_rest(self) -> None:
        """Take further messages after other tasks had their turn."""

        def take() -> None:
            self._rest = None
            self._connection.take()

        if self._rest is None:
            self._rest = asyncio.get_running_loop().call_soon(take)

    async def __aexit__(self, *_: object) -> None:
        for descriptor in self._descriptors():
            asyncio.get_running_loop().remove_reader(descriptor)
        if self._rest:
            self._rest.cancel()
        self._connection.leave()
        await asyncio.to_thread(self._connection.close)

    def submit(self, prompt: str | list[int] | None = None, **fields: Any) -> AsyncStream:
        """Send a request and return at once. `fields`: as in GenerateRequest."""
        return AsyncStream(self, self.ask(GenerateRequest(prompt=prompt, **fields)))

    def stream(self, prompt: str | list[int] | None = None, **fields: Any) -> AsyncStream:
        """Send a request whose text arrives piece by piece."""
        return self.submit(prompt, stream=True, **fields)

    async def generate(self, prompt: str | list[int] | None = None, **fields: Any) -> GenerateReply:
        """Return the whole answer. Raises RequestError."""
        return await self.submit(prompt, **fields).result()

    def submit_n(self, prompt: str | list[int] | None = None, **fields: Any) -> list[AsyncStream]:
        """Send a request for each of the `n` answers to a prompt. Raises RequestError.

        Answers end and fail independently. `abort` of the given `request_id` ends all answers.
        """
        answers = ask_n(GenerateRequest(prompt=prompt, **fields), self.ask)
        return [AsyncStream(self, pending) for pending in answers]

    async def generate_n(
        self, prompt: str | list[int] | None = None, **fields: Any
    ) -> list[GenerateReply]:
        """Return `n` whole answers to a prompt. Raises RequestError if any fails.

        Cancelling the task, or a failure, aborts all answers.
        """
        return await gather(stream.result() for stream in self.submit_n(prompt, **fields))

    async def embed(
        self, prompt: str | list[int], *, dimensions: int | None = None, **fields: Any
    ) -> list[float]:
        """Return the embedding of a text or of token ids. Raises RequestError."""
        pooling = Pooling(dimensions=dimensions)
        return result_of(await self.generate(prompt, pooling=pooling, **fields))

    async def abort(self, request_id: str) -> bool:
        """End a request early. Return False if no such request is running."""
        answers = self._connection.ask_abort(request_id)
        replies = [await self._final(pending, AbortReply) for pending in answers]
        return any(reply.found for reply in replies)

    async def tokenize(self, prompt: str | list[int] | None = None, **fields: Any) -> TokenizeReply:
        """Return the token ids of a prompt. `fields`: as in TokenizePromptRequest."""
        return await self._wait_for(TokenizePromptRequest(prompt=prompt, **fields), TokenizeReply)

    async def detokenize(self, token_ids: list[int], **fields: Any) -> str:
        """Return the text of token ids, with special tokens. `fields`: as in DetokenizeRequest."""
        question = DetokenizeRequest(token_ids=token_ids, **fields)
        return (await self._wait_for(question, DetokenizeReply)).text

    async def status(
        self, wait: bool = False, fresh: bool = False, metrics: bool = False
    ) -> StatusReply:
        """Return the pipeline's status; `wait`, `fresh`, `metrics`: as in `StatusRequest`."""
        request = StatusRequest(wait=wait, fresh=fresh, metrics=metrics)
        return await self._wait_for(request, StatusReply)

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    async def change(self, pending: PendingRequest, take: Take | None = None) -> None:
        """Wait for a message to `pending` that `take`, if given, refuses."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if changed.done():
                return
            try:
                if take and pending.final is None and pending.offer(take):
                    return
            except Exception as error:  # noqa: BLE001  raised in the task that waits
                changed.set_exception(error)
            else:
                changed.set_result(None)

        pending.on_change = wake
        try:
            await changed
        finally:
            pending.on_change = ignore_change

    def ask(self, question: Request) -> PendingRequest:
        """Send a question without waiting."""
        if not isinstance(question, AbortRequest) and question.model is None:
            question.model = self._model
        return self._connection.ask(question)

    async def _wait_for(self, question: Request, kind: type[Kind]) -> Kind:
        return await self._final(self.ask(question), kind)

    async def _final(self, pending: PendingRequest, kind: type[Kind]) -> Kind:
        while not pending.final:
            await self.change(pending)
        return expect(pending, kind)

    def _descriptors(self) -> list[int]:
        sockets = self._connection.socket, self._connection.monitor
        return [int(socket.getsockopt(zmq.FD)) for socket in sockets]
