"""The load: a fixed number of requests in flight, from a small set whose answers are known."""

import asyncio
import contextlib
import time
from random import Random

import msgspec

from penstock.launch.bench.workload import random_lengths, variant
from penstock.launch.chaos.check import Expected, Received
from penstock.launch.chaos.processes import Changes
from penstock.launch.chaos.schedule import ChaosOptions
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.session import Answer
from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
)

SHORT, LONG = 30, 250
"""tokens of an output, about"""
MAX_TOKENS_BEFORE_ABORT = 1000
NO_EVENT = -1


def make_requests(options: ChaosOptions, vocab_size: int, is_demo: bool) -> list[GenerateRequest]:
    """Different requests, every other one a stream: greedy ones, and at temperature 1 with a seed.

    The demo model counts and repeats; another one continues with random tokens.
    """
    draw = Random(f"requests {options.seed}")  # noqa: S311  to be repeatable, not secret
    items = random_lengths(options.distinct, SHORT, LONG, options.seed)
    requests = []
    for number, item in enumerate(variant(items, 0, vocab_size)):
        seed = draw.randrange(2**31) if number % 4 >= 2 else None
        request = GenerateRequest(
            prompt=_demo_prompt(draw, number) if is_demo else item.prompt,
            max_tokens=LONG * 2 if is_demo and seed is None else item.num_output_tokens,
            temperature=0.0 if seed is None else 1.0,
            top_k=-1,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            ignore_eos=not is_demo or seed is not None,
            stream=number % 2 == 0,
        )
        requests.append(request)
    return requests


def _demo_prompt(draw: Random, number: int) -> str:
    if number % 8 < 6:
        first = draw.randint(0, 900)
        return f"count from {first} to {first + draw.randint(10, 80)}"
    return "repeat: " + " ".join(f"{draw.randrange(10**6)} ✓ né" for _ in range(draw.randint(2, 8)))


class Flight:
    """One request on its way."""

    def __init__(self, number: int, answer: Answer, is_stream: bool) -> None:
        self.number = number
        """of the request in the set"""
        self.answer = answer
        self.received = Received(is_stream=is_stream)
        self.event = NO_EVENT
        """the last one before its end"""
        self.silence = 0.0
        """seconds, the longest since that event in which nothing came"""
        self._last = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.received.token_ids)

    @property
    def is_over(self) -> bool:
        return self.received.reply is not None

    def begin_silence(self) -> None:
        self.silence, self._last = 0.0, time.monotonic()

    def silence_until_now(self) -> float:
        """Return the longest silence in seconds; an open request's last one continues until now."""
        return self.silence if self.is_over else max(self.silence, time.monotonic() - self._last)

    def take(self) -> int:
        """Take what has come; return the number of tokens that the client did not have."""
        before = self.num_tokens
        while delta := self.answer.take_delta():
            self.received.token_ids += delta.token_ids
            self.received.text += delta.text
        num_tokens = self.num_tokens - before
        reply = self.answer.final
        if isinstance(reply, GenerateReply | ErrorReply):
            self.received.reply = reply
            if isinstance(reply, GenerateReply) and not self.received.is_stream:
                num_tokens = len(reply.token_ids)
        if num_tokens or self.is_over:
            now = time.monotonic()
            self.silence, self._last = max(self.silence, now - self._last), now
        return num_tokens


class Load:
    """Keeps requests in flight until it is stopped."""

    def __init__(
        self,
        client: AsyncClient,
        requests: list[GenerateRequest],
        options: ChaosOptions,
        changes: Changes,
    ) -> None:
        self.num_tokens = 0
        """received in all"""
        self.event = NO_EVENT
        """number of the event that was last"""
        self.shortest = 0
        """number of the request with the shortest answer"""
        self.open: list[Flight] = []
        self.done: list[Flight] = []
        self._client = client
        self._requests = requests
        self._options = options
        self._changes = changes
        self._draw = Random(f"load {options.seed}")  # noqa: S311
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []

    async def expected(self) -> list[Expected]:
        """Return the undisturbed answer to each request of the set. Raises LaunchError."""
        numbers = iter(range(len(self._requests)))
        found: dict[int, Expected] = {}

        async def ask() -> None:
            for number in numbers:
                reply = (await self.send(number)).received.reply
                if not isinstance(reply, GenerateReply):
                    raise LaunchError(f"a request failed before anything was killed: {reply}")
                found[number] = Expected(reply.token_ids, reply.text, reply.finish_reason)

        await asyncio.gather(*(ask() for _ in range(self._options.concurrency)))
        self.done.clear()
        self.shortest = min(found, key=lambda number: len(found[number].token_ids))
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
        request = msgspec.structs.replace(self._requests[number])  # the client names it
        flight = Flight(number, self._client.ask(request), request.stream)
        self.open.append(flight)
        abort = abort_after and asyncio.create_task(self._abort(flight, abort_after))
        while not self._take(flight).is_over:
            await self._client.change(flight.answer)
        if abort:
            abort.cancel()
        self.open.remove(flight)
        self._put(flight)
        return flight

    def _take(self, flight: Flight) -> Flight:
        self.num_tokens += flight.take()
        self._changes.notify()
        return flight

    def _put(self, flight: Flight) -> None:
        flight.event = self.event
        self.done.append(flight)

    async def _abort(self, flight: Flight, num_tokens: int) -> None:
        moment = self.num_tokens + num_tokens
        await self._changes.until(lambda: self.num_tokens >= moment)
        self._client.ask(AbortRequest(request_id=flight.answer.request_id))

    async def _keep_sending(self) -> None:
        while not self._is_ending:
            is_aborted = self._draw.random() < self._options.abort_share
            abort_after = self._draw.randint(1, MAX_TOKENS_BEFORE_ABORT) if is_aborted else None
            await self.send(self._draw.randrange(len(self._requests)), abort_after)
