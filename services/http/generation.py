"""One HTTP request for text: the requests it makes of the pipeline, and their streams as SSE."""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.launch.client import AsyncStream
from penstock.launch.errors import RequestError
from penstock.protocol.client import AbortRequest, GenerateReply, TextDelta
from penstock.services.http.errors import ApiError, as_api_error
from penstock.services.http.replies import ENCODER, PromptTokensDetails, Usage
from penstock.services.http.schema import ApiRequest
from penstock.services.http.service import Service

T = TypeVar("T")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """Makes the pieces of one answer's stream."""

    def grow(self, delta: TextDelta) -> Iterable[Struct]:
        """What is to be sent now."""

    def end(self, reply: GenerateReply) -> Iterable[Struct]:
        """What is to be sent last."""


class Generation:
    """Asks `n` times for each prompt: answer i of prompt p is number p * n + i."""

    def __init__(
        self, service: Service, kind: str, request: ApiRequest, questions: list[dict[str, Any]]
    ) -> None:
        """kind: what its id begins with. questions: for each prompt, fields of GenerateRequest.

        Raises ApiError.
        """
        number = len(questions) * request.n
        if number > service.max_answers:
            sentence = f"{len(questions)} prompts times n = {request.n} are {number} answers"
            raise ApiError(400, f"{sentence}; the limit is {service.max_answers}", "n")
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = service.model
        self._client = service.client
        self._n = request.n
        self._includes_usage = request.stream_options.include_usage
        self._streams = [
            self._ask(question, index, request)
            for index, question in enumerate(one for one in questions for _ in range(request.n))
        ]

    def _ask(self, question: dict[str, Any], index: int, request: ApiRequest) -> AsyncStream:
        seed = None if request.seed is None else request.seed + index % request.n
        own = {"request_id": f"{self.id}-{index}", "seed": seed, "stream": request.stream}
        return self._client.submit(**question | own)

    async def replies(self, receive: Receive) -> list[GenerateReply]:
        """All answers, whole. Raises RequestError, ApiError, ClientDisconnect."""
        return await while_connected(receive, gather([one.result() for one in self._streams]))

    def usage(self, replies: Sequence[GenerateReply]) -> Usage:
        """Of all of them."""
        prompt_tokens = sum(one.usage.prompt_tokens for one in replies[:: self._n])
        cached_tokens = sum(one.usage.cached_tokens for one in replies[:: self._n])
        output_tokens = sum(one.usage.output_tokens for one in replies)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )

    def stream(self, kind: str, choices: Sequence[Choice]) -> "EventStream":
        """The answers as they come, in pieces whose `object` is `kind`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        prefix = b"data: " + ENCODER.encode(head)[:-1] + b',"choices":['
        return EventStream(self, prefix, choices)

    async def send_all(self, stream: "EventStream", choices: Sequence[Choice]) -> None:
        """Sends the pieces of all answers, and the last words."""
        work = [self._send_one(stream, *pair) for pair in zip(self._streams, choices, strict=True)]
        replies = await gather(work)
        last = _DONE
        if self._includes_usage:
            last = b'%b],"usage":%b}\n\n' % (stream.prefix, ENCODER.encode(self.usage(replies)))
            last += _DONE
        await stream.send(last, more=False)

    async def _send_one(
        self, events: "EventStream", stream: AsyncStream, choice: Choice
    ) -> GenerateReply:
        try:
            async for delta in stream:
                await events.send_pieces(choice.grow(delta))
            reply = await stream.result()
            await events.send_pieces(choice.end(reply))
        except asyncio.CancelledError:  # the stream itself hears of it only if it is waited for
            self._client.ask(AbortRequest(request_id=stream.request_id))
            raise
        return reply


class EventStream(Response):
    """Server-sent events. It starts with the first piece: what is refused before that has the
    status of its error; an error behind it is a piece of its own."""

    def __init__(self, generation: Generation, prefix: bytes, choices: Sequence[Choice]) -> None:
        """prefix: of each piece, up to the choice in it."""
        self.prefix = prefix
        self.background = None
        self._generation = generation
        self._choices = choices
        self._is_started = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await while_connected(receive, self._generation.send_all(self, self._choices))
        except ClientDisconnect:
            return
        except (RequestError, ApiError) as error:
            if not self._is_started:
                raise
            body = ENCODER.encode(as_api_error(error).body)
            await self.send(b"data: %b\n\n%b" % (body, _DONE), more=False)

    async def send_pieces(self, choices: Iterable[Struct]) -> None:
        """One event for each choice."""
        prefix = self.prefix
        if events := b"".join([b"%b%b]}\n\n" % (prefix, ENCODER.encode(one)) for one in choices]):
            await self.send(events)

    async def send(self, data: bytes, more: bool = True) -> None:
        """Sends bytes, behind the head if they are the first."""
        if not self._is_started:
            self._is_started = True
            head = {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does `work`. When the HTTP client goes it is cancelled, which aborts its requests.

    Raises ClientDisconnect then; ApiError when the server stops.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done():
            raise ClientDisconnect from None
        raise ApiError(503, "this server stops") from None
    finally:
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
