"""One HTTP request for text: its requests to the pipeline, and their streams."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from msgspec import UNSET, Struct
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.protocol.client.client import AsyncStream
from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import AbortRequest, GenerateReply, PromptFields, TextDelta
from penstock.services.http.access import caller
from penstock.services.http.app_state import AppState
from penstock.services.http.errors import ApiError, as_api_error, invalid, rename_field
from penstock.services.http.replies import ENCODER, ChatChunk, StreamChunk, Usage
from penstock.services.http.schema import ApiRequest, ChatRequest, StreamOptions
from penstock.services.http.to_generate_request import name_as_sent

T = TypeVar("T")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """Converter of one answer's stream."""

    prompt_token_ids: list[int] | None
    """set before the first chunk, if they were requested"""

    def chunks(self, delta: TextDelta | None, reply: GenerateReply | None) -> Iterable[Struct]:
        """Return the chunks of new tokens, and, with the reply, the last ones."""


class Generation:
    """`n` requests for each prompt: answer i of prompt p is number p * n + i."""

    def __init__(
        self, state: AppState, kind: str, request: ApiRequest, prompts: list[dict[str, Any]]
    ) -> None:
        """Submit the requests. Raises ApiError.

        kind: the beginning of the id. prompts: fields of GenerateRequest for each prompt.
        """
        number = len(prompts) * request.n
        if number > state.max_answers:
            which = f"{number} answers to {len(prompts)} prompts"
            raise invalid("n", f"got {which}, expected at most {state.max_answers} answers")
        name = caller.get().unique_id
        self.head: dict[str, Any] = {
            "id": f"{kind}-{request.request_id or name}",
            "created": int(time.time()),
            "model": state.model,
        }
        """fields of the reply and of all chunks"""
        self._client = state.client
        self._request = request
        self._options = request.stream_options or StreamOptions()
        self._prompts = prompts
        self._is_echo_only = request.max_tokens == 0
        """the one generated token is left out of the reply"""
        given = f"-{request.request_id[:64]}" if request.request_id else ""
        inner_id = f"{kind}-{name}{given}"  # unique, even if two clients send the same id
        self._streams = [
            self._submit(prompt, f"{inner_id}-{index}", index % request.n)
            for index, prompt in enumerate(one for one in prompts for _ in range(request.n))
        ]

    def _submit(self, prompt: dict[str, Any], request_id: str, index: int) -> AsyncStream:
        request = self._request
        own = {
            "request_id": request_id,
            "seed": None if request.seed is None else request.seed + index,
            "stream": request.stream,
            "num_answers": 0 if index else request.n,
        }
        return self._client.submit(**prompt | own, client=caller.get().client)

    async def replies(self, receive: Receive) -> list[GenerateReply]:
        """Return all answers. Raises RequestError, ApiError, ClientDisconnect."""
        results = gather(map(self._result, self._streams))
        with self._fields_as_sent():
            return await while_connected(receive, results)

    async def prompt_token_ids(self) -> Sequence[list[int] | None]:
        """Return the prompt's ids for each answer, None if not requested. Raises RequestError."""
        request = self._request
        if not (request.return_token_ids or self._options.continuous_usage_stats):
            return [None] * len(self._streams)
        names = PromptFields.__struct_fields__
        prompts = [{k: v for k, v in one.items() if k in names} for one in self._prompts]
        try:
            replies = await gather(self._client.tokenize(**prompt) for prompt in prompts)
        except BaseException:
            for one in self._streams:
                self._client.ask(AbortRequest(request_id=one.request_id))
            raise
        return [reply.token_ids for reply in replies for _ in range(request.n)]

    def usage(self, replies: Sequence[GenerateReply]) -> Usage:
        """Return the sums over all answers; a prompt counts once."""
        first = [reply.usage for reply in replies[:: self._request.n]]
        output_tokens = 0 if self._is_echo_only else sum(one.usage.output_tokens for one in replies)
        usage = _usage(sum(one.prompt_tokens for one in first), output_tokens)
        usage.prompt_tokens_details = {"cached_tokens": sum(one.cached_tokens for one in first)}
        return usage

    def stream(self, kind: str, choices: Sequence[Choice]) -> "EventStream":
        """Return the answers as they arrive, in chunks whose `object` is `kind`."""
        return EventStream(lambda events: self._send_all(events, kind, choices))

    async def _send_all(self, events: "EventStream", kind: str, choices: Sequence[Choice]) -> None:
        with self._fields_as_sent():
            prompts = await self.prompt_token_ids()
            replies = await gather(
                self._send_one(events, StreamChunk(object=kind, **self.head), *three)
                for three in zip(self._streams, choices, prompts, strict=True)
            )
        last = StreamChunk(object=kind, **self.head, usage=self.usage(replies))
        await events.send([last] if self._options.include_usage else [], is_last=True)

    async def _send_one(
        self,
        events: "EventStream",
        chunk: StreamChunk,
        stream: AsyncStream,
        choice: Choice,
        prompt: list[int] | None,
    ) -> GenerateReply:
        if prompt is not None and self._request.return_token_ids:
            choice.prompt_token_ids = prompt
            chunk.prompt_token_ids = prompt if isinstance(self._request, ChatRequest) else UNSET
        if prompt is not None and self._options.continuous_usage_stats:
            chunk.usage = _usage(len(prompt), 0)
        last: TextDelta | None = None
        try:
            async for delta in stream:
                if self._is_echo_only:
                    continue
                if last:
                    await events.send(_chunks(chunk, choice, last, None))
                last = delta if delta.finish_reason else None  # the reply follows at once
                if last is None:
                    await events.send(_chunks(chunk, choice, delta, None))
            reply = await self._result(stream)
            await events.send(_chunks(chunk, choice, last, reply))
        except asyncio.CancelledError:  # the stream notices it only while it is awaited
            self._client.ask(AbortRequest(request_id=stream.request_id))
            raise
        return reply

    async def _result(self, stream: AsyncStream) -> GenerateReply:
        reply = await stream.result()
        if self._is_echo_only:
            reply.text, reply.token_ids, reply.finish_reason = "", [], "length"
            reply.stop_reason = None
            reply.logprobs = None if reply.logprobs is None else []
        return reply

    @contextmanager
    def _fields_as_sent(self) -> Iterator[None]:
        """Name fields in errors as the client sent them."""
        try:
            yield
        except RequestError as error:
            rename_field(error, name_as_sent(error.field, self._request))
            raise


def _chunks(
    chunk: StreamChunk, choice: Choice, delta: TextDelta | None, reply: GenerateReply | None
) -> Iterator[StreamChunk]:
    """Yield `chunk` with each piece of the choice; the first one has the prompt's ids."""
    num_tokens = len(delta.token_ids) if delta else 0
    for piece in choice.chunks(delta, reply):
        has_role = isinstance(piece, ChatChunk) and piece.delta.role  # and no token
        if chunk.usage is not UNSET and not has_role:
            chunk.usage.completion_tokens += num_tokens
            chunk.usage.total_tokens += num_tokens
            num_tokens = 0
        chunk.choices = [piece]
        yield chunk
        chunk.prompt_token_ids = UNSET


def _usage(prompt_tokens: int, output_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
    )


class EventStream(Response):
    """Server-sent events.

    The response starts with the first event. An error before it has a status of its own; a later
    error is an event.
    """

    def __init__(self, produce: Callable[["EventStream"], Coroutine[Any, Any, None]]) -> None:
        """produce: sends all events with `send`."""
        self.background = None
        self._produce = produce
        self._is_started = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await while_connected(receive, self._produce(self))
        except ClientDisconnect:
            return
        except (RequestError, ApiError) as error:
            if not self._is_started:
                raise
            await self.send([as_api_error(error).body], is_last=True)

    async def send(self, bodies: Iterable[Struct], is_last: bool = False) -> None:
        """Send each body as an event; after the last one, [DONE]."""
        data = b"".join([b"data: %b\n\n" % ENCODER.encode(one) for one in bodies])
        data += _DONE if is_last else b""
        if not data:
            return
        if not self._is_started:
            self._is_started = True
            head = {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the HTTP client disconnects.

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
        raise ApiError(503, "the server is stopping") from None
    finally:
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
