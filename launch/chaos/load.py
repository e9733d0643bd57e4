"""The load: a fixed number of requests in flight, from a small set whose answers are known."""

import asyncio
import contextlib
import math
import time
from random import Random

import httpx
import msgspec

from penstock.launch.chaos.check import Content, Received
from penstock.launch.chaos.http_answers import read_answer
from penstock.launch.chaos.mix import Call, HttpCall
from penstock.launch.chaos.processes import Changes
from penstock.launch.chaos.schedule import ChaosOptions
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
)

MAX_TOKENS_BEFORE_ABORT = 1000
NO_EVENT = -1


class Flight:
    """One request on its way."""

    def __init__(self, number: int, kind: str, is_stream: bool) -> None:
        self.number = number  # of the request in the set
        self.kind = kind
        self.received = Received(is_stream=is_stream)
        self.event = NO_EVENT  # the last event before the answer's end
        self.silence = 0.0  # seconds, the longest since that event in which nothing came
        self.num_tokens = 0  # that the client has
        self._last = 0.0

    @property
    def is_over(self) -> bool:
        return self.received.is_over

    def begin_silence(self) -> None:
        self.silence, self._last = 0.0, time.monotonic()

    def silence_until_now(self) -> float:
        """Return the longest silence in seconds; an open request's last one continues until now."""
        return self.silence if self.is_over else max(self.silence, time.monotonic() - self._last)

    def note(self) -> int:
        """Note what was received; return the number of tokens that the client did not have."""
        received = self.received
        content = received.streamed if received.is_stream else received.reply
        before, self.num_tokens = self.num_tokens, content.num_tokens if content else 0
        if self.num_tokens > before or self.is_over:
            now = time.monotonic()
            self.silence, self._last = max(self.silence, now - self._last), now
        return self.num_tokens - before


class Load:
    """Keeps requests in flight until it is stopped."""

    def __init__(
        self,
        client: AsyncClient,
        http: httpx.AsyncClient,
        calls: list[Call],
        options: ChaosOptions,
        changes: Changes,
    ) -> None:
        self.num_tokens = 0  # received in all
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

    async def expected(self) -> list[Content]:
        """Return the undisturbed answer to each request of the set. Raises LaunchError."""
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
        self.done.clear()
        self.shortest = min(found, key=lambda number: found[number].num_tokens)
        return [found[number] for number in sorted(found)]

    def start(self) -> None:
        """Send requests drawn from the set, each replaced by another one when it ends."""
        self._tasks = [
            asyncio.create_task(self._keep_sending()) for _ in range(self._options.concurrency)
        ]

    async def end(self) -> None:
        """Start no more; return when all is answered, or nothing comes any more."""
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
        """Run one request, or abort it when the load has received this number of tokens more."""
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
        """Send a request over ZeroMQ; receive all of its answer."""
        answer = self._client.ask(msgspec.structs.replace(request))  # the client names it
        abort = abort_after and asyncio.create_task(self._abort(answer.request_id, abort_after))
        streamed = flight.received.streamed
        while True:
            while delta := answer.take_delta():
                streamed.extend("tokens", delta.token_ids)
                streamed.extend("text", delta.text)
                streamed.extend("logprobs", delta.logprobs or [])
            if isinstance(answer.final, GenerateReply | ErrorReply):
                flight.received.finish(answer.final)
            self._note(flight)
            if flight.is_over:
                break
            await self._client.change(answer)
        if abort:
            abort.cancel()

    async def _run_http(self, flight: Flight, call: HttpCall, abort_after: int | None) -> None:
        """Send a request over HTTP; an aborted one leaves with what it has."""
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
