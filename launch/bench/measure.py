"""One run of a benchmark: sends requests, waits for the answers, takes the time."""

import math
import statistics
import time
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock.launch.bench.streams import Stamps, Streaming, as_streaming
from penstock.launch.bench.target import Target, is_running
from penstock.launch.bench.workload import Item
from penstock.launch.client import Client
from penstock.launch.errors import LaunchError, NoAnswer
from penstock.launch.session import Answer
from penstock.protocol.client import GenerateReply, GenerateRequest
from penstock.protocol.status import SchedulerStatus, StatusReply

SILENCE = 10.0
"""seconds without any answer after which a look is taken whether the pipeline is still there"""
REPORT_TIMEOUT = 5.0
"""seconds to wait for the scheduler's report of the end; it reports every half second"""

Figures = TypeVar("Figures", bound=Struct)


class Run(Struct):
    """What one run took. A median of runs is one, too, with the median of each field."""

    requests: int
    input_tokens: int
    cached_tokens: int
    """those of `input_tokens` that came from the prefix cache"""
    output_tokens: int
    seconds: float
    """from the first request sent to the last answer"""
    output_tokens_per_second: float
    total_tokens_per_second: float
    preemptions: int


class Load(Run):
    """A run whose requests arrived at times of their own."""

    requests_per_second: float
    sent_per_second: float
    """the rate of arrivals that was achieved; NaN for one request"""
    latest_send_ms: float
    """by how much the latest request left after its time: a client that is too slow shows here"""


class Meter(Client):
    """A client that measures. Raises LaunchError if the pipeline ends."""

    def __init__(
        self, pipeline: Target, temperature: float, top_k: int = -1, top_p: float = 1.0
    ) -> None:
        """How tokens are drawn is said in every request: else the model's own defaults count."""
        super().__init__(pipeline.endpoint, timeout=SILENCE, keys=pipeline.keys)
        self.config = pipeline.config
        self._sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": 0.0,
        }
        self.report = self.status(wait=True)
        """of the last idle moment"""

    @property
    def gpu_idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two of the last 1,024 steps."""
        return self._scheduler().gpu_idle_us

    def run(self, items: list[Item]) -> Run:
        """All at once, not streaming."""
        start = time.perf_counter()
        return self._finish(start, [self.ask(item) for item in items])

    def run_streams(self, items: list[Item]) -> Streaming:
        """All at once, each token as it comes."""
        stamps = [self._stream(item) for item in items]
        self._finish(stamps[0].start, [one.answer for one in stamps])
        return as_streaming(stamps)

    def run_one_by_one(self, items: list[Item]) -> Streaming:
        """Streams, each sent when the one before has ended."""
        stamps = []
        for item in items:
            stamps.append(self._stream(item))
            self.wait_for(stamps[-1].answer, GenerateReply)
        return as_streaming(stamps)

    def run_load(self, items: list[Item], times: list[float]) -> tuple[Load, list[Stamps]]:
        """Streams, each sent at its time in seconds, the first at 0, whatever is unanswered."""
        start, stamps = time.perf_counter(), []
        for item, seconds in zip(items, times, strict=True):
            self.take_until(start + seconds)
            stamps.append(self._stream(item))
        run = self._finish(start, [one.answer for one in stamps])
        return as_load(run, [one.start - start for one in stamps], times), stamps

    def settle(self) -> None:
        """Waits until nothing runs."""
        self.report = self._report_of_the_end()

    def wait(self) -> None:
        """However long an answer takes."""
        try:
            super().wait()
        except NoAnswer:
            if self.config and not is_running(self.config.name):
                raise LaunchError(
                    f"pipeline {self.config.name!r} ended before it answered; start one with "
                    "`launch all` and measure it with --name, to see its log"
                ) from None

    def ask(self, item: Item, *, stream: bool = False) -> Answer:
        """Sends one request, and waits for nothing."""
        return self._connection.ask(
            GenerateRequest(
                prompt=item.prompt,
                max_tokens=item.num_output_tokens,
                ignore_eos=True,
                stream=stream,
                **self._sampling,
            )
        )

    def _stream(self, item: Item) -> Stamps:
        return Stamps(time.perf_counter(), self.ask(item, stream=True))

    def _finish(self, start: float, answers: list[Answer]) -> Run:
        """Waits for the answers, and until nothing runs."""
        replies = [self.wait_for(answer, GenerateReply) for answer in answers]
        seconds, before = time.perf_counter() - start, self._scheduler()
        self.settle()
        preemptions = self._scheduler().num_preemptions - before.num_preemptions
        return _as_run(replies, seconds, preemptions)

    def _scheduler(self) -> SchedulerStatus:
        return self.report.scheduler or SchedulerStatus(epoch=0, ready=False)

    def _report_of_the_end(self) -> StatusReply:
        """The first report in which nothing runs."""
        deadline = time.monotonic() + REPORT_TIMEOUT
        while True:
            status = self.status(fresh=True)
            one = status.scheduler
            is_over = one and not one.num_running + one.num_waiting
            if is_over or time.monotonic() > deadline:  # others may use the pipeline, too
                return status


def _as_run(replies: list[GenerateReply], seconds: float, preemptions: int) -> Run:
    num_inputs = sum(reply.usage.prompt_tokens for reply in replies)
    num_outputs = sum(len(reply.token_ids) for reply in replies)
    return Run(
        requests=len(replies),
        input_tokens=num_inputs,
        cached_tokens=sum(reply.usage.cached_tokens for reply in replies),
        output_tokens=num_outputs,
        seconds=seconds,
        output_tokens_per_second=num_outputs / seconds,
        total_tokens_per_second=(num_inputs + num_outputs) / seconds,
        preemptions=preemptions,
    )


def as_load(run: Run, sent: list[float], times: list[float]) -> Load:
    """`sent`: when each request left, in seconds; `times`: when it should have."""
    period = sent[-1] - sent[0]
    return Load(
        **msgspec.structs.asdict(run),
        requests_per_second=run.requests / run.seconds,
        sent_per_second=(len(sent) - 1) / period if len(sent) > 1 else math.nan,
        latest_send_ms=max(s - t for s, t in zip(sent, times, strict=True)) * 1e3,
    )


def median(runs: list[Figures]) -> Figures:
    """The median of each field."""
    columns = zip(*(msgspec.structs.astuple(run) for run in runs), strict=True)
    return type(runs[0])(*(type(column[0])(statistics.median(column)) for column in columns))
