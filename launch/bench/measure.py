"""One run of a benchmark: sends requests, waits for the answers, takes the time."""

import time
from typing import Any

from penstock.launch.bench.figures import Figures, Stamps, run_figures, stream_figures
from penstock.launch.bench.options import ModelOptions
from penstock.launch.bench.target import Target
from penstock.launch.bench.workload import Item
from penstock.launch.pipeline.target import LocalClient
from penstock.protocol.client.session import Answer
from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest
from penstock.protocol.messages.status import SchedulerStatus, StatusReply

# seconds to wait for the scheduler's report of the end; it reports every half second
REPORT_TIMEOUT = 5.0


class Meter(LocalClient):
    """A client that measures."""

    def __init__(self, pipeline: Target, options: ModelOptions) -> None:
        """Connect. Every request has the sampling parameters: the model may have other defaults."""
        name = pipeline.config.name if pipeline.config else None
        super().__init__(pipeline.endpoint, name, pipeline.keys)
        sampling = ("temperature", "top_k", "top_p")
        self.sampling: dict[str, Any] = {name: getattr(options, name) for name in sampling}
        self.sampling["min_p"] = 0.0
        self.report = self.status(wait=True)  # of the last idle moment

    @property
    def gpu_idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two of the last 1,024 steps."""
        return self._scheduler().gpu_idle_us

    def run(self, items: list[Item]) -> Figures:
        """All at once, not streaming."""
        start = time.perf_counter()
        return self._finish(start, [self.send(item) for item in items])

    def run_streams(self, items: list[Item]) -> Figures:
        """All at once, each token as it comes."""
        stamps = [self._stream(item) for item in items]
        self._finish(stamps[0].start, [one.answer for one in stamps])
        return stream_figures(stamps)

    def run_one_by_one(self, items: list[Item]) -> Figures:
        """Measure streams; each request is sent when the stream before has ended."""
        stamps = []
        for item in items:
            stamps.append(self._stream(item))
            self.wait_for(stamps[-1].answer, GenerateReply)
        return stream_figures(stamps)

    def run_load(
        self, items: list[Item], times: list[float], max_concurrency: int = 0
    ) -> tuple[Figures, list[Stamps]]:
        """Measure streams, sent at `times` in seconds, the first at 0.

        max_concurrency: unanswered requests at which a next one waits; 0: any number.
        """
        start, stamps = time.perf_counter(), []
        open_answers: list[Answer] = []
        for item, seconds in zip(items, times, strict=True):
            self.take_until(start + seconds)
            while max_concurrency and len(open_answers) >= max_concurrency:
                self.wait()
                open_answers = [answer for answer in open_answers if not answer.final]
            stamps.append(self._stream(item))
            open_answers.append(stamps[-1].answer)
        for one in stamps:
            while not one.answer.final:
                self.wait()
        failed = [one for one in stamps if isinstance(one.answer.final, ErrorReply)]
        for one in failed:
            one.times.clear()
        run = self._finish(start, [one.answer for one in stamps if one.times])
        return run | {"failed": len(failed)}, stamps

    def send(self, item: Item, *, stream: bool = False) -> Answer:
        return self.ask(
            GenerateRequest(
                prompt=item.prompt,
                max_tokens=item.num_output_tokens,
                ignore_eos=True,
                stream=stream,
                **self.sampling,
            )
        )

    def _stream(self, item: Item) -> Stamps:
        return Stamps(time.perf_counter(), self.send(item, stream=True))

    def _finish(self, start: float, answers: list[Answer]) -> Figures:
        """Wait for the answers, and until nothing runs."""
        replies = [self.wait_for(answer, GenerateReply) for answer in answers]
        seconds, before = time.perf_counter() - start, self._scheduler()
        self.report = self._report_of_the_end()
        preemptions = self._scheduler().num_preemptions - before.num_preemptions
        return run_figures(replies, seconds, preemptions)

    def _scheduler(self) -> SchedulerStatus:
        return self.report.scheduler or SchedulerStatus(epoch=0, ready=False)

    def _report_of_the_end(self) -> StatusReply:
        """Return the first report in which nothing runs."""
        deadline = time.monotonic() + REPORT_TIMEOUT
        while True:
            status = self.status(fresh=True)
            one = status.scheduler
            is_over = one and not one.num_running + one.num_waiting
            if is_over or time.monotonic() > deadline:  # others may use the pipeline, too
                return status
