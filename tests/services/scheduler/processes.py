"""A scheduler's process without its peers, and what they would say."""

from collections.abc import Iterable
from typing import Any

import zmq

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import (
    RequestFailed,
    StepTokens,
    StreamOpened,
    ToGateway,
    TokenizedRequest,
    ToScheduler,
)
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import Context, Endpoints
from penstock.services.scheduler.process import SchedulerProcess

SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=9)
NUM_BLOCKS = 16
INCARNATION = 3


class Gateway:
    """The other end of two of the scheduler's sockets."""

    def __init__(self, context: Context, at: Endpoints) -> None:
        self.results: Channel[Any] = context.bind(zmq.PULL, at.results, ToGateway)
        self.requests: Channel[Any] = context.connect(zmq.PUSH, at.requests)

    def failures(self, process: SchedulerProcess) -> list[RequestFailed]:
        """Return the scheduler's messages before the status that it sends now."""
        process.send_status()
        found: list[RequestFailed] = []
        while self.results.socket.poll(60_000):
            _, message = next(self.results.receive())
            if not isinstance(message, RequestFailed):
                return found
            found.append(message)
        raise AssertionError("the scheduler says nothing")


def deltas(process: SchedulerProcess) -> list[StepTokens]:
    """Return the messages to the detokenizer."""
    return [delta for _, delta in process.streams.take_messages()]


def opened(process: SchedulerProcess) -> list[StreamOpened]:
    """Return the streams that are opened at the detokenizer."""
    return [one for delta in deltas(process) for one in delta.opened]


def say(process: SchedulerProcess, *messages: ToScheduler) -> None:
    """Handle messages as if they came over the socket at once."""
    process.inbox.receive = lambda: iter([(b"", m) for m in messages])  # type: ignore
    process.on_requests()


def request(
    attempt: int = 0,
    request_id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    sampling: SamplingParams = SAMPLING,
) -> TokenizedRequest:
    return TokenizedRequest(request_id, attempt, sampling, pack(prompt), pack(output))


def step(process: SchedulerProcess, token_id: int = 5) -> None:
    """Every running sequence gets a token."""
    assert process.scheduler
    process.scheduler.schedule()
    oldest = process.scheduler.in_flight[0]
    token_ids = pack([token_id] * len(oldest.sampled))
    process.streams.put(process.scheduler.update(SampledTokens(0, oldest.number, token_ids)))


class Reports:
    """Reports of deaths that the supervisor receives."""

    def __init__(self) -> None:
        self.died_with: list[tuple[list[tuple[str, int]], int]] = []
        self.num_found = 0
        self.num_cleared = 0
        self.suspects = True

    def clear(self, digests: Iterable[bytes]) -> None:
        self.num_cleared += len(list(digests))

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        self.died_with.append((processes, len(suspects)))

    def found(self, _digest: bytes) -> None:
        self.num_found += 1
