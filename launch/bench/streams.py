"""What the clients of streams see: when tokens come, and the figures made of that."""

import math
import time
from collections.abc import Sequence

from msgspec import Struct

from penstock.launch.session import Answer


class Streaming(Struct):
    """Median and 99th percentile, in milliseconds; NaN where outputs of one token have none."""

    ttft_ms: float
    """time to the first token"""
    ttft_p99_ms: float
    tpot_ms: float
    """time per output token of a request, the first left out"""
    tpot_p99_ms: float
    itl_ms: float
    """time from one message of a stream to the next, of all requests"""
    itl_p99_ms: float
    e2el_ms: float
    """time to the last token"""
    e2el_p99_ms: float


class Stamps:
    """When each message with tokens came for one request that was sent at `start`."""

    def __init__(self, start: float, answer: Answer) -> None:
        self.start = start
        self.times: list[float] = []
        self.num_tokens = 0
        self.answer = answer
        answer.on_change = self._stamp
        self._stamp()  # what came while it was sent

    def _stamp(self) -> None:
        while delta := self.answer.take_delta():
            if delta.token_ids:
                self.times.append(time.perf_counter())
                self.num_tokens += len(delta.token_ids)


def as_streaming(stamps: Sequence[Stamps]) -> Streaming:
    """The figures of requests that have ended."""
    columns = (
        [one.times[0] - one.start for one in stamps],
        [
            (one.times[-1] - one.times[0]) / (one.num_tokens - 1)
            for one in stamps
            if one.num_tokens > 1
        ],
        [b - a for one in stamps for a, b in zip(one.times, one.times[1:], strict=False)],
        [one.times[-1] - one.start for one in stamps],
    )
    return Streaming(
        *(percentile(seconds, share) * 1e3 for seconds in columns for share in (0.5, 0.99))
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them don't exceed; NaN if there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
