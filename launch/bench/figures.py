"""Figures of benchmarks, by the names of vLLM's: of a run, of its streams, and their medians."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence

from penstock.protocol.client.session import Answer
from penstock.protocol.messages.client import GenerateReply, Usage

Figures = dict[str, float]
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


class Stamps:
    """Times at which the messages with tokens came, of a stream that was sent at `start`."""

    def __init__(self, start: float, answer: Answer | None = None) -> None:
        """answer: of a pipeline's client; without it, `add` is called with tokens."""
        self.start = start
        self.times: list[float] = []
        self.num_tokens = 0
        if answer:
            self.answer = answer
            answer.on_change = self._stamp
            self._stamp()  # what came while it was sent

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def tpot(self) -> float:
        """Seconds per output token, the first left out; NaN for one token."""
        if self.num_tokens < 2:
            return math.nan
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.start

    def is_good(self, limits: Mapping[str, float]) -> bool:
        """Return whether the request kept its limits: milliseconds by property."""
        return not any(getattr(self, name) * 1e3 > limit for name, limit in limits.items())

    def add(self, num_tokens: int) -> None:
        """Record a message with tokens, which comes now."""
        self.times.append(time.perf_counter())
        self.num_tokens += num_tokens

    def _stamp(self) -> None:
        while delta := self.answer.take_delta():
            if delta.token_ids:
                self.add(len(delta.token_ids))


def run_figures(replies: Sequence[GenerateReply], seconds: float, preemptions: int) -> Figures:
    """Return the figures of one run. seconds: from the first request sent to the last answer."""
    usages = [reply.usage for reply in replies]
    return usage_figures(usages, seconds) | {"preemptions": preemptions}


def usage_figures(usages: Sequence[Usage], seconds: float) -> Figures:
    """Return the figures of one run that every server reports, of its answers."""
    num_inputs = sum(usage.prompt_tokens for usage in usages)
    num_outputs = sum(usage.output_tokens for usage in usages)
    return {
        "completed": len(usages),
        "failed": 0,
        "total_input_tokens": num_inputs,
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "total_output_tokens": num_outputs,
        "duration": seconds,
        "request_throughput": len(usages) / seconds,
        "output_throughput": num_outputs / seconds,
        "total_token_throughput": (num_inputs + num_outputs) / seconds,
    }


def stream_figures(all_stamps: Sequence[Stamps]) -> Figures:
    """Return milliseconds of ended requests, except those that failed without a token.

    NaN where outputs of one token have none. ITL is the time from one message of a stream to the
    next, of all requests.
    """
    stamps = [one for one in all_stamps if one.times]
    seconds = {
        "ttft": [one.ttft for one in stamps],
        "tpot": [one.tpot for one in stamps if one.num_tokens > 1],
        "itl": [b - a for one in stamps for a, b in zip(one.times, one.times[1:], strict=False)],
        "e2el": [one.e2el for one in stamps],
    }
    figures: Figures = {}
    for name, values in seconds.items():
        figures[f"mean_{name}_ms"] = statistics.fmean(values) * 1e3 if values else math.nan
        for title, share in PERCENTILES.items():
            figures[f"{title}_{name}_ms"] = percentile(values, share) * 1e3
    return figures


def load_figures(
    run: Figures, stamps: Sequence[Stamps], times: Sequence[float], goodput: Mapping[str, float]
) -> Figures:
    """Return the figures of a run of `launch bench serve`.

    stamps: in the order of `times`, when requests should have left; goodput: milliseconds that a
    good request keeps within.
    """
    num_good = sum(bool(one.times) and one.is_good(goodput) for one in stamps)
    return {
        **run,
        **arrivals([one.start for one in stamps], times),
        "request_goodput": num_good / run["duration"] if goodput else math.nan,
        **stream_figures(stamps),
    }


def arrivals(starts: Sequence[float], times: Sequence[float]) -> Figures:
    """Return the achieved rate (NaN for one request) and the delay of the latest request.

    A client that is too slow shows in the delay.
    """
    sent = [start - starts[0] for start in starts]
    late = max(s - t for s, t in zip(sent, times, strict=True))
    rate = (len(sent) - 1) / sent[-1] if len(sent) > 1 else math.nan
    return {"sent_per_second": rate, "latest_send_ms": late * 1e3}


def median(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    first = runs[0]
    return {n: type(first[n])(statistics.median(run[n] for run in runs)) for n in first}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values don't exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
