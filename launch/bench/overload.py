"""More requests than the pipeline can answer: what it answers then, and what it says to the others.

The capacity is measured first, in a closed loop: for each request that ends another one is sent.
Then requests come in an open loop, at a multiple of that rate, whatever is unanswered.

Most requests are no streams: at such rates a client that reads every token is slower than what it
measures.
"""

import itertools
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from random import Random
from typing import Any

import psutil
from msgspec import Struct

from penstock.launch.bench.measure import Meter
from penstock.launch.bench.streams import percentile
from penstock.launch.bench.workload import MAX_TOKEN_ID, Item, arrival_times
from penstock.launch.control_client import list_processes
from penstock.launch.errors import LaunchError
from penstock.protocol.client.session import Answer
from penstock.protocol.config import Config
from penstock.protocol.messages.client import ErrorReply, GenerateReply

NUM_PROMPTS = 61
"""A prime, and so none of the divisors of a vocabulary: the prompts are all different for long."""
STREAM_EVERY = 8
"""Of so many requests one is a stream, for its time to the first token."""
SETTLING = 0.1
"""The share of a part's time in which the batch fills, and of which no tokens are counted."""


class Figures(Struct):
    """One part: what was offered, and what came of it. NaN where there is nothing to measure."""

    seconds: float
    """from the first request to the last"""
    offered: int
    finished: int
    refused: int
    """told that the pipeline is overloaded"""
    failed: int
    """any other error"""
    output_tokens_per_second: float
    """of the requests that finished, from the settling to the last request sent"""
    sent_per_second: float
    latest_send_ms: float
    """by how much the latest request left after its time; 0 in a closed loop"""
    client_cores: float
    """CPU time of the client per second: near 1 it is the client that is measured"""
    ttft_ms: float
    ttft_p99_ms: float
    refusal_ms: float
    """from a request to its refusal, as the client sees it"""
    refusal_p99_ms: float
    refusal_worst_ms: float
    retry_after_least_s: float
    """of the refusals that say when to try again"""
    retry_after_most_s: float


class Outcome(Struct, gc=False):
    """One request. Times are those of `time.perf_counter()`, NaN for what has not happened."""

    start: float
    first: float = math.nan
    """the first token of a stream"""
    end: float = math.nan
    num_tokens: int = 0
    code: str = ""
    """of an error"""
    retry_after: float | None = None


def endless_prompts(
    input_tokens: int, output_tokens: int, seed: int, vocab_size: int
) -> Iterator[Item]:
    """Requests without end, different from the first token on.

    Outputs have 1 to `2 * output_tokens - 1` tokens, each length as likely: where all are of one
    length, all end at once.
    """
    rng = Random(f"overload {seed}")  # noqa: S311  to be repeatable, not secret
    size = min(MAX_TOKEN_ID + 1, vocab_size)
    prompts = [[rng.randrange(size) for _ in range(input_tokens)] for _ in range(NUM_PROMPTS)]
    for number in itertools.count():
        prompt = prompts[number % NUM_PROMPTS]
        yield Item([number % size, *prompt[1:]], rng.randint(1, 2 * output_tokens - 1))


class Part:
    """The requests of one part, and what has come of them."""

    def __init__(self, meter: Meter, items: Iterator[Item]) -> None:
        self.outcomes: list[Outcome] = []
        """of what has ended; refusals come by the thousand, so nothing else is kept of them"""
        self.num_sent = 0
        self._meter = meter
        self._items = items
        self._cpu = time.process_time()
        self._start = self._last = time.perf_counter()
        self._lateness = 0.0

    @property
    def num_open(self) -> int:
        """Requests that have no answer yet."""
        return self.num_sent - len(self.outcomes)

    def run_closed_loop(self, concurrency: int, seconds: float) -> None:
        """So many requests are open at any time."""
        while self._last < self._start + seconds:
            while self.num_open < concurrency:
                self._send()
            self._meter.wait()

    def run_open_loop(self, times: list[float]) -> None:
        """Each request is sent at its time in seconds, the first at 0."""
        for seconds in times:
            self._meter.take_until(self._start + seconds)
            self._send()
            self._lateness = max(self._lateness, self._last - self._start - seconds)

    def finish(self) -> Figures:
        """Waits for the answers."""
        cores = (time.process_time() - self._cpu) / (time.perf_counter() - self._start)
        while self.num_open:
            self._meter.wait()
        return as_figures(self.outcomes, self._start, self._last, self._lateness, cores)

    def _send(self) -> None:
        is_stream = self.num_sent % STREAM_EVERY == 0
        self.num_sent += 1
        self._last = time.perf_counter()
        outcome = Outcome(self._last)
        answer = self._meter.send(next(self._items), stream=is_stream)
        answer.on_change = lambda: self._on_change(answer, outcome)
        answer.on_change()  # what came while it was sent

    def _on_change(self, answer: Answer, outcome: Outcome) -> None:
        now = time.perf_counter()
        while delta := answer.take_delta():
            if delta.token_ids and math.isnan(outcome.first):
                outcome.first = now
        if answer.final:
            outcome.end = now
            self.outcomes.append(outcome)
        if isinstance(answer.final, GenerateReply):
            outcome.num_tokens = len(answer.final.token_ids)
        elif isinstance(answer.final, ErrorReply):
            outcome.code, outcome.retry_after = answer.final.code, answer.final.retry_after


def as_figures(
    outcomes: list[Outcome], start: float, last: float, lateness: float, cores: float
) -> Figures:
    """`start`, `last`: when the first and the last request left; `lateness` in seconds."""
    finished = [one for one in outcomes if not one.code]
    refusals = [one for one in outcomes if one.code == "overloaded"]
    seconds = last - start
    settled = start + SETTLING * seconds
    num_tokens = sum(one.num_tokens for one in finished if settled < one.end <= last)
    ttft = [one.first - one.start for one in finished if not math.isnan(one.first)]
    told = [one.end - one.start for one in refusals]
    retry_after = [one.retry_after for one in refusals if one.retry_after is not None]
    return Figures(
        seconds=seconds,
        offered=len(outcomes),
        finished=len(finished),
        refused=len(refusals),
        failed=len(outcomes) - len(finished) - len(refusals),
        output_tokens_per_second=num_tokens / (last - settled) if last > settled else math.nan,
        sent_per_second=(len(outcomes) - 1) / seconds if seconds else math.nan,
        latest_send_ms=lateness * 1e3,
        client_cores=cores,
        ttft_ms=percentile(ttft, 0.5) * 1e3,
        ttft_p99_ms=percentile(ttft, 0.99) * 1e3,
        refusal_ms=percentile(told, 0.5) * 1e3,
        refusal_p99_ms=percentile(told, 0.99) * 1e3,
        refusal_worst_ms=percentile(told, 1.0) * 1e3,
        retry_after_least_s=percentile(retry_after, 0.0),
        retry_after_most_s=percentile(retry_after, 1.0),
    )


def measure_overload(
    meter: Meter, items: Iterator[Item], concurrency: int, arguments: Namespace
) -> dict[str, Any]:
    """Both parts, and the memory of the pipeline's processes around the second.

    Raises LaunchError where the capacity can't be measured.
    """
    part = Part(meter, items)
    part.run_closed_loop(concurrency, arguments.capacity_seconds)
    capacity = part.finish()
    _check_capacity(capacity, concurrency)
    meter.settle()
    before = resident_mib(meter.config)
    rate = arguments.factor * capacity.output_tokens_per_second / arguments.output_tokens
    part = Part(meter, items)
    part.run_open_loop(
        arrival_times(math.ceil(rate * arguments.seconds), rate, arguments.bench_seed)
    )
    overload = part.finish()
    meter.settle()
    after = resident_mib(meter.config)
    return {
        "concurrency": concurrency,
        "capacity": capacity,
        "overload": overload,
        "goodput_share": overload.output_tokens_per_second / capacity.output_tokens_per_second,
        "resident_mib": {name: [before[name], after[name]] for name in before if name in after},
    }


def most_at_once(config: Config | None) -> int:
    """Twice what runs at once, so that some always wait, or as many as the pipeline takes."""
    if config is None:
        raise LaunchError("--endpoint needs --concurrency: the pipeline's limits are not known")
    return config.max_running + min(config.max_running, config.max_waiting_requests)


def _check_capacity(capacity: Figures, concurrency: int) -> None:
    num_refused = capacity.refused + capacity.failed
    if num_refused:
        raise LaunchError(
            f"{num_refused} of {capacity.offered} requests were refused while the capacity was "
            f"measured with {concurrency} at once; give a smaller --concurrency"
        )
    if not capacity.output_tokens_per_second > 0:
        raise LaunchError(
            f"no request ended in {capacity.seconds:.1f} s; give more --capacity-seconds, or fewer "
            "--output-tokens"
        )


def resident_mib(config: Config | None) -> dict[str, float]:
    """Memory that each process of the pipeline holds, in MiB; empty where they are not known."""
    if config is None:
        return {}
    processes = {one.name: psutil.Process(one.pid) for one in list_processes(config.name)}
    supervisor = psutil.Process(next(iter(processes.values())).ppid())
    return {
        name: process.memory_info().rss / 2**20
        for name, process in {"launch": supervisor, **processes}.items()
    }
