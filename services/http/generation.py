"""One HTTP request for text: the requests it makes of the pipeline, and their streams as SSE."""

import asyncio
import time
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, Struct
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.protocol.client.client import AsyncStream
from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import AbortRequest, GenerateReply, PromptFields, TextDelta
from penstock.services.http.app_state import Service
from penstock.services.http.caller import caller
from penstock.services.http.errors import ApiError, as_api_error
from penstock.services.http.replies import ENCODER, PromptTokensDetails, Usage
from penstock.services.http.schema import ApiRequest, ChatRequest
from penstock.services.http.structured import rename_field

T = TypeVar("T")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """Makes the pieces of one answer's stream."""

    prompt_token_ids: list[int] | None
    """set before the first piece, if they were requested"""

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
        name = uuid.uuid4().hex
        self.id = f"{kind}-{request.request_id or name}"
        self.created = int(time.time())
        self.model = service.model
        self._client = service.client
        self._request = request
        self._questions = questions
        given = f"-{request.request_id[:64]}" if request.request_id else ""
        inner_id = f"{kind}-{name}{given}"  # two clients may give the same one
        self._streams = [
            self._ask(question, f"{inner_id}-{index}", index)
            for index, question in enumerate(one for one in questions for _ in range(request.n))
        ]

    def _ask(self, question: dict[str, Any], request_id: str, index: int) -> AsyncStream:
        request = self._request
        index %= request.n
        own = {
            "request_id": request_id,
            "seed": None if request.seed is None else request.seed + index,
            "stream": request.stream,
            "num_answers": 0 if index else request.n,
        }
        return self._client.submit(**question | own, client=caller.get())

    async def replies(self, receive: Receive) -> list[GenerateReply]:
        """All answers, whole. Raises RequestError, ApiError, ClientDisconnect."""
        results = gather([one.result() for one in self._streams])
        with self._fields_as_sent():
            replies = await while_connected(receive, results)
        return [self._without_output(one) for one in replies] if self._is_echo_only else replies

    async def prompt_token_ids(self) -> Sequence[list[int] | None]:
        """Of the prompt of each answer; None if nobody wants them. Raises RequestError."""
        request = self._request
        shows_usage = request.stream and request.stream_options.continuous_usage_stats
        if not (request.return_token_ids or shows_usage):
            return [None] * len(self._streams)
        names = PromptFields.__struct_fields__
        prompts = [{k: v for k, v in one.items() if k in names} for one in self._questions]
        try:
            replies = await gather([self._client.tokenize(**prompt) for prompt in prompts])
        except BaseException:
            for one in self._streams:
                self._client.ask(AbortRequest(request_id=one.request_id))
            raise
        return [reply.token_ids for reply in replies for _ in range(request.n)]

    def usage(self, replies: Sequence[GenerateReply]) -> Usage:
        """Of all of them."""
        prompt_tokens = sum(one.usage.prompt_tokens for one in replies[:: self._request.n])
        cached_tokens = sum(one.usage.cached_tokens for one in replies[:: self._request.n])
        output_tokens = sum(one.usage.output_tokens for one in replies)
        return _usage(prompt_tokens, 0 if self._is_echo_only else output_tokens, cached_tokens)

    @property
    def _is_echo_only(self) -> bool:
        """The prompt is the answer: the one token that is generated is left out."""
        return self._request.max_tokens == 0

    @staticmethod
    def _without_output(reply: GenerateReply) -> GenerateReply:
        reply.text, reply.token_ids, reply.finish_reason = "", [], "length"
        reply.stop_reason = None
        reply.logprobs = None if reply.logprobs is None else []
        return reply

    @contextmanager
    def _fields_as_sent(self) -> Iterator[None]:
        """Names fields in errors as the client sent them."""
        try:
            yield
        except RequestError as error:
            rename_field(error, self._request)
            raise

    def stream(self, kind: str, choices: Sequence[Choice]) -> "EventStream":
        """The answers as they come, in pieces whose `object` is `kind`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        prefix = b"data: " + ENCODER.encode(head)[:-1] + b',"choices":['
        return EventStream(self, prefix, choices)

    async def send_all(self, stream: "EventStream", choices: Sequence[Choice]) -> None:
        """Sends the pieces of all answers, and the last words."""
        with self._fields_as_sent():
            prompts = await self.prompt_token_ids()
            replies = await gather(
                self._send_one(stream, *three)
                for three in zip(self._streams, choices, prompts, strict=True)
            )
        last = _DONE
        if self._request.stream_options.include_usage:
            last = b'%b],"usage":%b}\n\n' % (stream.prefix, ENCODER.encode(self.usage(replies)))
            last += _DONE
        await stream.send(last, more=False)

    async def _send_one(
        self, events: "EventStream", stream: AsyncStream, choice: Choice, prompt: list[int] | None
    ) -> GenerateReply:
        choice.prompt_token_ids = prompt if self._request.return_token_ids else None
        extras = self._extras(prompt or [])
        try:
            async for delta in stream:
                if self._is_echo_only:
                    delta.text, delta.token_ids, delta.logprobs = "", [], None
                extras.num_tokens += len(delta.token_ids)
                await events.send_pieces(choice.grow(delta), extras)
            reply = await stream.result()
            if self._is_echo_only:
                reply = self._without_output(reply)
            await events.send_pieces(choice.end(reply), extras)
        except asyncio.CancelledError:  # the stream itself hears of it only if it is waited for
            self._client.ask(AbortRequest(request_id=stream.request_id))
            raise
        return reply

    def _extras(self, prompt_token_ids: list[int]) -> "ChunkExtras":
        request = self._request
        is_chat = isinstance(request, ChatRequest)
        shows_ids = is_chat and request.return_token_ids
        shows_usage = request.stream_options.continuous_usage_stats
        return ChunkExtras(
            prompt_token_ids if shows_ids else None, len(prompt_token_ids) if shows_usage else None
        )


class ChunkExtras:
    """vLLM's additions to the chunks of one answer, after its choice."""

    def __init__(self, prompt_token_ids: list[int] | None, num_prompt_tokens: int | None) -> None:
        """prompt_token_ids: for the first chunk. num_prompt_tokens: for usage in each chunk."""
        self.num_tokens = 0
        """of the output so far"""
        self._first = b""
        if prompt_token_ids is not None:
            self._first = b',"prompt_token_ids":' + ENCODER.encode(prompt_token_ids)
        self._num_prompt_tokens = num_prompt_tokens

    def take(self) -> bytes:
        """For the next chunk."""
        extras, self._first = self._first, b""
        if self._num_prompt_tokens is not None:
            extras += b',"usage":' + ENCODER.encode(
                _usage(self._num_prompt_tokens, self.num_tokens)
            )
        return extras


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None) -> Usage:
    details = UNSET if cached_tokens is None else PromptTokensDetails(cached_tokens=cached_tokens)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=details,
    )


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

    async def send_pieces(self, choices: Iterable[Struct], extras: ChunkExtras) -> None:
        """One event for each choice."""
        prefix, encode = self.prefix, ENCODER.encode
        events = [b"%b%b]%b}\n\n" % (prefix, encode(one), extras.take()) for one in choices]
        if events:
            await self.send(b"".join(events))

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
