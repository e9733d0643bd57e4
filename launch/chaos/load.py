"""The load of `launch chaos`: requests in flight, drawn from a small set with known answers."""

import asyncio
import contextlib
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from msgspec import Struct, field

from penstock.launch.chaos.mix import Call, HttpCall
from penstock.launch.chaos.processes import Changes, ChaosOptions
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
)

NO_ANSWER = "no answer"
Data = dict[str, Any]
MAX_TOKENS_BEFORE_ABORT = 1000
NO_EVENT = -1


class Content(Struct):
    """Answer in comparable form: sequences by name, and the end of the answer."""

    # lists or strings by name: `tokens`, `text`, `0.content`, `0.logprobs`
    parts: dict[str, Any] = {}
    finish: Any = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, or of characters in all parts if the tokens are not known."""
        if "tokens" in self.parts:
            return len(self.parts["tokens"])
        return sum(len(part) for part in self.parts.values() if isinstance(part, str))

    def extend(self, name: str, more: list[Any] | str) -> None:
        """Append to a part, which is created if it is missing."""
        if more:
            self.parts[name] = self.parts.get(name, more[:0]) + more

    def begins(self, whole: "Content") -> bool:
        """Return whether each part is a prefix of the same part of `whole`."""
        return all(
            whole.parts.get(name, part[:0])[: len(part)] == part
            for name, part in self.parts.items()
        )


class Answers(Struct):
    """Answers of an undisturbed pipeline in a file, for runs with other options."""

    requests: str  # digest of the requests
    answers: list[Content]

    @classmethod
    def read(cls, file: Path, requests: str) -> "Answers":
        """Read the answers to these requests. Raises LaunchError."""
        wanted = "expected answers to the requests of these --mix, --distinct and --seed"
        try:
            answers = msgspec.msgpack.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise LaunchError(f"--answers: got {file}: {error}, {wanted}") from error
        if answers.requests != requests:
            raise LaunchError(f"--answers: got {file} with other requests, {wanted}")
        return answers


class Received(Struct):
    """Stream and reply that a client received for a request."""

    is_stream: bool
    streamed: Content = field(default_factory=Content)
    reply: Content | None = None  # None: no reply yet
    error: str = ""  # reason why the request failed
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.reply is not None or bool(self.error)

    def finish(self, reply: GenerateReply | ErrorReply) -> None:
        """Set the gateway's reply."""
        if isinstance(reply, ErrorReply):
            self.error = f"{reply.code}: {reply.message}"
        else:
            self.reply = content_of(reply)
            self.is_aborted = reply.finish_reason == "abort"


class Verdict(Struct):
    """Faults of an answer; the defaults mean a correct answer."""

    lost: str = ""  # reason for a missing answer
    tokens_lost: int = 0
    tokens_doubled: int = 0
    is_torn: bool = False  # the stream differs from the final reply
    is_different: bool = False  # a token, character or number differs from the undisturbed answer


def content_of(reply: GenerateReply) -> Content:
    """Return the content of a gateway's reply."""
    parts = {
        "tokens": reply.token_ids,
        "text": reply.text,
        "logprobs": reply.logprobs,
        "prompt_logprobs": reply.prompt_logprobs,
        "pooled": reply.pooled,
    }
    given = {name: part for name, part in parts.items() if part is not None}
    return Content(
        msgspec.to_builtins(given, builtin_types=(bytes,)), [reply.finish_reason, reply.stop_reason]
    )


def check(received: Received, expected: Content) -> Verdict:
    """Compare the stream with the reply, and both with the expected answer.

    Missing tokens of a stream count as lost, additional tokens as doubled. If a stream has one lost
    and one doubled token, it is different. The answer of an aborted request must be a prefix of any
    length.
    """
    reply = received.reply
    if reply is None:
        return Verdict(lost=received.error or NO_ANSWER)
    streamed = received.streamed if received.is_stream else reply
    if received.is_aborted:
        return Verdict(
            is_torn=not (reply.begins(streamed) or streamed.begins(reply)),
            is_different=not (reply.begins(expected) and streamed.begins(expected)),
        )
    lengths = reply.num_tokens, streamed.num_tokens
    return Verdict(
        tokens_lost=max(expected.num_tokens - min(lengths), 0),
        tokens_doubled=max(max(lengths) - expected.num_tokens, 0),
        is_torn=not _agree(streamed, reply),
        is_different=reply != expected or not _agree(streamed, expected),
    )


def _agree(streamed: Content, whole: Content) -> bool:
    """Return whether a stream contains the whole answer.

    Prompt logprobs and pooled numbers are only in replies.
    """
    parts = streamed.parts
    return (
        all(
            part == parts.get(name, part[:0])
            for name, part in whole.parts.items()
            if name not in ("prompt_logprobs", "pooled")
        )
        and parts.keys() <= whole.parts.keys()
    )


async def read_answer(client: httpx.AsyncClient, call: HttpCall, received: Received) -> Any:
    """Yield after each piece of an answer that was added to `received`."""
    try:
        async with client.stream("POST", call.path, json=call.body) as reply:
            if reply.status_code != httpx.codes.OK:
                received.error = f"{reply.status_code}: {(await reply.aread()).decode()[:300]}"
            elif not call.stream:
                received.reply = _whole(call.path, json.loads(await reply.aread()))
            else:
                async for data in _events(reply):
                    _add(call.path, data, received)
                    yield
                if not received.is_over:  # chats and messages do not repeat the answer at the end
                    received.reply = received.streamed
    except httpx.HTTPError as error:
        received.error = f"{type(error).__name__}: {error}"
    yield


async def _events(reply: httpx.Response) -> AsyncIterator[Data]:
    """Yield the data of each event. Only "\\n" ends a line, since text may contain U+2028."""
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _add(path: str, data: Data, received: Received) -> None:
    """Add a stream's event."""
    if error := data.get("error") or (data["type"] == "error" if "type" in data else None):
        received.error = json.dumps(error if isinstance(error, dict) else data)[:300]
    elif path == "/v1/responses":
        _add_response_event(data, received)
    elif path == "/v1/messages":
        _add_message_event(data, received.streamed)
    else:
        for choice in data["choices"]:
            _add_choice(choice, choice["delta"], received.streamed)


def _add_choice(choice: Data, message: Data, content: Content) -> None:
    """Add a choice of a chat, or a part of a choice."""
    index = choice["index"]
    content.extend(f"{index}.reasoning", message.get("reasoning_content") or "")
    content.extend(f"{index}.content", message.get("content") or "")
    for position, call in enumerate(message.get("tool_calls") or []):
        place = f"{index}.call.{call.get('index', position)}"
        content.extend(f"{place}.name", call["function"].get("name") or "")
        content.extend(f"{place}.arguments", call["function"].get("arguments") or "")
    content.extend(f"{index}.logprobs", (choice.get("logprobs") or {}).get("content") or [])
    if choice.get("finish_reason"):
        content.finish = (content.finish or {}) | {index: choice["finish_reason"]}


def _add_response_event(data: Data, received: Received) -> None:
    """Add an event of the Responses API; the last event has the whole answer."""
    parts = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "reasoning",
        "response.function_call_arguments.delta": "arguments",
    }
    if part := parts.get(data["type"]):
        received.streamed.extend(f"{data['output_index']}.{part}", data["delta"])
    elif data["type"] in ("response.completed", "response.incomplete"):
        received.reply = _response(data["response"])
    elif data["type"] == "response.failed":
        received.error = json.dumps(data["response"].get("error"))


def _add_message_event(data: Data, content: Content) -> None:
    """Add an event of the Messages API."""
    match data:
        case {"type": "content_block_start", "index": index, "content_block": {"name": str(name)}}:
            content.extend(f"{index}.name", name)
        case {"type": "content_block_delta", "index": index, "delta": delta}:
            for part in ("text", "thinking", "partial_json"):
                content.extend(f"{index}.{part}", delta.get(part, ""))
        case {"type": "message_delta", "delta": delta}:
            content.finish = [delta["stop_reason"], delta["stop_sequence"]]


def _whole(path: str, data: Data) -> Content:
    """Return the content of a reply without streaming."""
    content = Content()
    if path == "/v1/responses":
        return _response(data)
    if path == "/v1/messages":
        for index, block in enumerate(data["content"]):
            for part in ("text", "thinking", "name"):
                content.extend(f"{index}.{part}", block.get(part, ""))
            content.extend(f"{index}.input", json.dumps(block.get("input", "")))
        content.finish = [data["stop_reason"], data["stop_sequence"]]
        return content
    for choice in data["choices"]:
        _add_choice(choice, choice["message"], content)
    return content


def _response(data: Data) -> Content:
    """Return the content of a reply of the Responses API."""
    content = Content(finish=[data["status"], data.get("incomplete_details")])
    for index, item in enumerate(data["output"]):
        part = "reasoning" if item["type"] == "reasoning" else "text"
        for piece in item.get("content") or []:
            content.extend(f"{index}.{part}", piece.get("text", ""))
        content.extend(f"{index}.arguments", item.get("arguments", ""))
    return content


class Flight:
    """Request in flight."""

    def __init__(self, number: int, kind: str, is_stream: bool) -> None:
        self.number = number  # number of the request in the set
        self.kind = kind
        self.received = Received(is_stream=is_stream)
        self.event = NO_EVENT  # the last event before the answer's end
        self.silence = 0.0  # longest silence since that event, in seconds
        self.num_tokens = 0  # tokens that the client has received
        self._last = 0.0

    @property
    def is_over(self) -> bool:
        return self.received.is_over

    def begin_silence(self) -> None:
        self.silence, self._last = 0.0, time.monotonic()

    def silence_until_now(self) -> float:
        """Return the longest silence in seconds; for an open request, silence lasts until now."""
        return self.silence if self.is_over else max(self.silence, time.monotonic() - self._last)

    def note(self) -> int:
        """Record what was received; return the number of new tokens for the client."""
        received = self.received
        content = received.streamed if received.is_stream else received.reply
        before, self.num_tokens = self.num_tokens, content.num_tokens if content else 0
        if self.num_tokens > before or self.is_over:
            now = time.monotonic()
            self.silence, self._last = max(self.silence, now - self._last), now
        return self.num_tokens - before


class Load:
    """Load that keeps requests in flight until it is stopped."""

    def __init__(
        self,
        client: AsyncClient,
        http: httpx.AsyncClient,
        calls: list[Call],
        options: ChaosOptions,
        changes: Changes,
    ) -> None:
        self.num_tokens = 0  # total tokens received
        self.event = NO_EVENT  # number of the last event
        self.shortest = 0  # number of the request with the shortest answer
        self.open: list[Flight] = []
        self.done: list[Flight] = []
        self._client = client
        self._http = http
        self._calls = calls
        self._options = options
        self._changes = changes
        self._draw = Random(f"load {options.seed}")  # noqa: S311
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    async def expected(self, file: Path | None = None) -> list[Content]:
        """Return the undisturbed answer to each request of the set. Raises LaunchError.

        file: has the answers of another pipeline, with which the undisturbed ones are compared as
        well. A missing file is written.
        """
        requests = hashlib.sha256(msgspec.msgpack.encode(self._calls)).hexdigest()
        known = Answers.read(file, requests).answers if file and file.exists() else None
        numbers = iter(range(len(self._calls)))
        found: dict[int, Content] = {}

        async def ask() -> None:
            for number in numbers:
                received = (await self.send(number)).received
                if received.reply is None:
                    kind, error = self._calls[number].kind, received.error
                    raise LaunchError(f"a {kind} request failed before any kill: {error}")
                found[number] = received.reply

        await asyncio.gather(*(ask() for _ in range(self._options.concurrency)))
        self.shortest = min(found, key=lambda number: found[number].num_tokens)
        if known:
            return known
        self.done.clear()
        answers = [found[number] for number in sorted(found)]
        if file:
            file.write_bytes(msgspec.msgpack.encode(Answers(requests, answers)))
        return answers

    def start(self) -> None:
        """Send requests drawn from the set; an ended request is replaced by another."""
        self._tasks = [
            asyncio.create_task(self._keep_sending()) for _ in range(self._options.concurrency)
        ]

    async def end(self) -> None:
        """Send no new requests; return when all are answered, or nothing arrives any more."""
        self._is_ending = True
        with contextlib.suppress(TimeoutError):
            await self._changes.until(lambda: not self.open, self._options.recovery_timeout)
        for flight in self.open:
            self._put(flight)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def send(self, number: int, abort_after: int | None = None) -> Flight:
        """Send a request; abort it once the load has received `abort_after` more tokens."""
        call = self._calls[number]
        flight = Flight(number, call.kind, call.request.stream)
        self.open.append(flight)
        if isinstance(call.request, HttpCall):
            await self._run_http(flight, call.request, abort_after)
        else:
            await self._run(flight, call.request, abort_after)
        self.open.remove(flight)
        self._put(flight)
        return flight

    async def _run(self, flight: Flight, request: GenerateRequest, abort_after: int | None) -> None:
        """Send a request over ZeroMQ and receive the whole answer."""
        answer = self._client.ask(msgspec.structs.replace(request))  # the client sets the id
        abort = abort_after and asyncio.create_task(self._abort(answer.request_id, abort_after))
        streamed = flight.received.streamed
        while True:
            while delta := answer.take_delta():
                streamed.extend("tokens", delta.token_ids)
                streamed.extend("text", delta.text)
                streamed.extend("logprobs", msgspec.to_builtins(delta.logprobs or []))
            if isinstance(answer.final, GenerateReply | ErrorReply):
                flight.received.finish(answer.final)
            self._note(flight)
            if flight.is_over:
                break
            await self._client.change(answer)
        if abort:
            abort.cancel()

    async def _run_http(self, flight: Flight, call: HttpCall, abort_after: int | None) -> None:
        """Send a request over HTTP; for an abort, the client disconnects."""
        moment = math.inf if abort_after is None else self.num_tokens + abort_after
        async with contextlib.aclosing(read_answer(self._http, call, flight.received)) as pieces:
            async for _ in pieces:
                self._note(flight)
                if self.num_tokens >= moment and not flight.is_over:
                    flight.received.reply = flight.received.streamed
                    flight.received.is_aborted = True
                    break

    def _note(self, flight: Flight) -> None:
        self.num_tokens += flight.note()
        self._changes.notify()

    def _put(self, flight: Flight) -> None:
        flight.event = self.event
        self.done.append(flight)

    async def _abort(self, request_id: str, num_tokens: int) -> None:
        moment = self.num_tokens + num_tokens
        await self._changes.until(lambda: self.num_tokens >= moment)
        self._client.ask(AbortRequest(request_id=request_id))

    async def _keep_sending(self) -> None:
        while not self._is_ending:
            is_aborted = self._draw.random() < self._options.abort_share
            abort_after = self._draw.randint(1, MAX_TOKENS_BEFORE_ABORT) if is_aborted else None
            await self.send(self._draw.randrange(len(self._calls)), abort_after)
