"""One HTTP request for text: its requests to the pipeline, and their streams."""

import asyncio
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

from msgspec import UNSET

from penstock.protocol.client.async_client import AsyncStream
from penstock.protocol.client.session import RequestError, gather
from penstock.protocol.messages.client import (
    AbortRequest,
    GenerateReply,
    Logprob,
    TextDelta,
    TokenLogprobs,
)
from penstock.services.http.generation.schema import (
    ApiRequest,
    ChatChunk,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    StreamChunk,
    StreamOptions,
    TopLogprob,
    Usage,
)
from penstock.services.http.generation.to_generate_request import name_as_sent, prompt_fields
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState
from penstock.services.http.shared.errors import FieldAsSent, fields_as_sent, invalid
from penstock.services.http.shared.event_stream import (
    Body,
    Chunks,
    EventForm,
    EventStream,
)

# logprobs of consecutive tokens; None for a token whose logprob was lost with a scheduler
Logprobs = list[TokenLogprobs | None] | None
_UNKNOWN = ChatLogprob(token="", logprob=-9999.0, bytes=None, top_logprobs=[])
# converter of new tokens to bodies of events; with the reply, to the last bodies
Convert = Callable[[TextDelta | None, GenerateReply | None], Iterable[Body]]
_CHUNKS = Chunks()


def chat_logprobs(tokens: Logprobs, names_ids: bool = False) -> ChatLogprobs | None:
    """Return the logprobs of a chat's answer. names_ids: as in `_name`."""
    if tokens is None:
        return None
    content = [
        ChatLogprob(
            token=_name(token, names_ids),
            logprob=token.logprob,
            bytes=token.bytes,
            top_logprobs=[
                TopLogprob(token=_name(top, names_ids), logprob=top.logprob, bytes=top.bytes)
                for top in token.top
            ],
        )
        if token
        else _UNKNOWN
        for token in tokens
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Logprobs, num_echoed: int = 0, names_ids: bool = False
) -> CompletionLogprobs | None:
    """Return the logprobs of a completion's output.

    num_echoed: characters of the prompt before it. names_ids: as in `_name`.
    """
    if tokens is None:
        return None
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    text_offset = num_echoed
    for token in tokens:
        if token and token.text_offset is not None:
            text_offset = num_echoed + token.text_offset
        _append(logprobs, text_offset, token, names_ids)
    return logprobs


def echoed_logprobs(
    prompt: str, tokens: list[TokenLogprobs | None], names_ids: bool = False
) -> CompletionLogprobs:
    """Return the logprobs of an echoed prompt. Its first token has no logprob.

    The text of the first token is the part of the prompt before the other tokens.
    """
    data, decoder = prompt.encode(), getincrementaldecoder("utf-8")("replace")
    first = data[: len(data) - sum(len(token.bytes) for token in tokens if token)]
    name, text_offset = first.decode(errors="replace"), len(decoder.decode(first))
    logprobs = CompletionLogprobs(
        text_offset=[0], token_logprobs=[None], tokens=[name], top_logprobs=[None]
    )
    for token in tokens[1:]:
        _append(logprobs, text_offset, token, names_ids)
        text_offset += len(decoder.decode(bytes(token.bytes))) if token else 0
    return logprobs


def prompt_logprobs(tokens: list[TokenLogprobs | None]) -> PromptLogprobs:
    """Return logprobs in vLLM's shape, by token id."""
    return [_by_id(token) if token else None for token in tokens]


def _by_id(token: TokenLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(other.token_id): PromptLogprob(
            logprob=other.logprob, rank=other.rank, decoded_token=other.token
        )
        for other in token.candidates
    }


def _append(
    logprobs: CompletionLogprobs, text_offset: int, token: TokenLogprobs | None, names_ids: bool
) -> None:
    # of two equal names the likelier token wins
    both: list[Logprob | TokenLogprobs] = [token, *reversed(token.top)] if token else []
    top = {_unique_name(other, names_ids): other.logprob for other in both}
    logprobs.text_offset.append(text_offset)
    logprobs.tokens.append(_unique_name(token, names_ids) if token else "")
    logprobs.token_logprobs.append(token.logprob if token else None)
    logprobs.top_logprobs.append(top or None)


def _name(token: Logprob | TokenLogprobs, names_ids: bool) -> str:
    """Return a token's text, or, with names_ids, `token_id:N`, which is unique."""
    return f"token_id:{token.token_id}" if names_ids else token.token


def _unique_name(token: Logprob | TokenLogprobs, names_ids: bool) -> str:
    """Return a token's text, or like OpenAI `bytes:\\xe2\\x82` for a part of a character."""
    if names_ids or "\ufffd" not in token.token:
        return _name(token, names_ids)
    data = bytes(token.bytes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Choice(Protocol):
    """Converter of one answer's stream."""

    prompt_token_ids: list[int] | None  # set before the first chunk, if requested

    def chunks(self, delta: TextDelta | None, reply: GenerateReply | None) -> Iterable[Body]:
        """Return the chunks of new tokens, if any, and with the reply the last chunks."""


def check_number(state: AppState, num_prompts: int, n: int) -> None:
    """Refuse more answers than one HTTP request may have. Raises ApiError."""
    number = num_prompts * n
    if number > state.max_answers:
        which = f"{number} answers to {num_prompts} prompts"
        raise invalid("n", f"got {which}, expected at most {state.max_answers} answers")


class Generation:
    """`n` requests for each prompt: answer i of prompt p is number p * n + i."""

    def __init__(
        self,
        state: AppState,
        kind: str,
        request: ApiRequest,
        prompts: list[dict[str, Any]],
        field_as_sent: FieldAsSent = str,
    ) -> None:
        """Submit the requests. Raises ApiError.

        kind: the beginning of the id. prompts: fields of GenerateRequest for each prompt.
        field_as_sent: returns the client's name for a field of `request` in another API.
        """
        check_number(state, len(prompts), request.n)
        name = caller.get().unique_id
        # fields of the reply and of all chunks
        self.head: dict[str, Any] = {
            "id": f"{kind}-{request.request_id or name}",
            "created": int(time.time()),
            "model": state.model,
        }
        self._client = state.client
        self._request = request
        self._options = request.stream_options or StreamOptions()
        self._prompts = prompts
        self._field_as_sent: FieldAsSent = lambda name: field_as_sent(name_as_sent(name, request))
        # the only generated token is left out of the reply
        self._is_echo_only = request.max_tokens == 0
        given = f"-{request.request_id[:64]}" if request.request_id else ""
        # unique, even if two clients send the same id
        inner_id = f"{kind}-{name}{given}"
        own = {"n": request.n, "stream": request.stream, "client": caller.get().client}
        several = (
            state.client.submit_n(**prompt | own, request_id=f"{inner_id}-{index}")
            for index, prompt in enumerate(prompts)
        )
        self._streams = [*chain.from_iterable(several)]

    async def replies(self) -> list[GenerateReply]:
        """Return all answers. Raises RequestError, ApiError."""
        with fields_as_sent(self._field_as_sent):
            replies = await gather(map(self._result, self._streams))
        for index, reply in enumerate(replies):
            reply.prompt_logprobs = replies[index - index % self._request.n].prompt_logprobs
        return replies

    async def prompt_token_ids(self) -> Sequence[list[int] | None]:
        """Return the prompt's ids for each answer, None if not requested. Raises RequestError."""
        request = self._request
        if not (request.return_token_ids or self._options.has_usage_in_chunks):
            return [None] * len(self._prompts) * request.n
        sender, tokenize = caller.get().client, self._client.tokenize
        with self.aborted_on_error():
            replies = await gather(
                tokenize(**prompt_fields(prompt), client=sender) for prompt in self._prompts
            )
        return [reply.token_ids for reply in replies for _ in range(request.n)]

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Abort the requests if the block fails."""
        try:
            yield
        except BaseException:
            for stream in self._streams:
                self._client.ask(AbortRequest(request_id=stream.request_id))
            raise

    def usage(self, replies: Sequence[GenerateReply]) -> Usage:
        """Return the sums over all answers; a prompt counts once."""
        first = [reply.usage for reply in replies[:: self._request.n]]
        output_tokens = (
            0 if self._is_echo_only else sum(reply.usage.output_tokens for reply in replies)
        )
        usage = _usage(sum(usage.prompt_tokens for usage in first), output_tokens)
        usage.prompt_tokens_details = {"cached_tokens": sum(usage.cached_tokens for usage in first)}
        return usage

    def stream(self, kind: str, choices: Sequence[Choice]) -> EventStream:
        """Return the answers as they arrive, in chunks whose `object` is `kind`."""
        return EventStream(_CHUNKS, lambda events: self._send_all(events, kind, choices))

    def stream_events(self, form: EventForm, convert: Convert) -> EventStream:
        """Return the only answer as it arrives, in the events of another API."""

        async def send_events(events: EventStream) -> None:
            with fields_as_sent(self._field_as_sent):
                await self._send_one(events, self._streams[0], convert)
            await events.send([], is_last=True)

        return EventStream(form, send_events)

    async def _send_all(self, events: EventStream, kind: str, choices: Sequence[Choice]) -> None:
        with fields_as_sent(self._field_as_sent):
            prompts = await self.prompt_token_ids()
            works = zip(self._streams, choices, prompts, self._shared(), strict=True)
            replies = await gather(
                self._send_one(events, stream, self._converter(kind, choice, prompt, shared), turn)
                for stream, choice, prompt, (shared, turn) in works
            )
        last = StreamChunk(object=kind, **self.head, usage=self.usage(replies))
        await events.send([last] if self._options.include_usage else [], is_last=True)

    def _shared(self) -> Iterator[tuple["SharedLogprobs", asyncio.Event | None]]:
        """Yield the shared logprobs of each answer's prompt, and the event to wait for, if any."""
        for prompt in self._prompts:
            shared = SharedLogprobs()
            yield shared, None
            turn = None if prompt["prompt_logprobs"] is None else shared.are_known
            yield from [(shared, turn)] * (self._request.n - 1)

    def _converter(
        self, kind: str, choice: Choice, prompt: list[int] | None, shared: "SharedLogprobs"
    ) -> Convert:
        chunk = StreamChunk(object=kind, **self.head)
        if prompt is not None and self._request.return_token_ids:
            choice.prompt_token_ids = prompt
            chunk.prompt_token_ids = prompt if isinstance(self._request, ChatRequest) else UNSET
        if prompt is not None and self._options.has_usage_in_chunks:
            chunk.usage = _usage(len(prompt), 0)
        return partial(_chunks, chunk, choice, shared)

    async def _send_one(
        self,
        events: EventStream,
        stream: AsyncStream,
        convert: Convert,
        turn: asyncio.Event | None = None,
    ) -> GenerateReply:
        """Wait for `turn`, then send all events of an answer. Return its reply."""
        last: TextDelta | None = None

        def pass_on(delta: TextDelta) -> bool:
            """Send new output without waking this task. Return False if the output has to wait."""
            if not self._is_echo_only:
                if last or delta.finish_reason or not events.is_ready:
                    return False
                events.write(convert(delta, None))
            return True

        try:
            if turn:
                await turn.wait()
            while delta := await stream.next_delta(pass_on):
                if last:
                    await events.send(convert(last, None))
                last = delta if delta.finish_reason else None  # the reply follows at once
                if last is None:
                    stream.block()
                    await events.send(convert(delta, None))
                    stream.unblock()
            reply = await self._result(stream)
            await events.send(convert(last, reply))
        except RequestError:  # the request has ended
            raise
        except BaseException:  # the stream notices a cancellation only while it is awaited
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


class SharedLogprobs:
    """Logprobs of a prompt, which arrive with its first answer, for all of its answers."""

    def __init__(self) -> None:
        self.are_known = asyncio.Event()
        self._tokens: list[TokenLogprobs | None] | None = None

    def share(self, piece: TextDelta | GenerateReply) -> None:
        """Take the logprobs from the first answer's first piece, or add them to another's piece."""
        if not self.are_known.is_set():
            self._tokens = piece.prompt_logprobs
            self.are_known.set()
        piece.prompt_logprobs = self._tokens


def _chunks(
    chunk: StreamChunk,
    choice: Choice,
    shared: SharedLogprobs,
    delta: TextDelta | None,
    reply: GenerateReply | None,
) -> Iterator[StreamChunk]:
    """Yield `chunk` with each piece of the choice. A chat's first chunk has the prompt's data."""
    num_tokens = len(delta.token_ids) if delta else 0
    first = None if chunk.choices else delta or reply
    if first:
        shared.share(first)
    for piece in choice.chunks(delta, reply):
        has_role = isinstance(piece, ChatChunk) and piece.delta.role  # and no token
        if chunk.usage is not UNSET and not has_role:
            chunk.usage.completion_tokens += num_tokens
            chunk.usage.total_tokens += num_tokens
            num_tokens = 0
        if first and first.prompt_logprobs and isinstance(piece, ChatChunk):
            chunk.prompt_logprobs = prompt_logprobs(first.prompt_logprobs)
        chunk.choices = [piece]
        yield chunk
        first, chunk.prompt_logprobs, chunk.prompt_token_ids = None, UNSET, UNSET


def _usage(prompt_tokens: int, output_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
    )
