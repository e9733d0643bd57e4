"""One run of a benchmark: sends requests, waits for the answers, takes the time."""

import math
import statistics
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from penstock.launch.bench.target import Target, is_running
from penstock.launch.bench.workload import Item
from penstock.launch.client import Client
from penstock.launch.errors import LaunchError, NoAnswer
from penstock.launch.session import Answer
from penstock.protocol.client import GenerateReply, GenerateRequest, SchedulerStatus, StatusReply

SILENCE = 10.0
"""seconds without any answer after which a look is taken whether the pipeline is still there"""
REPORT_TIMEOUT = 5.0
"""seconds to wait for the scheduler's report of the end; it reports every half second"""


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


class Streaming(Struct):
    """What the clients of streams see, in milliseconds; NaN for outputs of one token."""

    ttft_ms: float
    """time to the first token, median of the requests"""
    itl_ms: float
    """time from one message of a stream to the next, median of all"""
    itl_p99_ms: float


class Meter(Client):
    """A client that measures. Raises LaunchError if the pipeline ends."""

    def __init__(self, pipeline: Target, temperature: float) -> None:
        super().__init__(pipeline.endpoint, timeout=SILENCE)
        self._config = pipeline.config
        self._temperature = temperature
        self.report = self.status(wait=True)
        """of the last idle moment"""

    @property
    def gpu_idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two of the last 1,024 steps."""
        return self._scheduler().gpu_idle_us

    def run(self, items: list[Item]) -> Run:
        """All at once, not streaming."""
        before, start = self._scheduler(), time.perf_counter()
        answers = [self._request(item) for item in items]
        replies = [self.wait_for(answer, GenerateReply) for answer in answers]
        seconds = time.perf_counter() - start
        self.report = self._report_of_the_end()
        preemptions = self._scheduler().num_preemptions - before.num_preemptions
        return _as_run(replies, seconds, preemptions)

    def run_streams(self, items: list[Item]) -> Streaming:
        """All at once, each token as it comes."""
        stamps = [Stamps(time.perf_counter(), self._request(item, stream=True)) for item in items]
        for one in stamps:
            self.wait_for(one.answer, GenerateReply)
        self.report = self._report_of_the_end()
        first = [one.times[0] - one.start for one in stamps]
        gaps = [b - a for one in stamps for a, b in zip(one.times, one.times[1:], strict=False)]
        return Streaming(
            ttft_ms=percentile(first, 0.5) * 1e3,
            itl_ms=percentile(gaps, 0.5) * 1e3,
            itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        )

    def wait(self) -> None:
        """However long an answer takes."""
        try:
            super().wait()
        except NoAnswer:
            if self._config and not is_running(self._config.name):
                raise LaunchError(
                    f"pipeline {self._config.name!r} ended before it answered; start one with "
                    "`launch all` and measure it with --name, to see its log"
                ) from None

    def _request(self, item: Item, *, stream: bool = False) -> Answer:
        return self._connection.ask(
            GenerateRequest(
                prompt=item.prompt,
                max_tokens=item.num_output_tokens,
                temperature=self._temperature,
                ignore_eos=True,
                stream=stream,
            )
        )

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


class Stamps:
    """When each message with tokens came for one request."""

    def __init__(self, start: float, answer: Answer) -> None:
        self.start = start
        self.times: list[float] = []
        self.answer = answer
        answer.on_change = self._stamp

    def _stamp(self) -> None:
        while delta := self.answer.take_delta():
            if delta.token_ids:
                self.times.append(time.perf_counter())


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


def median(runs: list[Run]) -> Run:
    """The median of each field."""
    columns = zip(*(msgspec.structs.astuple(run) for run in runs), strict=True)
    return Run(*(type(column[0])(statistics.median(column)) for column in columns))


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them don't exceed; NaN if there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
