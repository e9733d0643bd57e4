"""Times at which clients of streams receive tokens, and the figures computed from them."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from penstock.protocol.client.session import Answer


class Streaming(Struct):
    """In milliseconds; NaN where outputs of one token have none. Names as in vLLM's benchmarks."""

    mean_ttft_ms: float
    """time to the first token"""
    median_ttft_ms: float
    p90_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    """time per output token of a request, the first left out"""
    median_tpot_ms: float
    p90_tpot_ms: float
    p99_tpot_ms: float
    mean_itl_ms: float
    """time from one message of a stream to the next, of all requests"""
    median_itl_ms: float
    p90_itl_ms: float
    p99_itl_ms: float
    mean_e2el_ms: float
    """time to the last token"""
    median_e2el_ms: float
    p90_e2el_ms: float
    p99_e2el_ms: float


class Stamps:
    """Times at which the messages with tokens came, of a stream that was sent at `start`."""

    def __init__(self, start: float, answer: Answer) -> None:
        self.start = start
        self.times: list[float] = []
        self.num_tokens = 0
        self.answer = answer
        answer.on_change = self._stamp
        self._stamp()  # what came while it was sent

    @property
    def ttft(self) -> float:
        """Seconds, as those below."""
        return self.times[0] - self.start

    @property
    def tpot(self) -> float:
        """NaN for one token."""
        if self.num_tokens < 2:
            return math.nan
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float:
        """To the last token."""
        return self.times[-1] - self.start

    def is_good(self, limits: Mapping[str, float]) -> bool:
        """Return whether the request kept its limits: milliseconds by property."""
        return not any(getattr(self, name) * 1e3 > limit for name, limit in limits.items())

    def _stamp(self) -> None:
        while delta := self.answer.take_delta():
            if delta.token_ids:
                self.times.append(time.perf_counter())
                self.num_tokens += len(delta.token_ids)


def as_streaming(all_times: Sequence[Stamps]) -> Streaming:
    """Return the figures of ended requests, except those that failed without a token."""
    stamps = [one for one in all_times if one.times]
    columns = (
        [one.ttft for one in stamps],
        [one.tpot for one in stamps if one.num_tokens > 1],
        [b - a for one in stamps for a, b in zip(one.times, one.times[1:], strict=False)],
        [one.e2el for one in stamps],
    )
    return Streaming(*(seconds * 1e3 for column in columns for seconds in _figures(column)))


def _figures(values: Sequence[float]) -> tuple[float, ...]:
    mean = statistics.fmean(values) if values else math.nan
    return (mean, *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values don't exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
